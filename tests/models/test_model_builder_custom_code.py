"""A custom class whose code travels with the checkpoint: files, auto_map, trust_remote_code as in transformers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, BertModel

import hfshard
from hfshard.errors import InvalidArgumentError
from tests.zoo.compare import differences, facts_of_load, load, raw_tensors, small_files
from tests.zoo.hub_cache import put_in_cache
from tests.zoo.mixin_classes import with_mixin
from tests.zoo.models import ZOO, scramble

pytestmark = pytest.mark.compat

LAYERS = """
import torch
from torch import nn


class Scale(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * self.scale
"""

MODEL = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .zoo_layers import Scale


class ZooConfig(PreTrainedConfig):
    model_type = "zoo_custom"

    def __init__(self, width=8, **kwargs):
        self.width = width
        super().__init__(**kwargs)


class ZooModel(PreTrainedModel):
    config_class = ZooConfig
    base_model_prefix = "zoo"
    _tied_weights_keys = {"out.weight": "proj.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.proj = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.scale = Scale(config.width)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.post_init()

    def forward(self, x):
        return self.out(self.scale(self.proj(x)))
"""

OURS = """
from transformers import BertModel

from hfshard import ShardedModelMixin


class Mine(ShardedModelMixin, BertModel): ...


class MoreOfMine(Mine): ...
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """A package with a custom model that imports a file beside it, registered with the Auto classes."""
    folder = tmp_path_factory.mktemp("code") / "zoo_package"
    folder.mkdir()
    for name, text in {"__init__": "", "zoo_layers": LAYERS, "zoo_model": MODEL, "zoo_mine": OURS}.items():
        (folder / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder.parent)
        module = importlib.import_module("zoo_package.zoo_model")
        importlib.import_module("zoo_package.zoo_mine")
    module.ZooConfig.register_for_auto_class()
    module.ZooModel.register_for_auto_class("AutoModel")
    return module


def _build(model_class: Any, code: ModuleType) -> Any:
    model = model_class(code.ZooConfig(width=16, tie_word_embeddings=True))
    scramble(model)
    return model


@pytest.fixture
def saved(code: ModuleType, tmp_path: Path) -> tuple[Path, Path]:
    """The same model, saved by hfshard and by stock transformers."""
    _build(with_mixin(code.ZooModel), code).save_pretrained(tmp_path / "ours")
    _build(code.ZooModel, code).save_pretrained(tmp_path / "theirs")
    return tmp_path / "ours", tmp_path / "theirs"


def test_the_code_and_the_auto_map_are_saved_as_transformers_saves_them(saved: tuple[Path, Path]) -> None:
    ours, theirs = saved

    assert differences(small_files(ours), small_files(theirs)) == []
    assert differences(raw_tensors(ours), raw_tensors(theirs)) == []
    assert {"config.json", "zoo_model.py", "zoo_layers.py"} <= set(small_files(ours))


def test_stock_loads_the_custom_class_that_hfshard_saved(saved: tuple[Path, Path]) -> None:
    facts = [facts_of_load(load(AutoModel, path, trust_remote_code=True), path) for path in saved]

    assert differences(*facts) == []


def test_custom_code_is_saved_and_loaded_by_its_own_methods_where_hfshard_is_installed(
    code: ModuleType, saved: tuple[Path, Path], tmp_path: Path
) -> None:
    theirs = facts_of_load(load(AutoModel, saved[1], trust_remote_code=True), saved[1])

    with hfshard.install(quiet=True):
        _build(code.ZooModel, code).save_pretrained(tmp_path / "installed")
        loaded = load(AutoModel, tmp_path / "installed", trust_remote_code=True)
        loaded.model.save_pretrained(tmp_path / "again")

    assert differences(facts_of_load(loaded, tmp_path / "installed"), theirs) == []
    for name in ("installed", "again"):
        assert small_files(tmp_path / name).keys() == small_files(saved[1]).keys()
        assert differences(raw_tensors(tmp_path / name), raw_tensors(saved[1])) == []
    assert small_files(tmp_path / "installed") == small_files(saved[1])


@pytest.mark.parametrize("who", ["ours", "theirs"])
def test_load_model_builds_the_custom_class_as_the_auto_class_does(who: str, tmp_path: Path, saved: Any) -> None:
    path = tmp_path / who
    theirs = load(AutoModel, path, trust_remote_code=True)

    model, info = hfshard.load_model(AutoModel, path, trust_remote_code=True, output_loading_info=True)

    assert type(model) is type(theirs.model)
    theirs.log.clear()
    ours = type(theirs)(model, info, [])
    assert differences(facts_of_load(ours, path), facts_of_load(theirs, path)) == []


@pytest.mark.parametrize("name", ["Mine", "MoreOfMine"])
def test_a_class_with_the_mixin_travels_under_its_own_name(
    name: str, code: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine: Any = sys.modules["zoo_package.zoo_mine"]
    for each in (mine.Mine, vars(mine)[name]):
        monkeypatch.setattr(each, "_auto_class", "AutoModel")  # as register_for_auto_class does
    model = vars(mine)[name](ZOO["bert"].make_config())
    model.save_pretrained(tmp_path)

    assert (tmp_path / "zoo_mine.py").read_text() == OURS
    assert model.config.auto_map == {"AutoModel": f"zoo_mine.{name}"}
    for loaded in (
        AutoModel.from_pretrained(tmp_path, trust_remote_code=True),
        hfshard.load_model(AutoModel, tmp_path, trust_remote_code=True),
    ):
        assert type(loaded).__qualname__ == name and type(loaded).__module__.startswith("transformers_modules.")
    assert type(AutoModel.from_pretrained(tmp_path)) is BertModel
    with pytest.raises(InvalidArgumentError, match=f"^{name} is registered as custom code"):
        model.save_pretrained(tmp_path / "by_transformers", distributed_checkpoint=True)
    assert not (tmp_path / "by_transformers").exists()


def test_the_class_itself_loads_what_both_saved(code: ModuleType, saved: tuple[Path, Path]) -> None:
    theirs = facts_of_load(load(code.ZooModel, saved[1]), saved[1])

    for path in saved:
        assert differences(facts_of_load(load(with_mixin(code.ZooModel), path), path), theirs) == []


def test_code_that_is_not_trusted_is_not_run(saved: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError):
        AutoModel.from_pretrained(saved[1], trust_remote_code=False)
    with pytest.raises(ValueError, match="trust_remote_code"):
        hfshard.load_model(AutoModel, saved[0], trust_remote_code=False)


def test_a_custom_class_loads_from_the_cache(saved: tuple[Path, Path], tmp_path: Path) -> None:
    put_in_cache(tmp_path / "cache", saved[0], commit="d" * 40, refs={"main": "d" * 40}, repo_id="org/custom")
    options: dict[str, Any] = {"cache_dir": tmp_path / "cache", "trust_remote_code": True}
    theirs = AutoModel.from_pretrained("org/custom", **options)

    ours = hfshard.load_model(AutoModel, "org/custom", **options)

    assert ours.config.to_dict() == theirs.config.to_dict()
    assert getattr(ours.config, "_commit_hash", None) == getattr(theirs.config, "_commit_hash", None)
    assert ours.name_or_path == theirs.name_or_path == "org/custom"
    assert torch.equal(ours.scale.scale, theirs.scale.scale)


def test_a_model_loaded_with_its_code_is_saved_again_with_its_code(saved: tuple[Path, Path], tmp_path: Path) -> None:
    AutoModel.from_pretrained(saved[1], trust_remote_code=True).save_pretrained(tmp_path / "theirs again")
    model = hfshard.load_model(AutoModel, saved[1], trust_remote_code=True)

    hfshard.save_model(model, tmp_path / "ours again")

    assert differences(small_files(tmp_path / "ours again"), small_files(tmp_path / "theirs again")) == []
    assert raw_tensors(tmp_path / "ours again") == raw_tensors(saved[1])


def test_the_auto_config_of_a_save_is_the_custom_one(saved: tuple[Path, Path]) -> None:
    assert type(AutoConfig.from_pretrained(saved[0], trust_remote_code=True)).__name__ == "ZooConfig"
