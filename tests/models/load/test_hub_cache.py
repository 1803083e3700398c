"""Repos in the Hub's cache load offline as in transformers: revision, subfolder, variant, commit hash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, BertModel

import hfshard
from tests.models.conftest import SHARDS, WHOLE, Saves
from tests.models.test_load_arguments_options import failure_of
from tests.zoo.compare import differences, facts_of_load, load
from tests.zoo.hub_cache import REPO, put_in_cache
from tests.zoo.mixin_classes import with_mixin
from tests.zoo.models import ZOO

pytestmark = pytest.mark.compat

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


OPTIONS: list[dict[str, Any]] = [
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
def test_a_cached_repo_loads_as_transformers_loads_it(options: dict[str, Any], cache: Path) -> None:
    theirs = facts_of_load(load(BertModel, REPO, cache_dir=cache, **options))

    ours = facts_of_load(load(with_mixin(BertModel), REPO, cache_dir=cache, **options))

    assert differences(ours, theirs) == []
    assert ours["model"]["name_or_path"] == REPO
    is_new = not any(ours["state dict"]["pooler.dense.bias"][2])
    assert is_new == (options.get("revision") not in ("v1", OLD))


def test_a_repo_loads_through_an_auto_class_as_transformers_loads_it(cache: Path) -> None:
    theirs = facts_of_load(load(AutoModel, REPO, cache_dir=cache, revision="v1"))

    ours = facts_of_load(load(_Functional, REPO, cache_dir=cache, revision="v1"))

    assert differences(ours, theirs) == []


class _Functional:
    """`hfshard.load_model(AutoModel, ...)` in the shape of a class."""

    @staticmethod
    def from_pretrained(*arguments: Any, **options: Any) -> Any:
        return hfshard.load_model(AutoModel, *arguments, **options)


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
def test_what_is_not_in_the_cache_is_refused_with_the_same_kind_of_error(
    repo_id: str, options: dict[str, Any], cache: Path
) -> None:
    theirs = failure_of(lambda: BertModel.from_pretrained(repo_id, cache_dir=cache, **options))

    ours = failure_of(lambda: with_mixin(BertModel).from_pretrained(repo_id, cache_dir=cache, **options))

    kind = next(kind for kind in type(theirs).__mro__ if kind.__module__ == "builtins")
    assert isinstance(ours, kind), (ours, theirs)


@pytest.mark.parametrize("options", [{}, {"revision": "v1"}, {"revision": "v1", "local_files_only": True}], ids=str)
def test_a_config_of_another_repo_is_read_at_the_revision_that_was_asked_for(
    options: dict[str, Any], saves: Saves, tmp_path: Path
) -> None:
    for ref, commit, dropout in (("v1", "c" * 40, 0.25), ("main", "d" * 40, 0.5)):
        config = ZOO["bert"].make_config()
        config.hidden_dropout_prob = dropout
        config.save_pretrained(tmp_path / ref)
        put_in_cache(tmp_path, tmp_path / ref, commit=commit, refs={ref: commit}, repo_id="org/configs")
    put_in_cache(tmp_path, saves.stock("bert"), commit=OLD, refs={"v1": OLD, "main": OLD})
    options = {**options, "config": "org/configs", "cache_dir": tmp_path}
    theirs = facts_of_load(load(BertModel, REPO, **options))

    ours = facts_of_load(load(with_mixin(BertModel), REPO, **options))
    functional = facts_of_load(load(_Functional, REPO, **options))

    assert differences(ours, theirs) == []
    expected = 0.25 if "revision" in options else 0.5
    assert [facts["config"]["hidden_dropout_prob"] for facts in (ours, functional)] == [expected, expected]


def test_a_generation_config_is_read_from_the_same_commit(saves: Saves, tmp_path: Path) -> None:
    stock_class = ZOO["llama_generation"].stock_class
    put_in_cache(tmp_path, saves.stock("llama_generation", SHARDS), commit=OLD, refs={"v1": OLD})
    put_in_cache(tmp_path, saves.stock("llama_untied", SHARDS), commit=NEW, refs={"main": NEW})
    theirs = facts_of_load(load(stock_class, REPO, cache_dir=tmp_path, revision="v1"))

    ours = facts_of_load(load(with_mixin(stock_class), REPO, cache_dir=tmp_path, revision="v1"))

    assert differences(ours, theirs) == []
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
    theirs = facts_of_load(load(BertModel, REPO, cache_dir=tmp_path / "cache"))

    ours = facts_of_load(load(with_mixin(BertModel), REPO, cache_dir=tmp_path / "cache"))

    assert differences(ours, theirs) == []


@pytest.mark.parametrize("size", [WHOLE, SHARDS])
def test_a_subfolder_of_a_directory_loads_as_transformers_loads_it(size: str, saves: Saves, tmp_path: Path) -> None:
    ZOO["llama_generation"].build().save_pretrained(tmp_path / "a" / "b", max_shard_size=size)
    stock_class = ZOO["llama_generation"].stock_class
    theirs = facts_of_load(load(stock_class, tmp_path, subfolder="a/b"), tmp_path)

    ours = facts_of_load(load(with_mixin(stock_class), tmp_path, subfolder="a/b"), tmp_path)

    assert differences(ours, theirs) == []
