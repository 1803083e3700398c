"""Pickled checkpoints, and names of before: what transformers loads loads alike, and wrappers' prefixes load, too."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import BertForSequenceClassification, BertModel, PreTrainedConfig, PreTrainedModel

import hfshard
from tests.models.conftest import SHARDS, Saves
from tests.models.test_load_arguments_options import failure_of
from tests.zoo.compare import bits, differences, facts_of_load, load, read_json
from tests.zoo.mixin_classes import with_mixin
from tests.zoo.models import ZOO, scramble

pytestmark = pytest.mark.compat

StateDict = dict[str, torch.Tensor]


def write_pickle(directory: Path, name: str, state_dict: Any, *, zipped: bool = True) -> Path:
    """A directory with the config of a specimen and a `pytorch_model.bin`."""
    directory.mkdir(parents=True, exist_ok=True)
    model = ZOO[name].build()
    model.config.architectures = [ZOO[name].class_name]
    model.config.save_pretrained(directory)
    torch.save(state_dict, directory / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    return directory


def write_pickled_shards(directory: Path, name: str, shards: int = 3, *, zipped: bool = True) -> Path:
    """The same in several files and an index, as transformers wrote them before safetensors."""
    write_pickle(directory, name, {})
    (directory / "pytorch_model.bin").unlink()
    state_dict = ZOO[name].build().state_dict()
    weight_map: dict[str, str] = {}
    names = list(state_dict)
    for number in range(shards):
        file = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        part = {key: state_dict[key] for key in names[number::shards]}
        weight_map |= dict.fromkeys(part, file)
        torch.save(part, directory / file, _use_new_zipfile_serialization=zipped)
    index = {"metadata": {"total_size": sum(t.nbytes for t in state_dict.values())}, "weight_map": weight_map}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return directory


def both_loads(stock_class: type, directory: Path, **options: Any) -> list[str]:
    """How the two loads differ."""
    theirs = facts_of_load(load(stock_class, directory, **options), directory)
    return differences(facts_of_load(load(with_mixin(stock_class), directory, **options), directory), theirs)


@pytest.mark.parametrize(
    ("name", "zipped"),
    [(name, True) for name in ("bert", "gpt2", "llama_tied", "mixtral", "resnet", "llama_bf16", "wav2vec2")]
    + [(name, False) for name in ("bert", "llama_tied", "llama_bf16")],
)
def test_a_pickled_checkpoint_loads_as_transformers_loads_it(name: str, zipped: bool, tmp_path: Path) -> None:
    write_pickle(tmp_path, name, ZOO[name].build().state_dict(), zipped=zipped)

    assert both_loads(ZOO[name].stock_class, tmp_path) == []


@pytest.mark.parametrize(
    ("name", "zipped"), [("bert", True), ("llama_tied", True), ("mixtral", True), ("llama_tied", False)]
)
def test_a_pickled_checkpoint_in_shards_loads_as_transformers_loads_it(name: str, zipped: bool, tmp_path: Path) -> None:
    write_pickled_shards(tmp_path, name, zipped=zipped)

    assert both_loads(ZOO[name].stock_class, tmp_path) == []


@pytest.mark.parametrize(
    "options", [{"dtype": torch.float16}, {"device_map": "cpu"}, {"use_safetensors": False}], ids=str
)
def test_an_option_does_what_transformers_does_with_pickles(options: dict[str, Any], tmp_path: Path) -> None:
    write_pickled_shards(tmp_path, "bert")

    assert both_loads(BertModel, tmp_path, **options) == []


def test_a_variant_of_a_pickled_checkpoint_loads_as_transformers_loads_it(tmp_path: Path) -> None:
    write_pickle(tmp_path, "bert", ZOO["bert"].build().state_dict())
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "pytorch_model.fp16.bin")

    assert both_loads(BertModel, tmp_path, variant="fp16") == []


@pytest.mark.parametrize("use", [None, True, False])
def test_use_safetensors_chooses_between_two_formats_as_transformers_does(use: bool | None, tmp_path: Path) -> None:
    state_dict = ZOO["bert"].build().state_dict()
    write_pickle(tmp_path, "bert", {key: value + 1 for key, value in state_dict.items()})
    save_file(
        {key: value.clone() for key, value in state_dict.items()}, tmp_path / "model.safetensors", {"format": "pt"}
    )

    assert both_loads(BertModel, tmp_path, use_safetensors=use) == []
    loaded = with_mixin(BertModel).from_pretrained(tmp_path, use_safetensors=use)
    assert torch.equal(
        loaded.get_parameter("pooler.dense.bias"), state_dict["pooler.dense.bias"] + (1 if use is False else 0)
    )


def test_safetensors_asked_of_a_pickled_checkpoint_are_not_found(tmp_path: Path) -> None:
    write_pickle(tmp_path, "bert", ZOO["bert"].build().state_dict())

    theirs = failure_of(lambda: BertModel.from_pretrained(tmp_path, use_safetensors=True))
    ours = failure_of(lambda: with_mixin(BertModel).from_pretrained(tmp_path, use_safetensors=True))

    assert isinstance(theirs, OSError) and isinstance(ours, OSError)


def _old_layer_norm(name: str) -> str:
    if "LayerNorm" not in name:
        return name
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def _expected(name: str) -> dict[str, Any]:
    return {key: bits(value) for key, value in ZOO[name].build().state_dict().items()}


def _loaded(name: str, directory: Path, model_class: type[PreTrainedModel] | None = None) -> dict[str, Any]:
    model = (model_class or with_mixin(ZOO[name].stock_class)).from_pretrained(directory)
    return {key: bits(value) for key, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
def test_gamma_and_beta_are_renamed_as_transformers_renames_them(kind: str, tmp_path: Path) -> None:
    old = {_old_layer_norm(key): value.clone() for key, value in ZOO["bert"].build().state_dict().items()}
    write_pickle(tmp_path, "bert", old)
    if kind == "safetensors":
        (tmp_path / "pytorch_model.bin").unlink()
        save_file(old, tmp_path / "model.safetensors", {"format": "pt"})

    assert both_loads(BertModel, tmp_path) == []
    assert _loaded("bert", tmp_path) == _expected("bert")


def test_a_model_with_gamma_and_beta_is_saved_under_the_names_of_transformers(saves: Saves, tmp_path: Path) -> None:
    old = {_old_layer_norm(key): value for key, value in ZOO["bert"].build().state_dict().items()}
    write_pickle(tmp_path / "old", "bert", old)

    BertModel.from_pretrained(tmp_path / "old").save_pretrained(tmp_path / "theirs", max_shard_size=SHARDS)
    with_mixin(BertModel).from_pretrained(tmp_path / "old").save_pretrained(tmp_path / "ours", max_shard_size=SHARDS)

    maps = [read_json(tmp_path / who / "model.safetensors.index.json")["weight_map"] for who in ("ours", "theirs")]
    assert maps[0].keys() == maps[1].keys()


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before zip"])
def test_a_state_dict_inside_a_training_checkpoint_is_found(zipped: bool, tmp_path: Path) -> None:
    inside = {"state_dict": ZOO["bert"].build().state_dict(), "epoch": 3, "lr": 1e-3}
    write_pickle(tmp_path, "bert", inside, zipped=zipped)

    assert _loaded("bert", tmp_path) == _expected("bert")


PREFIXES: dict[str, Callable[[str], str]] = {
    "DataParallel": lambda name: f"module.{name}",
    "compile": lambda name: f"_orig_mod.{name}",
    "compiled DataParallel": lambda name: f"_orig_mod.module.{name}",
    "DataParallel of compiled": lambda name: f"module._orig_mod.{name}",
    "a layer in DataParallel": lambda name: name.replace("encoder.layer.", "encoder.layer.module."),
    "twice": lambda name: f"module.module.{name}",
    "a compiled layer": lambda name: name.replace("layer.0.", "layer.0._orig_mod."),
    "a compiled layer in DataParallel": lambda name: "module." + name.replace("layer.1.", "layer.1._orig_mod."),
}


def _renamed(state_dict: Mapping[str, torch.Tensor], rename: Callable[[str], str]) -> StateDict:
    return {rename(key): value.clone() for key, value in state_dict.items()}


@pytest.mark.parametrize(
    ("kind", "wrapper"),
    [("bin", wrapper) for wrapper in PREFIXES] + [("safetensors", "DataParallel"), ("safetensors", "a compiled layer")],
)
def test_the_prefixes_of_wrappers_are_taken_off(wrapper: str, kind: str, tmp_path: Path) -> None:
    state_dict = _renamed(ZOO["bert"].build().state_dict(), PREFIXES[wrapper])
    write_pickle(tmp_path, "bert", state_dict)
    if kind == "safetensors":
        (tmp_path / "pytorch_model.bin").unlink()
        save_file(state_dict, tmp_path / "model.safetensors", {"format": "pt"})

    assert _loaded("bert", tmp_path) == _expected("bert")


@pytest.mark.parametrize("name", ["llama_tied", "mixtral", "llava", "wav2vec2", "vit"])
def test_the_prefixes_of_wrappers_are_taken_off_names_that_are_converted(
    name: str, saves: Saves, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    stock = load_file(saves.stock(name) / "model.safetensors")
    write_pickle(tmp_path, name, _renamed(stock, PREFIXES["DataParallel"]))

    assert _loaded(name, tmp_path) == _expected(name)


def test_the_prefixes_are_taken_off_a_base_model_that_a_head_is_put_on(tmp_path: Path) -> None:
    write_pickle(tmp_path, "bert", _renamed(ZOO["bert"].build().state_dict(), PREFIXES["DataParallel"]))

    loaded = load(with_mixin(BertForSequenceClassification), tmp_path)

    assert loaded.info["missing_keys"] == {"classifier.weight", "classifier.bias"}
    assert loaded.info["unexpected_keys"] == set()
    assert {key: bits(value) for key, value in loaded.model.get_submodule("bert").state_dict().items()} == _expected(
        "bert"
    )


def test_gamma_and_beta_in_a_wrapped_models_checkpoint_are_found(tmp_path: Path) -> None:
    old = _renamed(ZOO["bert"].build().state_dict(), lambda key: f"module.{_old_layer_norm(key)}")
    write_pickle(tmp_path, "bert", old)

    assert _loaded("bert", tmp_path) == _expected("bert")


class ModuleConfig(PreTrainedConfig):
    model_type = "zoo_module"


class ModuleModel(PreTrainedModel):
    """A child that is honestly called `module`, and a name that begins with those letters."""

    config_class = ModuleConfig
    config: ModuleConfig
    base_model_prefix = "inner"

    def __init__(self, config: ModuleConfig) -> None:
        super().__init__(config)
        self.module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        self.module_list = nn.ModuleList([nn.Linear(2, 2)])
        self.head = nn.Linear(2, 3)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.module_list[0](self.module(x)))
        return result


class Mine(hfshard.ShardedModelMixin, ModuleModel):
    pass


def _module_model(model_class: type = ModuleModel) -> Any:
    model = model_class(ModuleConfig())
    scramble(model)
    return model


@pytest.mark.parametrize("size", ["5GB", "5KB"])
def test_a_child_honestly_called_module_keeps_its_name(size: str, tmp_path: Path) -> None:
    _module_model(Mine).save_pretrained(tmp_path / "ours", max_shard_size=size)
    _module_model().save_pretrained(tmp_path / "theirs", max_shard_size=size)
    expected = {key: bits(value) for key, value in _module_model().state_dict().items()}

    for directory in (tmp_path / "ours", tmp_path / "theirs"):
        for model_class in (Mine, ModuleModel):
            assert _loaded("", directory, model_class) == expected


def test_a_child_honestly_called_module_loads_from_a_wrapped_models_checkpoint_too(tmp_path: Path) -> None:
    state_dict = _module_model().state_dict()
    ModuleConfig().save_pretrained(tmp_path)
    torch.save(_renamed(state_dict, PREFIXES["DataParallel"]), tmp_path / "pytorch_model.bin")

    assert _loaded("", tmp_path, Mine) == {key: bits(value) for key, value in state_dict.items()}


def test_names_that_fit_nothing_are_an_error_and_never_a_random_model(tmp_path: Path) -> None:
    write_pickle(tmp_path, "bert", _renamed(ZOO["bert"].build().state_dict(), lambda key: f"student.{key}"))

    with pytest.raises(hfshard.HfshardError, match="missing"):
        with_mixin(BertModel).from_pretrained(tmp_path)
