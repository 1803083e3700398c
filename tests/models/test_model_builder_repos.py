"""Repos in the Hub's cache and adapters of PEFT load offline as in transformers: revision, variant, commit hash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, BertModel

import hfshard
from tests.helpers.peft_versions import peft_of_transformers
from tests.models.conftest import SHARDS, WHOLE, Saves
from tests.zoo.compare import Through, contents, differences, facts_of_load, fails_alike, load, loads_alike
from tests.zoo.hub_cache import REPO, put_in_cache
from tests.zoo.mixin_classes import with_mixin
from tests.zoo.models import ZOO

pytestmark = pytest.mark.compat

Options = dict[str, Any]
OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture(scope="module", params=[WHOLE, SHARDS])
def cache(request: pytest.FixtureRequest, saves: Saves, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repo with an old commit (tag v1) and a new one (main, and a branch whose name has a slash); nobody writes."""
    tmp_path = tmp_path_factory.mktemp("repo")
    changed = ZOO["bert"].build()
    with torch.no_grad():
        changed.pooler.dense.bias.zero_()
    changed.save_pretrained(tmp_path / "new", max_shard_size=request.param)
    changed.save_pretrained(tmp_path / "new" / "sub", max_shard_size=request.param)
    changed.save_pretrained(tmp_path / "new", max_shard_size=request.param, variant="fp16")
    root = tmp_path / "cache"
    put_in_cache(root, saves.stock("bert", request.param), commit=OLD, refs={"v1": OLD})
    put_in_cache(root, tmp_path / "new", commit=NEW, refs={"main": NEW, "feature/x": NEW})
    return root


OPTIONS: list[Options] = [
    {},
    {"local_files_only": True},
    {"revision": "main"},
    {"revision": "v1"},
    {"revision": "feature/x"},
    {"revision": OLD},
    {"revision": NEW, "local_files_only": True},
    {"subfolder": "sub"},
    {"variant": "fp16"},
    {"use_safetensors": True},
    {"token": False},
    {"hidden_dropout_prob": 0.3},
]


@pytest.mark.parametrize(
    ("cache", "options"),
    [(SHARDS, options) for options in OPTIONS]
    + [(WHOLE, options) for options in OPTIONS if not options or {"subfolder", "variant"} & options.keys()],
    indirect=["cache"],
    ids=str,
)
def test_a_cached_repo_loads_as_transformers_loads_it(options: Options, cache: Path) -> None:
    ours = loads_alike(BertModel, REPO, cache_dir=cache, **options)

    assert ours["model"]["name_or_path"] == REPO
    is_new = not any(ours["state dict"]["pooler.dense.bias"][2])
    assert is_new == (options.get("revision") not in ("v1", OLD))


def test_a_repo_loads_through_an_auto_class_as_transformers_loads_it(cache: Path) -> None:
    options = {"cache_dir": cache, "revision": "v1"}
    theirs, ours = (facts_of_load(load(target, REPO, **options)) for target in (AutoModel, Through(AutoModel)))

    assert differences(ours, theirs) == []


def test_a_state_dict_is_read_from_a_cached_repo(cache: Path) -> None:
    old = hfshard.load_state_dict(REPO, cache_dir=cache, revision="v1", local_files_only=True)
    new = hfshard.load_state_dict(REPO, cache_dir=cache)

    assert old.keys() == new.keys()
    assert [name for name in old if not torch.equal(old[name], new[name])] == ["pooler.dense.bias"]


@pytest.mark.parametrize("cache", [SHARDS], indirect=True)
@pytest.mark.parametrize(
    ("repo_id", "options"),
    [
        ("org/other", {}),
        (REPO, {"revision": "v9"}),
        (REPO, {"revision": "c" * 40}),
        (REPO, {"subfolder": "nowhere"}),
        (REPO, {"variant": "int8"}),
        (REPO, {"use_safetensors": False}),
        ("not/a/repo", {}),
        ("", {}),
    ],
    ids=str,
)
def test_what_the_cache_lacks_is_refused_with_the_same_kind_of_error(
    repo_id: str, options: Options, cache: Path
) -> None:
    fails_alike(BertModel, repo_id, cache_dir=cache, **options)


@pytest.mark.parametrize("options", [{}, {"revision": "v1"}, {"revision": "v1", "local_files_only": True}], ids=str)
def test_a_config_of_another_repo_is_read_at_the_revision_asked_for(
    options: Options, saves: Saves, tmp_path: Path
) -> None:
    for ref, commit, dropout in (("v1", "c" * 40, 0.25), ("main", "d" * 40, 0.5)):
        config = ZOO["bert"].make_config()
        config.hidden_dropout_prob = dropout
        config.save_pretrained(tmp_path / ref)
        put_in_cache(tmp_path, tmp_path / ref, commit=commit, refs={ref: commit}, repo_id="org/configs")
    put_in_cache(tmp_path, saves.stock("bert"), commit=OLD, refs={"v1": OLD, "main": OLD})
    options = {**options, "config": "org/configs", "cache_dir": tmp_path}

    ours = loads_alike(BertModel, REPO, **options)
    functional = facts_of_load(load(Through(AutoModel), REPO, **options))

    expected = 0.25 if "revision" in options else 0.5
    assert [facts["config"]["hidden_dropout_prob"] for facts in (ours, functional)] == [expected, expected]


def test_a_generation_config_is_read_from_the_same_commit(saves: Saves, tmp_path: Path) -> None:
    put_in_cache(tmp_path, saves.stock("llama_generation", SHARDS), commit=OLD, refs={"v1": OLD})
    put_in_cache(tmp_path, saves.stock("llama_untied", SHARDS), commit=NEW, refs={"main": NEW})

    ours = loads_alike(ZOO["llama_generation"].stock_class, REPO, cache_dir=tmp_path, revision="v1")

    assert ours["generation config"]["top_k"] == 7


@pytest.mark.parametrize("size", [WHOLE, SHARDS])
def test_what_hfshard_saved_loads_from_the_cache_by_both(size: str, saves: Saves, tmp_path: Path) -> None:
    put_in_cache(tmp_path, saves.ours("clip", size), commit=NEW, refs={"main": NEW})
    stock_class = ZOO["clip"].stock_class
    theirs = facts_of_load(load(stock_class, REPO, cache_dir=tmp_path))

    ours = facts_of_load(load(with_mixin(stock_class), REPO, cache_dir=tmp_path, verify="full"))

    assert differences(ours, theirs) == []


def test_a_pickled_repo_in_the_cache_loads_as_transformers_loads_it(saves: Saves, tmp_path: Path) -> None:
    model = ZOO["bert"].build()
    (tmp_path / "files").mkdir()
    model.config.save_pretrained(tmp_path / "files")
    torch.save(model.state_dict(), tmp_path / "files" / "pytorch_model.bin")
    put_in_cache(tmp_path / "cache", tmp_path / "files", commit=NEW, refs={"main": NEW})

    loads_alike(BertModel, REPO, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("size", [WHOLE, SHARDS])
def test_a_subfolder_of_a_directory_loads_as_transformers_loads_it(size: str, saves: Saves, tmp_path: Path) -> None:
    ZOO["llama_generation"].build().save_pretrained(tmp_path / "a" / "b", max_shard_size=size)

    loads_alike(ZOO["llama_generation"].stock_class, tmp_path, subfolder="a/b")


TARGETS = {"llama_untied": "q_proj", "mixtral": "v_proj", "bert": "query"}


def save_adapter(name: str, model_class: Any, base: Path, directory: Path) -> None:
    """Put an adapter on a model, and save it."""
    peft = peft_of_transformers()
    model = model_class.from_pretrained(base)
    torch.manual_seed(3)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=[TARGETS[name]], init_lora_weights=False))
    model.save_pretrained(directory)


@pytest.fixture(params=TARGETS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def adapter(name: str, saves: Saves, tmp_path: Path) -> Path:
    save_adapter(name, ZOO[name].stock_class, saves.stock(name), tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_is_saved_as_transformers_saves_it(name: str, adapter: Path, saves: Saves, tmp_path: Path) -> None:
    save_adapter(name, with_mixin(ZOO[name].stock_class), saves.stock(name), tmp_path / "ours")

    assert differences(contents(tmp_path / "ours"), contents(adapter)) == []


def test_an_adapter_is_loaded_with_its_base_model_as_transformers_loads_it(name: str, adapter: Path) -> None:
    ours = loads_alike(ZOO[name].stock_class, adapter)

    assert any("lora_A" in key for key in ours["state dict"])


def test_an_adapter_in_the_hubs_cache_is_loaded_as_by_transformers(name: str, adapter: Path, tmp_path: Path) -> None:
    put_in_cache(tmp_path / "cache", adapter, commit=NEW, refs={"main": NEW})

    loads_alike(ZOO[name].stock_class, REPO, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("name", ["llama_untied"])
def test_an_adapter_is_loaded_through_an_auto_class_as_transformers_loads_it(name: str, adapter: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(adapter)

    ours = hfshard.load_model(AutoModelForCausalLM, adapter)

    assert type(ours) is type(theirs)
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value)
