"""Pulls from the Hub: how many requests and bytes, what lies in the cache, and that stock tools share it both ways."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hfshard
from tests.hub.models import digest_of, make_model
from tests.hub.pull.lab import PullLab, cached, files_of, lab, repo, saved
from tests.pretrained.load.test_custom_code import LAYERS, MODEL

pytestmark = pytest.mark.compat
__all__ = ["lab", "repo"]

SHARD = 10_000
"""Bytes: the small model of 52,352 bytes of weights then has 9 shards."""


@pytest.fixture
def sharded(lab: PullLab, repo: str, tmp_path: Path) -> str:
    """The commit of a repo with a small model of 9 shards."""
    folder = saved(tmp_path / "saved", 1, SHARD)
    assert len(list(folder.glob("*.safetensors"))) == 9
    (folder / "README.md").write_text("# A model\n")
    (folder / "tokenizer.json").write_text("{}\n")
    return lab.publish(repo, folder)


def test_cold_load_takes_one_request_a_shard_and_four_more(
    lab: PullLab, repo: str, sharded: str, tmp_path: Path
) -> None:
    weights = sum(path.stat().st_size for path in (tmp_path / "saved").glob("*.safetensors"))

    ours = lab.call("load", repo, tmp_path / "cache")

    # One tells the commit and its files, one the storage URLs of all shards; config.json and the index.
    assert lab.kinds() == {"info": 1, "lfs_batch": 1, "resolve_get": 2, "storage_get": 9}
    assert lab.weights_down(repo) == weights
    assert [path.parent.name for path in cached(tmp_path / "cache", repo, "snapshots")] == [sharded] * 11
    theirs = lab.call("load_stock", repo, tmp_path / "theirs")
    assert ours == theirs
    assert lab.hub.count() >= 26  # of ours it were 13


def test_warm_load_takes_one_request_and_none_for_a_commit(
    lab: PullLab, repo: str, sharded: str, tmp_path: Path
) -> None:
    first = lab.call("load", repo, tmp_path / "cache")

    assert lab.call("load", repo, tmp_path / "cache") == first
    assert lab.kinds() == {"info": 1}
    assert lab.call("load", repo, tmp_path / "cache", revision=sharded) == first
    assert lab.kinds() == {}
    assert lab.call("load_auto", repo, tmp_path / "cache", revision=sharded)["digest"] == first["digest"]
    assert lab.kinds() == {}
    assert lab.call("load", repo, tmp_path / "cache", local_files_only=True) == first
    assert lab.call("load", repo, tmp_path / "cache", settings={"HF_HUB_OFFLINE": True}) == first
    assert lab.kinds() == {}


@pytest.mark.parametrize("limit", [SHARD, "10MB"])
def test_what_stock_pulled_is_loaded_without_a_download(
    limit: int | str, lab: PullLab, repo: str, tmp_path: Path
) -> None:
    commit = lab.publish(repo, saved(tmp_path / "saved", 1, limit))
    theirs = lab.call("load_stock", repo, tmp_path / "cache")

    assert lab.call("load", repo, tmp_path / "cache") == theirs
    assert lab.kinds() == {"info": 1}
    assert lab.call("load", repo, tmp_path / "cache", revision=commit) == theirs
    assert lab.kinds() == {}


def test_stock_finds_all_that_was_pulled(lab: PullLab, repo: str, sharded: str, tmp_path: Path) -> None:
    directory = lab.call("pull", repo, cache_dir=tmp_path / "cache")
    names = sorted(["README.md", ".gitattributes", *files_of(tmp_path / "saved")])
    names = sorted(set(names))
    assert Path(directory) == tmp_path / "cache" / ("models--" + repo.replace("/", "--")) / "snapshots" / sharded
    assert sorted(files_of(Path(directory))) == names

    assert lab.call("stock_snapshot", repo, tmp_path / "cache", local_files_only=True) == names
    sizes = lab.call("stock_files", repo, tmp_path / "cache", names, local_files_only=True)
    assert sizes == [(Path(directory) / name).stat().st_size for name in names]
    assert lab.kinds() == {}
    theirs = lab.call("load_stock", repo, tmp_path / "cache", local_files_only=True)
    assert lab.kinds() == {}
    assert theirs == lab.call("load_stock", repo, tmp_path / "cache", revision=sharded)
    assert lab.kinds().keys() <= OLD_STOCK_ASKS


def test_stock_downloads_nothing_after_our_load(lab: PullLab, repo: str, sharded: str, tmp_path: Path) -> None:
    ours = lab.call("load", repo, tmp_path / "cache")

    assert lab.call("load_stock", repo, tmp_path / "cache", revision=sharded) == ours
    assert lab.kinds().keys() <= OLD_STOCK_ASKS
    lab.call("load_stock", repo, tmp_path / "cache")
    assert lab.weights_down(repo) == 0


def test_cache_is_laid_out_as_huggingface_hub_lays_it_out(
    lab: PullLab, repo: str, sharded: str, tmp_path: Path
) -> None:
    lab.call("pull", repo, cache_dir=tmp_path / "ours", umask=0o027)
    lab.call("stock_snapshot", repo, tmp_path / "theirs", umask=0o027)

    ours, theirs = (
        {str(path.relative_to(cache)): path for path in cache.rglob("*") if not path.is_dir()}
        for cache in (tmp_path / "ours", tmp_path / "theirs")
    )

    folder = "models--" + repo.replace("/", "--")
    tree = f"{folder}/trees/{sharded}.json"
    marks = {f"{folder}/.no_exist/{sharded}/{name}" for name in MISSING}
    assert ours.keys() ^ theirs.keys() == {tree} | marks
    shared = ours.keys() & theirs.keys()
    assert {name: ours[name].readlink() for name in shared if ours[name].is_symlink()} == {
        name: theirs[name].readlink() for name in shared if theirs[name].is_symlink()
    }
    assert {name: oct(ours[name].stat().st_mode) for name in shared if "locks" not in name} == {
        name: oct(theirs[name].stat().st_mode) for name in shared if "locks" not in name
    }
    blob = cached(tmp_path / "ours", repo)[0]
    assert stat.S_IMODE(blob.stat().st_mode) == 0o640


OLD_STOCK_ASKS = {"resolve_head", "tree"}
"""What transformers 5.17 asks for about a commit even after its own download; newer ones ask nothing."""

MISSING = ("adapter_config.json", "generation_config.json", "model.safetensors")
"""What readers look for and the repo has not."""


def test_new_commit_brings_only_what_changed(lab: PullLab, repo: str, sharded: str, tmp_path: Path) -> None:
    lab.call("load", repo, tmp_path / "cache")
    changed = files_of(saved(tmp_path / "changed", 2, SHARD))
    one = "model-00003-of-00009.safetensors"
    newer = lab.view(repo).commit({one: changed[one]}, "Another shard")

    lab.call("read", repo, tmp_path / "cache", verify="none", revision="main")

    assert lab.kinds() == {"info": 1, "lfs_batch": 1, "storage_get": 1}
    assert lab.weights_down(repo) == len(changed[one])
    # Both are there, side by side.
    before = lab.call("load", repo, tmp_path / "cache", revision=sharded)
    assert before["digest"] == digest_of(make_model(1).state_dict())
    assert lab.kinds() == {}
    assert {path.parent.name for path in cached(tmp_path / "cache", repo, "snapshots")} == {sharded, newer}


def test_branch_tag_and_pull_request_are_pulled_by_name(lab: PullLab, repo: str, tmp_path: Path) -> None:
    old = lab.publish(repo, saved(tmp_path / "old", 1))
    new = lab.publish(repo, saved(tmp_path / "new", 2))
    pr = lab.call("stock_refs", repo, old)
    assert pr == "refs/pr/1"
    before, after = (digest_of(make_model(seed).state_dict()) for seed in (1, 2))
    at = {"main": after, "feature/x": before, "v1": before, old: before, new: after, pr: after}
    for revision, digest in at.items():
        assert lab.call("load", repo, tmp_path / "cache", revision=revision)["digest"] == digest
        ours = lab.call("load", repo, tmp_path / "cache", revision=revision, local_files_only=True)
        assert ours["digest"] == digest
    assert "extra.txt" in files_of(Path(lab.call("pull", repo, cache_dir=tmp_path / "cache", revision=pr)))


def test_model_that_generates_takes_one_request_more(lab: PullLab, repo: str, tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    model: Any = LlamaForCausalLM(config)
    model.generation_config.update(do_sample=True, top_k=7)
    model.save_pretrained(tmp_path / "saved")
    commit = lab.publish(repo, tmp_path / "saved")

    cold = lab.call("load_causal", repo, tmp_path / "cache")

    assert cold["top_k"] == 7
    assert lab.kinds() == {"info": 1, "lfs_batch": 1, "resolve_get": 2, "storage_get": 1}
    assert lab.call("load_causal", repo, tmp_path / "cache") == cold
    assert lab.kinds() == {"info": 1}
    assert lab.call("load_causal", repo, tmp_path / "cache", revision=commit) == cold
    assert lab.kinds() == {}
    # Without a generation config, too, nobody asks for it twice.
    bare = lab.view(repo).commit({"generation_config.json": None}, "Generate by the defaults")
    lab.call("load_causal", repo, tmp_path / "cache")
    assert lab.kinds() == {"info": 1}
    lab.call("load_causal", repo, tmp_path / "cache", revision=bare)
    assert lab.kinds() == {}


def test_code_of_the_repo_comes_with_the_commit(lab: PullLab, repo: str, tmp_path: Path) -> None:
    code = {"AutoConfig": "zoo_model.ZooConfig", "AutoModel": "zoo_model.ZooModel"}
    config = {"model_type": "zoo_custom", "auto_map": code}
    tensors = {"proj.weight": torch.ones(8, 8), "proj.bias": torch.ones(8), "scale.scale": torch.ones(8)}
    hfshard.save_state_dict(tensors | {"steps": torch.tensor(1)}, tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
    (tmp_path / "saved" / "zoo_model.py").write_text(MODEL)
    (tmp_path / "saved" / "zoo_layers.py").write_text(LAYERS)
    commit = lab.publish(repo, tmp_path / "saved")
    lab.view(repo).commit({"zoo_model.py": MODEL.replace("nn.Linear", "Broken").encode()}, "Break the code")

    cold = lab.call("load_auto", repo, tmp_path / "cache", revision=commit, trust_remote_code=True)

    # One file more for the code, and one for the file beside it.
    assert lab.kinds() == {"info": 1, "lfs_batch": 1, "resolve_get": 3, "storage_get": 1}
    assert lab.call("load_auto", repo, tmp_path / "cache", revision=commit, trust_remote_code=True) == cold
    assert lab.kinds() == {}


def test_two_processes_fetch_every_file_once(lab: PullLab, repo: str, sharded: str, tmp_path: Path) -> None:
    weights = sum(path.stat().st_size for path in (tmp_path / "saved").glob("*.safetensors"))
    tasks = [lab.start("load", repo, tmp_path / "cache") for _ in range(3)]

    outcomes = [task.outcome() for task in tasks]

    assert [outcome.error for outcome in outcomes] == [None, None, None], outcomes
    assert len({outcome.result["digest"] for outcome in outcomes}) == 1
    assert lab.weights_down(repo) == weights
