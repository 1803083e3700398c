"""Pulls from the Hub: requests and bytes, the cache that stock tools share, parts of checkpoints, and two repos."""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BertModel, LlamaConfig, LlamaForCausalLM

import hfshard
from tests.helpers.tiny_bert import Bert, bert, value_of
from tests.hub.models import digest_of, digest_of_seed, files_of, make_model, saved
from tests.hub.pull.pull_hub import PullHub, cached
from tests.hub.server_fixture import new_repo_id
from tests.models.test_model_builder_custom_code import LAYERS, MODEL
from tests.zoo.hub_cache import put_in_cache

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


@pytest.fixture(scope="module")
def loaded(module_hub: PullHub, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A repo of 9 shards that was loaded once, and the cache that has it."""
    root, repo = tmp_path_factory.mktemp("loaded"), new_repo_id()
    commit = publish_sharded(module_hub, repo, root / "saved")
    result = module_hub.call("load", repo, root / "cache")
    return SimpleNamespace(repo=repo, commit=commit, cache=root / "cache", result=result)


@pytest.fixture(scope="module")
def pulled(module_hub: PullHub, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A repo of 9 shards of which all was pulled, and the cache that has it."""
    root, repo = tmp_path_factory.mktemp("pulled"), new_repo_id()
    commit = publish_sharded(module_hub, repo, root / "saved")
    result = Path(module_hub.call("pull", repo, cache_dir=root / "cache"))
    names = sorted({"README.md", ".gitattributes", *files_of(root / "saved")})
    return SimpleNamespace(repo=repo, commit=commit, cache=root / "cache", result=result, names=names)


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


def test_warm_load_takes_one_request(hub: PullHub, loaded: SimpleNamespace) -> None:
    assert hub.call("load", loaded.repo, loaded.cache) == loaded.result
    assert hub.kinds() == {"info": 1}


def test_warm_load_of_a_commit_by_an_auto_class_takes_no_request(hub: PullHub, loaded: SimpleNamespace) -> None:
    assert hub.call("load_auto", loaded.repo, loaded.cache, revision=loaded.commit)["digest"] == loaded.result["digest"]
    assert hub.kinds() == {}


@pytest.mark.parametrize(
    "options", [{"revision": None}, {"local_files_only": True}, {"settings": {"HF_HUB_OFFLINE": True}}], ids=str
)
def test_warm_load_without_the_network_takes_no_request(
    options: dict[str, Any], hub: PullHub, loaded: SimpleNamespace
) -> None:
    commit = {"revision": loaded.commit} if "revision" in options else {}
    assert hub.call("load", loaded.repo, loaded.cache, **options | commit) == loaded.result
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


def test_pull_gives_the_snapshot_with_all_files_of_the_repo(pulled: SimpleNamespace) -> None:
    folder = "models--" + pulled.repo.replace("/", "--")
    assert pulled.result == pulled.cache / folder / "snapshots" / pulled.commit
    assert sorted(files_of(pulled.result)) == pulled.names


def test_stock_finds_all_files_that_were_pulled(hub: PullHub, pulled: SimpleNamespace) -> None:
    assert hub.call("stock_snapshot", pulled.repo, pulled.cache, local_files_only=True) == pulled.names
    sizes = hub.call("stock_files", pulled.repo, pulled.cache, pulled.names, local_files_only=True)
    assert sizes == [(pulled.result / name).stat().st_size for name in pulled.names]
    assert hub.kinds() == {}


def test_stock_loads_what_was_pulled(hub: PullHub, pulled: SimpleNamespace) -> None:
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
    marks = {f"{folder}/.no_exist/{sharded}/{name}" for name in MISSING}
    assert ours.keys() ^ theirs.keys() == {f"{folder}/trees/{sharded}.json"} | marks
    shared = ours.keys() & theirs.keys()
    links = [{name: one[name].readlink() for name in shared if one[name].is_symlink()} for one in (ours, theirs)]
    assert links[0] == links[1]
    modes = [{name: oct(one[name].stat().st_mode) for name in shared if "locks" not in name} for one in (ours, theirs)]
    assert modes[0] == modes[1]
    assert stat.S_IMODE(cached(tmp_path / "ours", repo)[0].stat().st_mode) == 0o640


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
    assert hub.call("load", repo, tmp_path / "cache", revision=sharded)["digest"] == digest_of_seed(1)
    assert hub.kinds() == {}
    assert {path.parent.name for path in cached(tmp_path / "cache", repo, "snapshots")} == {sharded, newer}


def test_branch_tag_and_pull_request_are_pulled_by_name(hub: PullHub, repo: str, tmp_path: Path) -> None:
    old = hub.publish(repo, saved(tmp_path / "old", 1))
    new = hub.publish(repo, saved(tmp_path / "new", 2))
    pr = hub.call("stock_refs", repo, old)
    assert pr == "refs/pr/1"
    before, after = (digest_of_seed(seed) for seed in (1, 2))
    at = {"main": after, "feature/x": before, "v1": before, old: before, new: after, pr: after}
    for revision, digest in at.items():
        assert hub.call("load", repo, tmp_path / "cache", revision=revision)["digest"] == digest
        assert hub.call("load", repo, tmp_path / "cache", revision=revision, local_files_only=True)["digest"] == digest
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


def test_model_that_generates_takes_one_request_more(generating: Loads) -> None:
    cold, requests = generating["cold"]
    assert cold["top_k"] == 7
    assert requests == {"info": 1, "lfs_batch": 1, "resolve_get": 2, "storage_get": 1}


def test_model_that_generates_is_warm_like_any_other(generating: Loads) -> None:
    cold, _ = generating["cold"]
    assert generating["warm"] == (cold, {"info": 1})
    assert generating["commit"] == (cold, {})


def test_generation_config_that_is_missing_is_not_asked_for_twice(generating: Loads) -> None:
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


MIB = 1024**2
LIMIT = 4_300_000
"""Bytes: the large model of 16.9 MB of weights then has 5 shards."""

BIAS = "pooler.dense.bias"
"""512 numbers of 4 bytes, the last of the last shard."""

WORDS = "embeddings.word_embeddings.weight"
"""1000 x 512 numbers of 4 bytes."""

HEAD = 32 * 1024
"""Bytes that are read of each file at first; what is not its header is not read again."""

HEADER = 4096
"""Bytes before the data of a shard; WORDS is the first of its shard."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model of 5 shards."""
    return saved(tmp_path_factory.mktemp("weights"), 1, LIMIT, size="large")


@pytest.fixture(scope="module")
def digests() -> dict[str, str]:
    """Name -> digest of its tensor."""
    return {name: digest_of({name: tensor}) for name, tensor in make_model(1, size="large").state_dict().items()}


@pytest.fixture
def large(hub: PullHub, repo: str, weights: Path) -> str:
    """A repo with a model of 5 shards."""
    hub.publish(repo, weights)
    return repo


def test_only_the_shards_that_hold_the_names_are_downloaded(
    hub: PullHub, large: str, weights: Path, digests: dict[str, str], tmp_path: Path
) -> None:
    found = hub.call("read", large, tmp_path, keys=[BIAS, "pooler.dense.*"])

    assert found == {name: digests[name] for name in ("pooler.dense.bias", "pooler.dense.weight")}
    assert hub.kinds() == {"info": 1, "lfs_batch": 1, "resolve_get": 2, "storage_get": 1}
    assert hub.weights_down(large) == (weights / "model-00005-of-00005.safetensors").stat().st_size
    # The same again, and then all: only what lacks.
    assert hub.call("read", large, tmp_path, keys=[BIAS], local_files_only=True) == {BIAS: digests[BIAS]}
    assert hub.call("read", large, tmp_path) == digests
    assert hub.kinds()["storage_get"] == 4


def test_only_the_bytes_of_the_tensors_are_downloaded(
    hub: PullHub, large: str, digests: dict[str, str], tmp_path: Path
) -> None:
    found = hub.call("read", large, tmp_path, keys=[BIAS], ranges=True, verify="full")

    assert found == {BIAS: digests[BIAS]}
    assert hub.kinds() == {"info": 1, "lfs_batch": 1, "resolve_get": 2, "storage_get": 2}
    assert hub.weights_down(large) == HEAD + 2048
    assert list(tmp_path.iterdir()) == []
    both = hub.call("read", large, tmp_path, keys=[BIAS, WORDS], ranges=True)
    assert both == {name: digests[name] for name in (WORDS, BIAS)}
    assert hub.weights_down(large) == HEAD + 2048 + HEADER + 2_048_000
    assert hub.call("read", large, tmp_path, ranges=True) == digests


@pytest.mark.parametrize(
    ("keys", "asked"),
    [
        (["wide"], [8 * MIB, 8 * MIB, 4 * MIB]),
        (["narrow.*"], [40 * 65536 - (HEAD - 8192)]),  # the header has 8192 bytes
        (["narrow.*", "wide"], [40 * 65536 - (HEAD - 8192), 8 * MIB, 8 * MIB, 4 * MIB]),
        (None, [40 * 65536 - (HEAD - 8192), 8 * MIB, 8 * MIB, 4 * MIB + 4 * MIB]),
    ],
)
def test_large_tensors_come_by_8_mib_and_near_ones_by_one_request(
    keys: list[str] | None, asked: list[int], hub: PullHub, repo: str, tmp_path: Path
) -> None:
    state = {f"narrow.{number}": torch.full((16_384,), float(number)) for number in range(40)}  # of 64 KiB
    state |= {"wide": torch.arange(20 * MIB // 4, dtype=torch.int32), "next": torch.ones(MIB)}
    hfshard.save_state_dict(state, tmp_path / "saved")
    hub.publish(repo, tmp_path / "saved")

    found = hub.call("read", repo, tmp_path / "cache", keys=keys, ranges=True, verify="full")

    names = [name for name in state if keys is None or name.partition(".")[0] in "".join(keys)]
    assert found == {name: digest_of({name: state[name]}) for name in names}
    assert hub.kinds() == {"info": 1, "lfs_batch": 1, "storage_get": 1 + len(asked)}
    answers = [request.bytes_down for request in hub.requests_of(repo) if request.kind == "storage_get"]
    assert answers[0] == HEAD
    assert sorted(answers[1:]) == sorted(asked)


@pytest.mark.parametrize("stock", [False, True])
def test_ranges_of_a_single_file_are_read(
    stock: bool, hub: PullHub, repo: str, digests: dict[str, str], tmp_path: Path
) -> None:
    model: Any = make_model(1, size="large", stock=stock)
    model.save_pretrained(tmp_path / "saved")
    hub.publish(repo, tmp_path / "saved")

    found = hub.call("read", repo, tmp_path / "cache", keys="*.bias", ranges=True)

    assert found == {name: digest for name, digest in digests.items() if name.endswith(".bias")}
    assert len(found) == 10
    assert hub.weights_down(repo) < 300_000
    if stock:
        outcome = hub.refused("read", repo, tmp_path / "cache", keys="*.bias", ranges=True, verify="full")
        assert "cannot be verified in full: it has no checksum" in outcome.message


def test_tied_and_aliased_names_are_read_by_ranges(hub: PullHub, repo: str, tmp_path: Path) -> None:
    hub.publish(repo, saved(tmp_path / "saved", 1, 20_000, kind="tied"))
    alias, stored = "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"

    found = hub.call("read", repo, tmp_path / "cache", keys=[alias], ranges=True)

    whole = hub.call("read", repo, tmp_path / "cache", keys=[alias, stored])
    assert found == {alias: whole[alias]}
    assert whole.keys() == {alias, stored}


def test_damaged_tensor_is_named_and_the_others_load(
    hub: PullHub, large: str, weights: Path, digests: dict[str, str], tmp_path: Path
) -> None:
    shard, whole = "model-00005-of-00005.safetensors", "pooler.dense.weight"
    hub.view(large).corrupt(shard, at=(weights / shard).stat().st_size - 1)

    outcome = hub.refused("read", large, tmp_path, keys="pooler.*", ranges=True)

    assert outcome.error == "IntegrityError"
    assert f"Tensor 'pooler.dense.bias' of shard '{large}/{shard}' is not what was saved" in outcome.message
    assert hub.call("read", large, tmp_path, keys=[whole], ranges=True) == {whole: digests[whole]}


def test_ranges_of_a_directory_change_nothing(hub: PullHub, weights: Path, digests: dict[str, str]) -> None:
    assert hub.call("read", weights, "unused", keys=[BIAS], ranges=True) == {BIAS: digests[BIAS]}
    assert hub.kinds() == {}


@pytest.mark.parametrize("ranges", [False, True])
def test_name_that_is_not_there_is_told_before_any_weights_come(
    ranges: bool, hub: PullHub, large: str, tmp_path: Path
) -> None:
    assert hub.refused("read", large, tmp_path, keys=["no.such"], ranges=ranges).error == "StateDictMismatchError"
    assert hub.kinds()["storage_get"] == 0


def test_broken_connections_do_not_disturb_ranges(
    hub: PullHub, large: str, digests: dict[str, str], tmp_path: Path
) -> None:
    hub.fail(f"storage_get /{large}/", "drop", after_bytes=700_000, how="rst")
    hub.fail(f"storage_get /{large}/", "expired", skip=1)

    found = hub.call("read", large, tmp_path, keys=[WORDS], ranges=True)

    assert found == {WORDS: digests[WORDS]}
    assert hub.weights_down(large) == HEADER + 2_048_000


SETUP = """
from huggingface_hub import constants
constants.HF_HUB_DISABLE_XET = True
base, lora, weights, config = {!r}, {!r}, {!r}, {!r}
import torch, hfshard
from transformers import AutoModel, BertModel
from tests.helpers.tiny_bert import Bert, bert, value_of
"""
ADAPTER = """
from peft import LoraConfig, get_peft_model
bert(1, cls=BertModel).push_to_hub(base)
tuned = get_peft_model(BertModel.from_pretrained(base), LoraConfig(target_modules=["query"], r=2))
with torch.no_grad():
    for name, weight in tuned.named_parameters():
        if "lora_B" in name:
            weight.fill_(3)
tuned.push_to_hub(lora)
stock = BertModel.from_pretrained(lora).state_dict()
for ours in (Bert.from_pretrained(lora), hfshard.load_model(AutoModel, lora)):
    found = ours.state_dict()
    assert found.keys() == stock.keys() and any("lora_B" in name for name in found)
    assert all(torch.equal(found[name], stock[name]) for name in stock)
"""
CONFIG = """
bert(1).push_to_hub(weights)
bert(2).push_to_hub(config)
for options in ({}, {"revision": "main"}):
    assert value_of(Bert.from_pretrained(weights, config=config, **options)) == 1
    assert value_of(hfshard.load_model(AutoModel, weights, config=config, **options)) == 1
"""


@pytest.mark.parametrize("code", [ADAPTER, CONFIG], ids=["adapter", "config"])
def test_the_other_repo_is_asked_for_its_own_revision(code: str, hub: PullHub) -> None:
    hub.interpret(SETUP.format(*(new_repo_id() for _ in range(4))) + code)


def test_blobs_that_all_repos_of_a_cache_share_are_read(tmp_path: Path) -> None:
    bert(4, cls=BertModel).save_pretrained(tmp_path / "files")
    commit = "a" * 40
    snapshot = put_in_cache(tmp_path / "cache", tmp_path / "files", commit=commit, refs={"main": commit})
    shared = tmp_path / "cache" / "blobs"
    (shared / "ab").mkdir(parents=True)
    blob = (snapshot / "model.safetensors").resolve()
    os.rename(blob, shared / "ab" / "cdef")
    blob.symlink_to(os.path.relpath(shared / "ab" / "cdef", blob.parent))
    (shared / ".huggingface-shared-blobs").touch()
    assert value_of(Bert.from_pretrained("org/name", cache_dir=tmp_path / "cache")) == 4
