"""A push is one commit that leaves what was saved last, and the user's own; it sends only what the Hub has not."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hub.models import contents, digest_of_seed, make_model, saved
from tests.hub.push.push_hub import PushHub, differences
from tests.hub.server_fixture import new_repo_id

SINGLE, FOUR, MANY = "10MB", "20KB", "9KB"
"""Limits: one file; 4 shards; 9 shards (the largest tensor has 8,448 bytes)."""

CUSTOM_INDEX = json.dumps(
    {"metadata": {}, "weight_map": {"a": "part-a.safetensors", "b": "model-00007-of-00099.safetensors"}}
).encode()

USERS_OWN = {
    "README.md": b"# Mine\n",
    "tokenizer.json": b"{}",
    "special/model.safetensors": b"below",
    "model_ema-00001-of-00002.safetensors": b"average",
    "ema.safetensors.index.json": CUSTOM_INDEX,
    "part-a.safetensors": b"custom",
    "model-00007-of-00099.safetensors": b"looks like ours, and an index of the user's names it",
    "optimizer.bin": b"unrelated",
}


@dataclass(frozen=True)
class Push:
    """One push of several to a repo, and the repo right after it."""

    wrong: dict[str, str]
    """File -> how it differs from the user's own and the last save."""
    files: int
    digest: str
    """Of what stock transformers loads."""
    before: str
    head: str
    parents: tuple[str, ...]
    result: dict[str, Any]


@dataclass(frozen=True)
class Pushes:
    """Four pushes to a repo that has files of the user's own."""

    repo: str
    own: dict[str, bytes]
    steps: list[Push]


@pytest.fixture(scope="module")
def pushes(module_hub: PushHub, tmp_path_factory: pytest.TempPathFactory) -> Pushes:
    """Pushes of 1, 4, 9 and 1 shards, of the seeds 1, 2, 3 and 4."""
    hub, root, repo = module_hub, tmp_path_factory.mktemp("pushes"), new_repo_id()
    fp16 = contents(saved(root / "fp16", 9, FOUR, variant="fp16"))
    own = USERS_OWN | {name: raw for name, raw in fp16.items() if "fp16" in name}
    view = hub.server.create_repo(repo)
    view.commit(dict(own), "mine")
    steps = []
    for seed, limit in ((1, SINGLE), (2, FOUR), (3, MANY), (4, SINGLE)):
        before = view.branches["main"]
        folder = saved(root / f"save-{seed}", seed, limit)
        result = hub.push(folder, repo).result
        wrong = differences(hub, repo, own | contents(folder))
        parents = view.commits()[0].parents
        steps.append(Push(wrong, len(hub.files(repo)), hub.loads(repo), before, view.branches["main"], parents, result))
    return Pushes(repo, own, steps)


@pytest.mark.compat
def test_each_push_leaves_exactly_the_last_save_and_the_users_own_files(pushes: Pushes) -> None:
    assert len(pushes.own) == 8 + 5  # 4 shards and their index
    assert [step.wrong for step in pushes.steps] == [{}, {}, {}, {}]
    weights = [1, 4 + 1, 9 + 1, 1]
    assert [step.files for step in pushes.steps] == [13 + 1 + count for count in weights]  # and config.json


@pytest.mark.compat
def test_each_push_is_what_stock_transformers_loads(hub: PushHub, pushes: Pushes) -> None:
    assert [step.digest for step in pushes.steps] == [digest_of_seed(seed) for seed in (1, 2, 3, 4)]
    assert hub.loads(pushes.repo, variant="fp16") == digest_of_seed(9)


@pytest.mark.compat
def test_each_push_is_one_commit_on_the_head_before_it(hub: PushHub, pushes: Pushes) -> None:
    assert [step.parents for step in pushes.steps] == [(step.before,) for step in pushes.steps]
    told = [(step.result["commit"], step.result["is_new"]) for step in pushes.steps]
    assert told == [(step.head, True) for step in pushes.steps]
    titles = [commit.title for commit in hub.view(pushes.repo).commits()]
    assert titles == ["Upload checkpoint"] * 4 + ["mine", "initial commit"]


@pytest.mark.parametrize("limit", [SINGLE, pytest.param(FOUR, marks=pytest.mark.compat)])
def test_push_over_a_stock_push_leaves_nothing_of_it(hub: PushHub, repo: str, tmp_path: Path, limit: str) -> None:
    hub.call("push_stock", 1, repo, max_shard_size="9KB")
    stocks = hub.files(repo)
    assert {"README.md", "config.json", "model.safetensors.index.json"} < stocks and len(stocks) == 3 + 7
    folder = saved(tmp_path / "save", 2, limit)
    hub.push(folder, repo)
    readme = {"README.md": hub.view(repo).read("README.md")}
    assert differences(hub, repo, contents(folder) | readme) == {}
    assert hub.loads(repo) == digest_of_seed(2)
    # and the other way round: what stock pushes over ours, we clear away again
    hub.call("push_stock", 3, repo, max_shard_size="9KB")
    hub.push(folder, repo)
    assert differences(hub, repo, contents(folder) | {"README.md": hub.view(repo).read("README.md")}) == {}


@pytest.mark.parametrize("limit", [SINGLE, FOUR])
def test_push_clears_pickles_of_the_same_variant_alone(hub: PushHub, repo: str, tmp_path: Path, limit: str) -> None:
    shard = "pytorch_model-00001-of-00001.bin"
    index = json.dumps({"metadata": {}, "weight_map": {"a": shard}}).encode()
    own = {"pytorch_model.fp16.bin": b"fp16", "training_args.bin": b"arguments", "pytorch_model_v2.bin": b"v2"}
    pickles = {"pytorch_model.bin": b"old", shard: b"old", "pytorch_model.bin.index.json": index}
    hub.server.create_repo(repo).commit(own | pickles, "old")
    folder = saved(tmp_path / "save", 2, limit)
    hub.push(folder, repo)
    assert differences(hub, repo, contents(folder) | own) == {}


def test_push_clears_what_the_old_index_names_whatever_it_is_called(hub: PushHub, repo: str, tmp_path: Path) -> None:
    old = {"weights/one.safetensors": b"in a folder", "two.safetensors": b"2", "three.safetensors": b"3"}
    index = json.dumps({"metadata": {}, "weight_map": {"a": "two.safetensors", "b": "three.safetensors"}}).encode()
    other = json.dumps({"metadata": {}, "weight_map": {"b": "three.safetensors"}}).encode()
    hub.server.create_repo(repo).commit(
        {**old, "model.safetensors.index.json": index, "other.safetensors.index.json": other}, "odd names"
    )
    folder = saved(tmp_path / "save", 2, FOUR)
    hub.push(folder, repo)
    # three.safetensors is another index's, too
    kept = {path: old[path] for path in ("weights/one.safetensors", "three.safetensors")}
    assert differences(hub, repo, contents(folder) | kept | {"other.safetensors.index.json": other}) == {}


@pytest.mark.compat
def test_push_to_a_new_repo_takes_5_requests_and_2_for_each_shard(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1, FOUR)
    outcome = hub.push(folder, repo)
    assert hub.kinds() == {
        "create_repo": 1, "info": 1, "preupload": 1, "lfs_batch": 1, "lfs_put": 4, "lfs_verify": 4, "commit": 1
    }  # fmt: skip
    assert hub.server.count() == 5 + 2 * 4
    sizes = {name: len(raw) for name, raw in contents(folder).items()}
    assert hub.server.bytes_up("lfs_put") == sum(size for name, size in sizes.items() if name.endswith(".safetensors"))
    assert outcome.result["sent"] == sum(sizes.values())


@pytest.mark.compat
def test_unchanged_push_takes_2_requests_and_makes_no_commit(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1, FOUR)
    first = hub.push(folder, repo).result
    again = hub.push(folder, repo).result
    assert hub.kinds() == {"create_repo": 1, "info": 1}
    assert hub.server.bytes_up() == hub.server.bytes_up("create_repo") < 100
    assert again == {**first, "is_new": False, "sent": 0}
    assert len(hub.view(repo).commits()) == 2


def test_push_of_one_changed_tensor_sends_its_shard_and_little_more(hub: PushHub, repo: str, tmp_path: Path) -> None:
    model = make_model(1, size="large")
    model.save_pretrained(tmp_path / "save", max_shard_size="5MB")
    hub.push(tmp_path / "save", repo)
    with torch.no_grad():
        model.get_parameter("pooler.dense.bias")[0] += 1
    # into another directory: over itself, a save cuts shards of other names, and so others
    model.save_pretrained(tmp_path / "next", max_shard_size="5MB")
    index = json.loads((tmp_path / "next/model.safetensors.index.json").read_bytes())
    assert len(set(index["weight_map"].values())) == 5
    shard = (tmp_path / "next" / index["weight_map"]["pooler.dense.bias"]).stat().st_size
    assert hub.push(tmp_path / "next", repo).result["is_new"]
    assert shard < hub.server.bytes_up() <= shard + 20_000
    assert differences(hub, repo, contents(tmp_path / "next")) == {}
    assert (hub.kinds()["lfs_put"], hub.kinds()["lfs_complete"]) == (0, 1)  # it goes up in parts of 1 MB


def test_shards_that_only_change_their_names_are_not_sent_again(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1, FOUR)
    hub.push(folder, repo)
    for path in folder.glob("model*"):
        path.rename(folder / path.name.replace("model", "model", 1).replace("-of-00004", "-of-00005"))
    index = (folder / "model.safetensors.index.json").read_text().replace("-of-00004", "-of-00005")
    (folder / "model.safetensors.index.json").write_text(index)
    hub.push(folder, repo)
    assert differences(hub, repo, contents(folder)) == {}
    assert (hub.kinds()["lfs_put"], hub.kinds()["commit"]) == (0, 1)
    assert hub.server.bytes_up() < 20_000
    assert hub.loads(repo) == digest_of_seed(1)


@dataclass(frozen=True)
class ModelPush:
    """One push of a model, and the repo right after it."""

    requests: Counter[str]
    readme: bytes
    files: dict[str, bytes]
    head: str
    commits: int


@pytest.fixture(scope="module")
def model_pushes(module_hub: PushHub) -> tuple[str, list[ModelPush]]:
    """A repo to which one model was pushed with a tag, then without one, then with another tag."""
    hub, repo, pushes = module_hub, new_repo_id(), []
    options: list[dict[str, Any]] = [{"tags": ["mine"]}, {}, {"tags": "other"}]
    for one in options:
        hub.server.clear_log()
        hub.call("push_model", 1, repo, max_shard_size=FOUR, **one)
        view = hub.view(repo)
        files = {path: view.read(path) for path in hub.files(repo)}
        pushes.append(ModelPush(hub.kinds(), view.read("README.md"), files, view.branches["main"], len(view.commits())))
    return repo, pushes


@pytest.mark.compat
def test_model_is_pushed_with_a_card_in_as_many_requests(
    model_pushes: tuple[str, list[ModelPush]], tmp_path: Path
) -> None:
    first = model_pushes[1][0]
    assert first.requests.total() == 5 + 2 * 4
    assert b"library_name: transformers" in first.readme
    assert b"tags:\n- mine\n" in first.readme
    assert first.files == contents(saved(tmp_path / "save", 1, FOUR)) | {"README.md": first.readme}


@pytest.mark.compat
def test_pushed_model_is_what_stock_transformers_loads(hub: PushHub, model_pushes: tuple[str, list[ModelPush]]) -> None:
    repo, (first, _, _) = model_pushes
    assert hub.loads(repo, revision=first.head) == digest_of_seed(1)


@pytest.mark.compat
def test_model_that_did_not_change_is_not_pushed_again(model_pushes: tuple[str, list[ModelPush]]) -> None:
    assert model_pushes[1][1].requests == {"create_repo": 1, "info": 1}


@pytest.mark.compat
def test_another_tag_is_added_to_those_that_are_there_and_nothing_else_is_sent(
    model_pushes: tuple[str, list[ModelPush]],
) -> None:
    third = model_pushes[1][2]
    assert b"tags:\n- mine\n- other\n" in third.readme
    assert (third.requests["lfs_put"], third.requests["commit"]) == (0, 1)
    assert third.commits == 3


@pytest.mark.compat
def test_model_push_keeps_the_card_that_a_user_wrote(hub: PushHub, repo: str) -> None:
    card = b"---\nlicense: mit\ntags:\n- one\n---\n\n# My words: \xc3\xa4\n"
    hub.server.create_repo(repo).commit({"README.md": card}, "card")
    hub.call("push_model", 1, repo)
    assert hub.view(repo).read("README.md") == card
    hub.call("push_model", 1, repo, tags=["two"])
    assert hub.view(repo).read("README.md") == (
        "---\nlicense: mit\ntags:\n- one\n- two\n---\n\n# My words: ä\n".encode()
    )


def test_saved_twice_into_one_directory_pushes_like_saved_once(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(saved(saved(tmp_path / "save", 1, MANY), 2, FOUR), 3, SINGLE)
    hub.push(folder, repo)
    assert differences(hub, repo, contents(saved(tmp_path / "once", 3, SINGLE))) == {}


@pytest.mark.parametrize("seed", [1, 2])
def test_any_sequence_of_pushes_leaves_the_last_of_each_kind(
    hub: PushHub, repo: str, tmp_path: Path, seed: int
) -> None:
    choice = random.Random(seed)
    expected: dict[tuple[str, str | None], dict[str, bytes]] = {}
    configs: dict[str, bytes] = {}
    view = hub.server.create_repo(repo)
    view.commit({"README.md": b"# Mine", "sub/notes.txt": b"n"}, "mine")
    for step in range(10):
        variant, folder = choice.choice([None, "fp16"]), choice.choice(["", "sub/"])
        limit = choice.choice([SINGLE, FOUR, MANY])
        head = view.branches["main"]
        if choice.random() < 0.5:
            files = contents(saved(tmp_path / f"{step}", step, limit, variant=variant))
            hub.push(tmp_path / f"{step}", repo, path_in_repo=folder)
        else:
            files = contents(saved(tmp_path / f"{step}", step, limit, variant=variant))
            hub.call("push_model", step, repo, variant=variant, max_shard_size=limit, path_in_repo=folder)
        configs[f"{folder}config.json"] = files.pop("config.json")
        expected[folder, variant] = {f"{folder}{name}": raw for name, raw in files.items()}
        everything = {name: raw for files in expected.values() for name, raw in files.items()}
        own = {"README.md": b"# Mine", "sub/notes.txt": b"n"}
        assert differences(hub, repo, everything | configs | own) == {}, f"step {step}"
        assert view.commits()[0].parents == (head,)
