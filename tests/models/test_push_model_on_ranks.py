"""Models of which each rank has a part, pushed: the commit is that of one process, and rank 0 alone makes it."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from huggingface_hub import CommitInfo
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import hfshard
from hfshard.errors import HfshardError
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.viewing.screenshot import find_chromium
from tests.distributed.gloo import check_ranks
from tests.hub.on_ranks import talking_to
from tests.models.layouts import CONFIGS, forget_meshes, spread
from tests.models.specimens import SPECIMENS
from tests.saving.helpers import files_in
from tests.servers.hub.hub_server import HubServer
from tests.zoo.mixin_classes import with_mixin

SHARD_BYTES = 12_000
BY_USERS = {"llama_tied": "fsdp", "llama_untied": "pp"}
BY_TRANSFORMERS = {"llama_untied_even": "their_pp", "qwen3_moe_even": "their_ep"}
CHANGED = "model.layers.0.input_layernorm.weight"
"""Of a pipeline it is on one stage."""


def begin(place: Path) -> None:
    forget_meshes()
    tempfile.tempdir = str(place / "temporary")


def model_of(name: str, place: Path) -> Any:
    """A model of the zoo, whole where this process is alone."""
    is_alone = dist.get_world_size() == 1
    model_class: Any = with_mixin(SPECIMENS[name].stock_class)
    if name in BY_TRANSFORMERS:
        config = None if is_alone else DistributedConfig(**CONFIGS[BY_TRANSFORMERS[name]][1])
        return model_class.from_pretrained(place / "saved" / name, distributed_config=config)
    return spread(SPECIMENS[name].build(model_class), "whole" if is_alone else BY_USERS.get(name, "fsdp_by_turns"))


def push_many(rank: int, endpoint: str, place: Path, who: str) -> None:
    """Push each model as new; the first one again as it is, and with one tensor changed; and what a save wrote."""
    begin(place)
    said: dict[str, Any] = {}
    options: dict[str, Any] = {"max_shard_size": SHARD_BYTES}
    with talking_to(endpoint, place / f"{who}-{rank}", "hf_write" if rank == 0 else "hf_read"):
        for name in (*BY_USERS, *BY_TRANSFORMERS):
            repo = f"org/{who}-{name}"
            model = model_of(name, place)
            pushed = [model.push_to_hub(repo, commit_message="First", tags=["spread"], **options)]
            in_directory = model.push_to_hub(place / "hubs" / name, **options)
            with torch.no_grad():
                for parameter in [one for path, one in model.named_parameters() if path == CHANGED]:
                    parameter.zero_()
            if name == "llama_tied":
                model.save_pretrained(place / f"{who}-{name}", push_to_hub=True, repo_id=f"{repo}-saved", **options)
                pushed.append(model.push_to_hub(repo, create_pr=True, **options))
                for message in ("Changed", "Unchanged"):
                    pushed.append(model.push_to_hub(repo, revision="dev", commit_message=message, **options))
            assert all(type(one) is CommitInfo for one in pushed)
            said[name] = {
                "pushed": [[one.oid, one.commit_url, one.commit_message, one.pr_url] for one in pushed],
                "in_directory": in_directory.commit,
            }
    (place / f"{who}-{rank}.json").write_text(json.dumps(said))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "temporary").mkdir()
    return tmp_path


@pytest.mark.compat
def test_two_ranks_make_the_commits_of_one_process_by_as_many_requests(hub_server: HubServer, place: Path) -> None:
    for name in BY_TRANSFORMERS:
        SPECIMENS[name].build(with_mixin(SPECIMENS[name].stock_class)).save_pretrained(place / "saved" / name)
    requests, up = {}, {}
    for who, world_size in (("one", 1), ("two", 2)):
        hub_server.clear_log()
        check_ranks(place / f"ranks-{who}", world_size, push_many, hub_server.endpoint, place, who)
        requests[who] = Counter(request.kind for request in hub_server.log)
        up[who] = hub_server.bytes_up("lfs_put")
        assert {request.token for request in hub_server.log} <= {None, "hf_write"}
    assert requests["two"] == requests["one"]
    assert up["two"] == up["one"]

    one, two, other = (json.loads((place / f"{name}.json").read_text()) for name in ("one-0", "two-0", "two-1"))
    assert other == two
    for name, said in two.items():
        assert said["in_directory"] == one[name]["in_directory"]
        mine = hub_server.repo(f"org/two-{name}")
        for revision, *_ in said["pushed"]:
            assert mine.files(revision)
        assert mine.branches["main"] == said["pushed"][0][0]
        assert files_of(hub_server, f"org/two-{name}") == files_of(hub_server, f"org/one-{name}")
    tied = two["llama_tied"]["pushed"]
    assert [message for _, _, message, _ in tied] == ["First", "Upload LlamaForCausalLM", "Changed", "Unchanged"]
    assert [pr_url is not None for *_, pr_url in tied] == [False, True, False, False]
    assert tied[3][0] == tied[2][0] == hub_server.repo("org/two-llama_tied").branches["dev"]
    for revision in ("dev", "refs/pr/1"):
        changed = files_of(hub_server, "org/two-llama_tied", revision)
        assert changed == files_of(hub_server, "org/one-llama_tied", revision)
        assert changed == files_of(hub_server, "org/two-llama_tied-saved") | {"README.md": changed["README.md"]}
    assert not list((place / "temporary").iterdir())


def files_of(server: HubServer, repo: str, revision: str = "main") -> dict[str, bytes]:
    view = server.repo(repo)
    found = {path: view.read(path, revision) for path in view.files(revision)}
    assert "model.safetensors.index.json" in found
    return found


def push_to_directory(rank: int, place: Path, who: str) -> None:
    begin(place)
    model = model_of("qwen3_moe", place)
    pushed = model.push_to_hub(place / who)
    (place / f"{who}-{rank}.txt").write_text(f"{pushed.commit} {pushed.is_new} {pushed.sent_bytes}")
    for save in (model.save_pretrained, partial(hfshard.save_model, model)):
        with pytest.raises(HfshardError, match="contains commits"):
            save(place / who)


def test_four_ranks_make_the_commit_of_one_process(place: Path) -> None:
    for who, world_size in (("one", 1), ("four", 4)):
        check_ranks(place / f"ranks-{who}", world_size, push_to_directory, place, who)
    assert {path.read_text() for path in place.glob("*.txt")} == {(place / "one-0.txt").read_text()}
    assert len(list(place.glob("*.txt"))) == 5
    assert DirectoryHub.open(place / "four").resolve() == DirectoryHub.open(place / "one").resolve()


def push_with_a_card(rank: int, place: Path) -> None:
    begin(place)
    pushed = model_of("llama_tied", place).push_to_hub(place / "hub", card_picture=True)
    (place / f"{dist.get_world_size()}-{rank}.txt").write_text(pushed.commit)


@pytest.mark.skipif(find_chromium() is None, reason="no chromium: apt-get install chromium")
def test_two_ranks_push_the_card_of_the_whole_model(place: Path) -> None:
    check_ranks(place / "ranks-two", 2, push_with_a_card, place)

    [commit] = {path.read_text() for path in place.glob("2-*.txt")}
    files = Path(DirectoryHub.open(place / "hub").snapshot(commit))
    assert (files / "hfshard-card.png").read_bytes().startswith(b"\x89PNG")
    assert "\n| parameters | 17,664 |\n" in (files / "README.md").read_text()
    assert not list((place / "temporary").iterdir())


class Documented(hfshard.ShardedModelMixin, LlamaForCausalLM):
    """Saves a note, and a link to a file elsewhere, as users' classes do with tokenizers."""

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            (Path(save_directory) / "note.txt").write_text("a note")
            os.symlink(self.tokenizer_path, Path(save_directory) / "tokenizer.json")

    tokenizer_path: Path


def push_what_is_special(rank: int, place: Path) -> None:
    begin(place)
    model: Any = SPECIMENS["llama_tied"].build(Documented)
    model.tokenizer_path = place / "tokenizer.json"
    if dist.get_world_size() > 1:
        fully_shard(model, reshard_after_forward=False)
        model(torch.ones(1, 2, dtype=torch.int64))
    model.save_pretrained(place / f"saved-{dist.get_world_size()}", is_main_process=rank == 0)
    pushed = model.push_to_hub(place / "hub", variant="fp16")
    assert pushed.is_new == (dist.get_world_size() == 1)
    tree = DirectoryHub.open(place / "hub").tree()
    assert tree is not None
    assert {"note.txt", "tokenizer.json", "config.json", "model.fp16.safetensors"} <= tree.files.keys()
    assert (Path(pushed.url) / "tokenizer.json").read_bytes() == b"{}"


@pytest.mark.compat
def test_what_an_override_saves_is_pushed_with_its_links_and_right_after_a_forward_pass(place: Path) -> None:
    (place / "tokenizer.json").write_bytes(b"{}")
    for world_size in (1, 2):
        check_ranks(place / f"ranks-{world_size}", world_size, push_what_is_special, place)
    assert not list((place / "temporary").iterdir())
    assert files_in(place / "saved-2") == files_in(place / "saved-1")
