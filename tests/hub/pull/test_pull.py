"""Pulls from the Hub: how many requests and bytes, what lies in the cache, and that stock tools share it both ways."""

from __future__ import annotations

import json
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertModel, LlamaConfig, LlamaForCausalLM

import hfshard
from tests.helpers.tiny_bert import bert
from tests.hub.models import digest_of, files_of, make_model, saved
from tests.hub.pull.pull_hub import PullHub, cached
from tests.hub.server_fixture import new_repo_id
from tests.models.load.test_custom_code import LAYERS, MODEL

pytestmark = pytest.mark.compat
SHARD = 10_000
"""Bytes: the small model of 52,352 bytes of weights then has 9 shards."""


def publish_sharded(hub: PullHub, repo: str, folder: Path) -> str:
    """Make a repo with a small model of 9 shards, a README and a tokenizer; gives the commit."""
    saved(folder, 1, SHARD)
    assert len(list(folder.glob("*.safetensors"))) == 9
    (folder / "README.md").write_text("# A model\n")
    (folder / "tokenizer.json").write_text("{}\n")
    return hub.publish(repo, folder)


@pytest.fixture
def sharded(hub: PullHub, repo: str, tmp_path: Path) -> str:
    """The commit of a repo with a small model of 9 shards."""
    return publish_sharded(hub, repo, tmp_path / "saved")


Loads = dict[str, tuple[dict[str, Any], Counter[str]]]
"""Name -> what a load gives, and its requests by kind."""


@dataclass(frozen=True)
class Pulled:
    """A repo of 9 shards, and a cache that has it."""

    repo: str
    commit: str
    saved: Path
    cache: Path
    result: Any
    """Of the call that filled the cache."""


@pytest.fixture(scope="module")
def loaded(module_hub: PullHub, tmp_path_factory: pytest.TempPathFactory) -> Pulled:
    """A repo that was loaded once."""
    root, repo = tmp_path_factory.mktemp("loaded"), new_repo_id()
    commit = publish_sharded(module_hub, repo, root / "saved")
    return Pulled(repo, commit, root / "saved", root / "cache", module_hub.call("load", repo, root / "cache"))


@pytest.fixture(scope="module")
def pulled(module_hub: PullHub, tmp_path_factory: pytest.TempPathFactory) -> Pulled:
    """A repo of which all was pulled."""
    root, repo = tmp_path_factory.mktemp("pulled"), new_repo_id()
    commit = publish_sharded(module_hub, repo, root / "saved")
    directory = module_hub.call("pull", repo, cache_dir=root / "cache")
    return Pulled(repo, commit, root / "saved", root / "cache", Path(directory))


def test_cold_load_takes_one_request_a_shard_and_four_more(
    hub: PullHub, repo: str, sharded: str, tmp_path: Path
) -> None:
    weights = sum(path.stat().st_size for path in (tmp_path / "saved").glob("*.safetensors"))

    ours = hub.call("load", repo, tmp_path / "cache")

    # One tells the commit and its files, one the storage URLs of all shards; config.json and the index.
    assert hub.kinds() == {"info": 1, "lfs_batch": 1, "resolve_get": 2, "storage_get": 9}
    assert hub.weights_down(repo) == weights
    assert [path.parent.name for path in cached(tmp_path / "cache", repo, "snapshots")] == [sharded] * 11
    theirs = hub.call("load_stock", repo, tmp_path / "theirs")
    assert ours == theirs
    assert hub.server.count() >= 26  # of ours it were 13


def test_warm_load_takes_one_request(hub: PullHub, loaded: Pulled) -> None:
    assert hub.call("load", loaded.repo, loaded.cache) == loaded.result
    assert hub.kinds() == {"info": 1}


def test_warm_load_of_a_commit_takes_no_request(hub: PullHub, loaded: Pulled) -> None:
    assert hub.call("load", loaded.repo, loaded.cache, revision=loaded.commit) == loaded.result
    assert hub.kinds() == {}


def test_warm_load_of_a_commit_by_an_auto_class_takes_no_request(hub: PullHub, loaded: Pulled) -> None:
    auto = hub.call("load_auto", loaded.repo, loaded.cache, revision=loaded.commit)
    assert auto["digest"] == loaded.result["digest"]
    assert hub.kinds() == {}


@pytest.mark.parametrize("options", [{"local_files_only": True}, {"settings": {"HF_HUB_OFFLINE": True}}], ids=str)
def test_warm_load_without_the_network_takes_no_request(options: dict[str, Any], hub: PullHub, loaded: Pulled) -> None:
    assert hub.call("load", loaded.repo, loaded.cache, **options) == loaded.result
    assert hub.kinds() == {}


@pytest.mark.parametrize("limit", [SHARD, "10MB"])
def test_what_stock_pulled_is_loaded_without_a_download(
    limit: int | str, hub: PullHub, repo: str, tmp_path: Path
) -> None:
    commit = hub.publish(repo, saved(tmp_path / "saved", 1, limit))
    theirs = hub.call("load_stock", repo, tmp_path / "cache")

    assert hub.call("load", repo, tmp_path / "cache") == theirs
    assert hub.kinds() == {"info": 1}
    assert hub.call("load", repo, tmp_path / "cache", revision=commit) == theirs
    assert hub.kinds() == {}


def test_pull_gives_the_snapshot_with_all_files_of_the_repo(pulled: Pulled) -> None:
    folder = "models--" + pulled.repo.replace("/", "--")
    assert pulled.result == pulled.cache / folder / "snapshots" / pulled.commit
    assert files_of(pulled.result).keys() == {"README.md", ".gitattributes", *files_of(pulled.saved)}


def test_stock_finds_all_files_that_were_pulled(hub: PullHub, pulled: Pulled) -> None:
    names = sorted({"README.md", ".gitattributes", *files_of(pulled.saved)})

    assert hub.call("stock_snapshot", pulled.repo, pulled.cache, local_files_only=True) == names
    sizes = hub.call("stock_files", pulled.repo, pulled.cache, names, local_files_only=True)
    assert sizes == [(pulled.result / name).stat().st_size for name in names]
    assert hub.kinds() == {}


def test_stock_loads_what_was_pulled(hub: PullHub, pulled: Pulled) -> None:
    theirs = hub.call("load_stock", pulled.repo, pulled.cache, local_files_only=True)
    assert hub.kinds() == {}
    assert theirs == hub.call("load_stock", pulled.repo, pulled.cache, revision=pulled.commit)
    assert hub.kinds().keys() <= OLD_STOCK_ASKS


def test_stock_downloads_nothing_after_our_load(hub: PullHub, repo: str, sharded: str, tmp_path: Path) -> None:
    ours = hub.call("load", repo, tmp_path / "cache")

    assert hub.call("load_stock", repo, tmp_path / "cache", revision=sharded) == ours
    assert hub.kinds().keys() <= OLD_STOCK_ASKS
    hub.call("load_stock", repo, tmp_path / "cache")
    assert hub.weights_down(repo) == 0


def test_cache_is_laid_out_as_huggingface_hub_lays_it_out(
    hub: PullHub, repo: str, sharded: str, tmp_path: Path
) -> None:
    hub.call("pull", repo, cache_dir=tmp_path / "ours", umask=0o027)
    hub.call("stock_snapshot", repo, tmp_path / "theirs", umask=0o027)

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


def test_new_commit_brings_only_what_changed(hub: PullHub, repo: str, sharded: str, tmp_path: Path) -> None:
    hub.call("load", repo, tmp_path / "cache")
    changed = files_of(saved(tmp_path / "changed", 2, SHARD))
    one = "model-00003-of-00009.safetensors"
    newer = hub.view(repo).commit({one: changed[one]}, "Another shard")

    hub.call("read", repo, tmp_path / "cache", verify="none", revision="main")

    assert hub.kinds() == {"info": 1, "lfs_batch": 1, "storage_get": 1}
    assert hub.weights_down(repo) == len(changed[one])
    # Both are there, side by side.
    before = hub.call("load", repo, tmp_path / "cache", revision=sharded)
    assert before["digest"] == digest_of(make_model(1).state_dict())
    assert hub.kinds() == {}
    assert {path.parent.name for path in cached(tmp_path / "cache", repo, "snapshots")} == {sharded, newer}


def test_branch_tag_and_pull_request_are_pulled_by_name(hub: PullHub, repo: str, tmp_path: Path) -> None:
    old = hub.publish(repo, saved(tmp_path / "old", 1))
    new = hub.publish(repo, saved(tmp_path / "new", 2))
    pr = hub.call("stock_refs", repo, old)
    assert pr == "refs/pr/1"
    before, after = (digest_of(make_model(seed).state_dict()) for seed in (1, 2))
    at = {"main": after, "feature/x": before, "v1": before, old: before, new: after, pr: after}
    for revision, digest in at.items():
        assert hub.call("load", repo, tmp_path / "cache", revision=revision)["digest"] == digest
        ours = hub.call("load", repo, tmp_path / "cache", revision=revision, local_files_only=True)
        assert ours["digest"] == digest
    assert "extra.txt" in files_of(Path(hub.call("pull", repo, cache_dir=tmp_path / "cache", revision=pr)))


@pytest.fixture(scope="module")
def generating(module_hub: PullHub, tmp_path_factory: pytest.TempPathFactory) -> Loads:
    """Loads of a model that generates, one after the other: which one -> what came of it, and its requests."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    model: Any = LlamaForCausalLM(config)
    model.generation_config.update(do_sample=True, top_k=7)
    root, repo = tmp_path_factory.mktemp("generating"), new_repo_id()
    model.save_pretrained(root / "saved")
    commit = module_hub.publish(repo, root / "saved")

    def load(**options: Any) -> tuple[dict[str, Any], Counter[str]]:
        return module_hub.call("load_causal", repo, root / "cache", **options), module_hub.kinds()

    loads = {"cold": load(), "warm": load(), "commit": load(revision=commit)}
    bare = module_hub.view(repo).commit({"generation_config.json": None}, "Generate by the defaults")
    return loads | {"bare": load(), "bare commit": load(revision=bare)}


def test_model_that_generates_takes_one_request_more(
    generating: Loads,
) -> None:
    cold, requests = generating["cold"]
    assert cold["top_k"] == 7
    assert requests == {"info": 1, "lfs_batch": 1, "resolve_get": 2, "storage_get": 1}


def test_model_that_generates_is_warm_like_any_other(
    generating: Loads,
) -> None:
    cold, _ = generating["cold"]
    assert generating["warm"] == (cold, {"info": 1})
    assert generating["commit"] == (cold, {})


def test_generation_config_that_is_missing_is_not_asked_for_twice(
    generating: Loads,
) -> None:
    assert generating["bare"][1] == {"info": 1}
    assert generating["bare commit"][1] == {}


def test_code_of_the_repo_comes_with_the_commit(hub: PullHub, repo: str, tmp_path: Path) -> None:
    code = {"AutoConfig": "zoo_model.ZooConfig", "AutoModel": "zoo_model.ZooModel"}
    config = {"model_type": "zoo_custom", "auto_map": code}
    tensors = {"proj.weight": torch.ones(8, 8), "proj.bias": torch.ones(8), "scale.scale": torch.ones(8)}
    hfshard.save_state_dict(tensors | {"steps": torch.tensor(1)}, tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
    (tmp_path / "saved" / "zoo_model.py").write_text(MODEL)
    (tmp_path / "saved" / "zoo_layers.py").write_text(LAYERS)
    commit = hub.publish(repo, tmp_path / "saved")
    hub.view(repo).commit({"zoo_model.py": MODEL.replace("nn.Linear", "Broken").encode()}, "Break the code")

    cold = hub.call("load_auto", repo, tmp_path / "cache", revision=commit, trust_remote_code=True)

    # One file more for the code, and one for the file beside it.
    assert hub.kinds() == {"info": 1, "lfs_batch": 1, "resolve_get": 3, "storage_get": 1}
    assert hub.call("load_auto", repo, tmp_path / "cache", revision=commit, trust_remote_code=True) == cold
    assert hub.kinds() == {}


def test_two_processes_fetch_every_file_once(hub: PullHub, repo: str, sharded: str, tmp_path: Path) -> None:
    weights = sum(path.stat().st_size for path in (tmp_path / "saved").glob("*.safetensors"))
    tasks = [hub.start("load", repo, tmp_path / "cache") for _ in range(3)]

    outcomes = [task.outcome() for task in tasks]

    assert [outcome.error for outcome in outcomes] == [None, None, None], outcomes
    assert len({outcome.result["digest"] for outcome in outcomes}) == 1
    assert hub.weights_down(repo) == weights


def test_keys_that_occur_twice_are_fetched_where_hfshard_is_installed(hub: PullHub, repo: str, tmp_path: Path) -> None:
    bert(4, cls=BertModel).save_pretrained(tmp_path, max_shard_size=1000)
    for name in ("config.json", "model.safetensors.index.json"):
        path = tmp_path / name
        path.write_text(path.read_text().rstrip()[:-1].rstrip() + ', "zz": 1, "zz": 2}')
    hub.publish(repo, tmp_path)

    hub.interpret(f"""
import hfshard
from transformers import BertModel
from tests.helpers.tiny_bert import value_of
with hfshard.install(quiet=True):
    assert value_of(BertModel.from_pretrained({repo!r})) == 4
""")
