"""Directories that lack something, or name it otherwise: hfshard finds, chooses and refuses as transformers does."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertModel, PreTrainedModel

import hfshard
from tests.models.conftest import SHARDS, WHOLE, Saves
from tests.models.test_load_arguments_options import failure_of
from tests.zoo.compare import (
    INDEX,
    SINGLE_FILE,
    bits,
    differences,
    facts_of_load,
    load,
    raw_tensors,
    read_json,
)
from tests.zoo.mixin_classes import with_mixin
from tests.zoo.models import ZOO

pytestmark = pytest.mark.compat

every_layout = pytest.mark.parametrize("size", [WHOLE, SHARDS])


def _copy(source: Path, target: Path, change: Callable[[dict[str, Any]], object] = lambda config: None) -> Path:
    """A copy of a save whose config was changed."""
    shutil.copytree(source, target)
    config = read_json(target / "config.json")
    change(config)
    (target / "config.json").write_text(json.dumps(config))
    return target


def _both(name: str, directory: Path, **options: Any) -> list[str]:
    stock_class = ZOO[name].stock_class
    theirs = facts_of_load(load(stock_class, directory, **options), directory)
    return differences(facts_of_load(load(with_mixin(stock_class), directory, **options), directory), theirs)


@every_layout
@pytest.mark.parametrize("name", ["bert", "llama_bf16", "llama_mixed_dtypes", "t5_fp16", "resnet", "mixtral"])
def test_a_dtype_that_the_config_lacks_is_taken_from_the_same_tensor(
    name: str, size: str, saves: Saves, tmp_path: Path
) -> None:
    directory = _copy(saves.stock(name, size), tmp_path / "it", lambda config: config.pop("dtype"))

    assert _both(name, directory) == []
    assert _both(name, directory, dtype=torch.float64) == []


@pytest.mark.parametrize("name", ["llama_mixed_dtypes", "t5_fp16"])
def test_a_dtype_that_the_config_of_pickled_weights_lacks_is_taken_from_the_same_tensor(
    name: str, saves: Saves, tmp_path: Path
) -> None:
    directory = _copy(saves.stock(name), tmp_path / "it", lambda config: config.pop("dtype"))
    (directory / SINGLE_FILE).unlink()
    state_dict = ZOO[name].build().state_dict()
    for order in (list(state_dict), list(reversed(state_dict))):
        torch.save({key: state_dict[key] for key in order}, directory / "pytorch_model.bin")
        assert _both(name, directory) == []


@every_layout
@pytest.mark.parametrize("name", ["llama_generation", "bart", "whisper"])
def test_a_generation_config_that_is_not_there_comes_from_the_config(
    name: str, size: str, saves: Saves, tmp_path: Path
) -> None:
    directory = _copy(saves.stock(name, size), tmp_path / "it")
    (directory / "generation_config.json").unlink()

    assert _both(name, directory) == []


def test_generation_values_in_an_old_config_are_found(saves: Saves, tmp_path: Path) -> None:
    old = {"max_length": 33, "num_beams": 3}
    directory = _copy(saves.stock("bart"), tmp_path / "it", lambda config: config.update(old))
    (directory / "generation_config.json").unlink()

    assert _both("bart", directory) == []
    assert with_mixin(ZOO["bart"].stock_class).from_pretrained(directory).generation_config.num_beams == 3


@every_layout
def test_weights_that_the_config_names_are_read(size: str, saves: Saves, tmp_path: Path) -> None:
    file = SINGLE_FILE if size == WHOLE else INDEX
    other = file.replace("model", "consolidated")
    name_it: Callable[[dict[str, Any]], object] = lambda config: config.update(transformers_weights=other)  # noqa: E731
    directory = _copy(saves.stock("bert", size), tmp_path / "it", name_it)
    (directory / file).rename(directory / other)
    save_file({"wrong": torch.zeros(1)}, directory / SINGLE_FILE, {"format": "pt"})

    assert _both("bert", directory) == []


def test_a_single_file_is_read_before_an_index(saves: Saves, tmp_path: Path) -> None:
    directory = _copy(saves.stock("bert", SHARDS), tmp_path / "it")
    changed = {key: value + 1 for key, value in ZOO["bert"].build().state_dict().items()}
    save_file(changed, directory / SINGLE_FILE, {"format": "pt"})

    assert _both("bert", directory) == []


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}], ids=str)
def test_a_file_with_or_without_metadata_is_read_as_transformers_reads_it(
    metadata: dict[str, str] | None, saves: Saves, tmp_path: Path
) -> None:
    directory = _copy(saves.stock("bert"), tmp_path / "it")
    state_dict = {key: value.clone() for key, value in ZOO["bert"].build().state_dict().items()}
    save_file(state_dict, directory / SINGLE_FILE, metadata)

    assert _both("bert", directory) == []


def test_an_index_without_metadata_is_read_as_transformers_reads_it(saves: Saves, tmp_path: Path) -> None:
    directory = _copy(saves.stock("bert", SHARDS), tmp_path / "it")
    (directory / INDEX).write_text(
        json.dumps({"weight_map": read_json(directory / INDEX)["weight_map"], "metadata": {}})
    )

    assert _both("bert", directory) == []


def test_files_beside_the_weights_that_the_config_class_names_are_read(
    saves: Saves, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(BertConfig, "extra_files"):
        pytest.skip("this transformers has no extra_files")
    monkeypatch.setattr(BertConfig, "extra_files", ("head.safetensors",))
    directory = _copy(saves.stock("bert"), tmp_path / "it")
    state_dict = {key: value.clone() for key, value in ZOO["bert"].build().state_dict().items()}
    head = {key: state_dict.pop(key) for key in ("pooler.dense.weight", "pooler.dense.bias")}
    save_file(state_dict, directory / SINGLE_FILE, {"format": "pt"})
    save_file(head, directory / "head.safetensors", {"format": "pt"})

    assert _both("bert", directory) == []
    assert load(with_mixin(BertModel), directory).info["missing_keys"] == set()


def test_an_index_beside_no_model_is_loaded_with_the_config_that_is_given(saves: Saves, tmp_path: Path) -> None:
    directory = _copy(saves.stock("bert", SHARDS), tmp_path / "it")
    (directory / "config.json").unlink()

    assert _both("bert", directory, config=ZOO["bert"].make_config()) == []


def _nothing(directory: Path) -> None:
    shutil.rmtree(directory)


def _empty(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


def _no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def _no_weights(directory: Path) -> None:
    (directory / SINGLE_FILE).unlink()


def _weights_outside(directory: Path) -> None:
    config = {**read_json(directory / "config.json"), "transformers_weights": "../model.safetensors"}
    (directory / "config.json").write_text(json.dumps(config))


def _weights_of_another_kind(directory: Path) -> None:
    config = {**read_json(directory / "config.json"), "transformers_weights": "model.bin"}
    (directory / "config.json").write_text(json.dumps(config))


WRECKS = [_nothing, _empty, _no_config, _no_weights, _weights_outside, _weights_of_another_kind]


@pytest.mark.parametrize("wreck", WRECKS, ids=lambda wreck: wreck.__name__)
def test_what_can_not_be_loaded_is_refused_with_the_same_kind_of_error(
    wreck: Callable[[Path], None], saves: Saves, tmp_path: Path
) -> None:
    directory = _copy(saves.stock("bert"), tmp_path / "it")
    wreck(directory)
    # Without a config, transformers builds the default model, of which these leave a small part.
    small: dict[str, Any] = {"num_hidden_layers": 1, "vocab_size": 67}
    theirs = failure_of(lambda: BertModel.from_pretrained(directory, **small))

    ours = failure_of(lambda: with_mixin(BertModel).from_pretrained(directory, **small))

    kind = next(kind for kind in type(theirs).__mro__ if kind.__module__ == "builtins")
    assert isinstance(ours, kind), (ours, theirs)
    assert str(directory) in str(ours)


def test_a_config_that_is_no_json_is_damage(saves: Saves, tmp_path: Path) -> None:
    directory = _copy(saves.stock("bert"), tmp_path / "it")
    (directory / "config.json").write_text("{")

    with pytest.raises(hfshard.HfshardError, match=f"{directory}/config.json"):
        with_mixin(BertModel).from_pretrained(directory)


@every_layout
def test_the_default_device_makes_no_difference_to_what_is_read_and_written(
    size: str, saves: Saves, tmp_path: Path
) -> None:
    model = ZOO["bert"].build(with_mixin(BertModel))
    with torch.device("meta"):
        for mapped in (True, False):
            tensors = hfshard.load_state_dict(saves.stock("bert", size), disable_mmap=not mapped)
            assert {key: bits(value) for key, value in tensors.items()} == raw_tensors(saves.stock("bert"))
        model.save_pretrained(tmp_path, max_shard_size=size)

    assert raw_tensors(tmp_path) == raw_tensors(saves.stock("bert"))


def test_a_load_on_the_meta_device_is_refused_as_transformers_refuses_it(saves: Saves) -> None:
    def on_meta(model_class: type[PreTrainedModel]) -> None:
        with torch.device("meta"):
            model_class.from_pretrained(saves.stock("bert"))

    theirs, ours = failure_of(lambda: on_meta(BertModel)), failure_of(lambda: on_meta(with_mixin(BertModel)))

    assert type(ours) is type(theirs) and str(ours) == str(theirs)


def test_a_load_that_fits_needs_no_look_at_the_models_tensors(saves: Saves, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = saves.ours("bert")
    collect = torch.nn.Module.state_dict
    callers: set[str] = set()

    def noted(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        callers.add(str(sys._getframe(1).f_globals["__name__"]).split(".")[0])
        return collect(module, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "state_dict", noted)
    hfshard.load_model(BertModel, directory)
    assert callers == {"transformers", "torch"}  # torch's collects those of the modules inside
