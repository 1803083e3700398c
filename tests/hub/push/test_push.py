"""A push is one commit that leaves the last save and the user's own; it sends what the Hub has not, without a copy."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.hub.models import contents, digest_of_seed, make_model, saved
from tests.hub.push.conftest import FOUR, MANY, SINGLE, PushHub, differences, index_of
from tests.hub.server_fixture import new_repo_id

USERS_OWN = {
    "README.md": b"# Mine\n",
    "tokenizer.json": b"{}",
    "special/model.safetensors": b"below",
    "model_ema-00001-of-00002.safetensors": b"average",
    "ema.safetensors.index.json": index_of("part-a.safetensors", "model-00007-of-00099.safetensors"),
    "part-a.safetensors": b"custom",
    "model-00007-of-00099.safetensors": b"looks like ours, and an index of the user's names it",
    "optimizer.bin": b"unrelated",
}


@pytest.fixture(scope="module")
def pushes(module_hub: PushHub, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A repo with files of the user's own, to which 1, 4, 9 and 1 shards of the seeds 1, 2, 3 and 4 were pushed."""
    hub, root, repo = module_hub, tmp_path_factory.mktemp("pushes"), new_repo_id()
    fp16 = contents(saved(root / "fp16", 9, FOUR, variant="fp16"))
    own = USERS_OWN | {name: raw for name, raw in fp16.items() if "fp16" in name}
    view = hub.server.create_repo(repo)
    view.commit(dict(own), "mine")
    found = SimpleNamespace(repo=repo, own=own, files=[], digests=[], before=[], heads=[], parents=[], results=[])
    for seed, limit in ((1, SINGLE), (2, FOUR), (3, MANY), (4, SINGLE)):
        found.before.append(view.branches["main"])
        found.results.append(hub.lands(saved(root / f"save-{seed}", seed, limit), repo, own).result)
        found.files.append(len(hub.files(repo)))
        found.digests.append(hub.loads(repo))
        found.heads.append(view.branches["main"])
        found.parents.append(view.commits()[0].parents)
    return found


@pytest.mark.compat
def test_each_push_leaves_exactly_the_last_save_and_the_users_own_files(pushes: SimpleNamespace) -> None:
    assert len(pushes.own) == 8 + 5  # 4 shards and their index
    weights = [1, 4 + 1, 9 + 1, 1]
    assert pushes.files == [13 + 1 + count for count in weights]  # and config.json


@pytest.mark.compat
def test_each_push_is_what_stock_transformers_loads(hub: PushHub, pushes: SimpleNamespace) -> None:
    assert pushes.digests == [digest_of_seed(seed) for seed in (1, 2, 3, 4)]
    assert hub.loads(pushes.repo, variant="fp16") == digest_of_seed(9)


@pytest.mark.compat
def test_each_push_is_one_commit_on_the_head_before_it(hub: PushHub, pushes: SimpleNamespace) -> None:
    assert pushes.parents == [(before,) for before in pushes.before]
    assert [(one["commit"], one["is_new"]) for one in pushes.results] == [(head, True) for head in pushes.heads]
    titles = [commit.title for commit in hub.view(pushes.repo).commits()]
    assert titles == ["Upload checkpoint"] * 4 + ["mine", "initial commit"]


@pytest.mark.parametrize("limit", [SINGLE, pytest.param(FOUR, marks=pytest.mark.compat)])
def test_push_over_a_stock_push_leaves_nothing_of_it(hub: PushHub, repo: str, tmp_path: Path, limit: str) -> None:
    hub.done("push_stock", 1, repo, max_shard_size=MANY)
    stocks = hub.files(repo)
    assert {"README.md", "config.json", "model.safetensors.index.json"} < stocks and len(stocks) == 3 + 7
    folder = saved(tmp_path / "save", 2, limit)
    hub.lands(folder, repo, {"README.md": hub.view(repo).read("README.md")})
    assert hub.loads(repo) == digest_of_seed(2)
    # and the other way round: what stock pushes over ours, we clear away again
    hub.done("push_stock", 3, repo, max_shard_size=MANY)
    hub.lands(folder, repo, {"README.md": hub.view(repo).read("README.md")})


@pytest.mark.parametrize("limit", [SINGLE, FOUR])
def test_push_clears_pickles_of_the_same_variant_alone(hub: PushHub, repo: str, tmp_path: Path, limit: str) -> None:
    shard = "pytorch_model-00001-of-00001.bin"
    own = {"pytorch_model.fp16.bin": b"fp16", "training_args.bin": b"arguments", "pytorch_model_v2.bin": b"v2"}
    pickles = {"pytorch_model.bin": b"old", shard: b"old", "pytorch_model.bin.index.json": index_of(shard)}
    hub.server.create_repo(repo).commit(own | pickles, "old")
    hub.lands(saved(tmp_path / "save", 2, limit), repo, own)


def test_push_clears_what_the_old_index_names_whatever_it_is_called(hub: PushHub, repo: str, folder: Path) -> None:
    # three.safetensors is another index's, too
    other = {"other.safetensors.index.json": index_of("three.safetensors")}
    kept = {"weights/one.safetensors": b"in a folder", "three.safetensors": b"3", **other}
    index = index_of("two.safetensors", "three.safetensors")
    hub.server.create_repo(repo).commit(
        {**kept, "two.safetensors": b"2", "model.safetensors.index.json": index}, "odd names"
    )
    hub.lands(folder, repo, kept)


@pytest.mark.compat
def test_push_to_a_new_repo_takes_5_requests_and_2_for_each_shard(hub: PushHub, repo: str, folder: Path) -> None:
    outcome = hub.push(folder, repo)
    assert hub.kinds() == {
        "create_repo": 1, "info": 1, "preupload": 1, "lfs_batch": 1, "lfs_put": 4, "lfs_verify": 4, "commit": 1
    }  # fmt: skip
    assert hub.server.count() == 5 + 2 * 4
    sizes = {name: len(raw) for name, raw in contents(folder).items()}
    assert hub.server.bytes_up("lfs_put") == sum(size for name, size in sizes.items() if name.endswith(".safetensors"))
    assert outcome.result["sent"] == sum(sizes.values())


@pytest.mark.compat
def test_unchanged_push_takes_2_requests_and_makes_no_commit(hub: PushHub, repo: str, folder: Path) -> None:
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
    assert hub.lands(tmp_path / "next", repo).result["is_new"]
    assert shard < hub.server.bytes_up() <= shard + 20_000
    assert (hub.kinds()["lfs_put"], hub.kinds()["lfs_complete"]) == (0, 1)  # it goes up in parts of 1 MB


def test_shards_that_only_change_their_names_are_not_sent_again(hub: PushHub, repo: str, folder: Path) -> None:
    hub.push(folder, repo)
    for path in folder.glob("model*"):
        path.rename(folder / path.name.replace("-of-00004", "-of-00005"))
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("-of-00004", "-of-00005"))
    hub.lands(folder, repo)
    assert (hub.kinds()["lfs_put"], hub.kinds()["commit"]) == (0, 1)
    assert hub.server.bytes_up() < 20_000
    assert hub.loads(repo) == digest_of_seed(1)


@pytest.fixture(scope="module")
def model_pushes(module_hub: PushHub) -> SimpleNamespace:
    """A repo to which one model was pushed with a tag, then without one, then with another tag."""
    repo, requests, found = new_repo_id(), [], []
    options: list[dict[str, Any]] = [{"tags": ["mine"]}, {}, {"tags": "other"}]
    for one in options:
        module_hub.server.clear_log()
        module_hub.done("push_model", 1, repo, max_shard_size=FOUR, **one)
        view = module_hub.view(repo)
        requests.append(module_hub.kinds())
        found.append(({path: view.read(path) for path in module_hub.files(repo)}, view.branches["main"]))
    files, heads = zip(*found)
    return SimpleNamespace(repo=repo, requests=requests, files=files, heads=heads, commits=len(view.commits()))


@pytest.mark.compat
def test_model_is_pushed_with_a_card_in_as_many_requests(model_pushes: SimpleNamespace, folder: Path) -> None:
    files = model_pushes.files[0]
    assert model_pushes.requests[0].total() == 5 + 2 * 4
    assert b"library_name: transformers" in files["README.md"]
    assert b"tags:\n- mine\n" in files["README.md"]
    assert files == contents(folder) | {"README.md": files["README.md"]}


@pytest.mark.compat
def test_pushed_model_is_what_stock_transformers_loads(hub: PushHub, model_pushes: SimpleNamespace) -> None:
    assert hub.loads(model_pushes.repo, revision=model_pushes.heads[0]) == digest_of_seed(1)


@pytest.mark.compat
def test_model_that_did_not_change_is_not_pushed_again(model_pushes: SimpleNamespace) -> None:
    assert model_pushes.requests[1] == {"create_repo": 1, "info": 1}


@pytest.mark.compat
def test_another_tag_is_added_to_those_that_are_there_and_nothing_else_is_sent(model_pushes: SimpleNamespace) -> None:
    assert b"tags:\n- mine\n- other\n" in model_pushes.files[2]["README.md"]
    assert (model_pushes.requests[2]["lfs_put"], model_pushes.requests[2]["commit"]) == (0, 1)
    assert model_pushes.commits == 3


@pytest.mark.compat
def test_model_push_keeps_the_card_that_a_user_wrote(hub: PushHub, repo: str) -> None:
    card = "---\nlicense: mit\ntags:\n- one\n---\n\n# My words: ä\n"
    hub.server.create_repo(repo).commit({"README.md": card.encode()}, "card")
    hub.done("push_model", 1, repo)
    assert hub.view(repo).read("README.md") == card.encode()
    hub.done("push_model", 1, repo, tags=["two"])
    assert hub.view(repo).read("README.md") == card.replace("- one\n", "- one\n- two\n").encode()


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
    own = {"README.md": b"# Mine", "sub/notes.txt": b"n"}
    view = hub.server.create_repo(repo)
    view.commit(dict(own), "mine")
    for step in range(10):
        variant, folder = choice.choice([None, "fp16"]), choice.choice(["", "sub/"])
        limit = choice.choice([SINGLE, FOUR, MANY])
        head = view.branches["main"]
        files = contents(saved(tmp_path / f"{step}", step, limit, variant=variant))
        if choice.random() < 0.5:
            hub.push(tmp_path / f"{step}", repo, path_in_repo=folder)
        else:
            hub.done("push_model", step, repo, variant=variant, max_shard_size=limit, path_in_repo=folder)
        own[f"{folder}config.json"] = files.pop("config.json")
        expected[folder, variant] = {f"{folder}{name}": raw for name, raw in files.items()}
        everything = {name: raw for files in expected.values() for name, raw in files.items()}
        assert differences(hub, repo, everything | own) == {}, f"step {step}"
        assert view.commits()[0].parents == (head,)


SHARDED, WHOLE = "5MB", "100MB"
OTHER_READS = 1_000_000
"""Bytes: Python's own files, config and index, and the samples of 4 KiB of each of the 23 tensors (94 kB)."""
SMALL_WRITES = 64 * 1024
"""Bytes: what no file may grow beyond (RLIMIT_FSIZE: whatever call writes it), and all writes together stay below."""


def weights_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_counters_and_the_limit_see_what_a_save_writes(hub: PushHub, repo: str, tmp_path: Path) -> None:
    outcome = hub.done("save_and_push", 1, tmp_path / "save", repo_id=repo)
    assert weights_of(tmp_path / "save") == 55_296
    assert outcome.written >= 55_296
    limited = hub.start("save_and_push", 1, tmp_path / "other", repo_id=repo, largest_file=50_000).outcome()
    assert limited.error is not None and "File too large" in limited.message


@pytest.fixture
def five(tmp_path: Path) -> Path:
    """A saved model of 5 shards and 15.8 MB."""
    return saved(tmp_path / "save", 1, SHARDED, size="large")


@pytest.mark.compat
def test_sharded_directory_is_read_once_and_nothing_is_written(hub: PushHub, repo: str, five: Path) -> None:
    weights, before = weights_of(five), contents(five)
    assert weights > 15_800_000
    outcome = hub.lands(five, repo, largest_file=SMALL_WRITES)
    assert weights <= outcome.read <= weights + OTHER_READS
    assert outcome.written <= SMALL_WRITES
    assert contents(five) == before


@pytest.mark.compat
def test_single_file_is_read_twice_and_nothing_is_written(hub: PushHub, repo: str, tmp_path: Path) -> None:
    # Its own checksum, which it holds, is not the sha256 that the Hub wants: it is hashed, and then sent.
    folder = saved(tmp_path / "save", 1, WHOLE, size="large")
    outcome = hub.push(folder, repo, largest_file=SMALL_WRITES)
    assert outcome.read <= 2 * weights_of(folder) + OTHER_READS
    assert outcome.written <= SMALL_WRITES


def test_unchanged_sharded_directory_is_not_read(hub: PushHub, repo: str, five: Path) -> None:
    hub.push(five, repo)
    assert hub.push(five, repo, largest_file=SMALL_WRITES).read <= OTHER_READS


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        pytest.param("bert", SHARDED, marks=pytest.mark.compat),
        ("bert", WHOLE),
        ("transposed", SHARDED),
        ("tied", WHOLE),
    ],
)
def test_model_is_pushed_from_memory_as_the_files_that_a_save_writes(
    hub: PushHub, repo: str, tmp_path: Path, kind: str, limit: str
) -> None:
    model = {"kind": kind, "size": "large"}
    outcome = hub.done("push_model", 1, repo, model=model, max_shard_size=limit, largest_file=SMALL_WRITES)
    assert outcome.written <= SMALL_WRITES
    assert outcome.read <= OTHER_READS
    expected = contents(saved(tmp_path / "save", 1, limit, **model))
    assert differences(hub, repo, expected | {"README.md": hub.view(repo).read("README.md")}) == {}
    assert len(expected) == (2 if limit == WHOLE else 7)


@pytest.mark.parametrize("limit", [SINGLE, FOUR, MANY])
@pytest.mark.parametrize("kind", ["bert", "transposed", "tied"])
def test_model_in_small_files_is_pushed_as_the_files_that_a_save_writes(
    hub: PushHub, repo: str, tmp_path: Path, kind: str, limit: str
) -> None:
    hub.done("push_model", 1, repo, model={"kind": kind}, max_shard_size=limit, variant="fp16")
    expected = contents(saved(tmp_path / "save", 1, limit, variant="fp16", kind=kind))
    assert differences(hub, repo, expected | {"README.md": hub.view(repo).read("README.md")}) == {}
