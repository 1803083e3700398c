"""Directories that lack something, name it otherwise, or hold pickles: hfshard loads what transformers does."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedConfig, PreTrainedModel

import hfshard
from hfshard.errors import DamagedCheckpointError, StateDictMismatchError
from tests.models.conftest import SHARDS, WHOLE, Saves
from tests.zoo.compare import INDEX, SINGLE_FILE, bits_of, fails_alike, load, loads_alike, raw_tensors, read_json
from tests.zoo.mixin_classes import with_mixin
from tests.zoo.models import ZOO, scramble

pytestmark = pytest.mark.compat

PICKLE = "pytorch_model.bin"
every_layout = pytest.mark.parametrize("size", [WHOLE, SHARDS])
Copy = Callable[..., Path]


@pytest.fixture
def copy(saves: Saves, tmp_path: Path) -> Copy:
    """Copies what stock transformers saved of a model, with other values in its config; what is None is left out."""

    def copied(name: str, size: str = WHOLE, **values: Any) -> Path:
        directory = Path(shutil.copytree(saves.stock(name, size), tmp_path / "it"))
        config = {**read_json(directory / "config.json"), **values}
        kept = {key: value for key, value in config.items() if value is not None or key not in values}
        (directory / "config.json").write_text(json.dumps(kept))
        return directory

    return copied


def bert_weights() -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = ZOO["bert"].build().state_dict()
    return weights


def save_single(directory: Path, state_dict: Mapping[str, torch.Tensor], metadata: dict[str, str] | None) -> None:
    save_file({key: value.clone() for key, value in state_dict.items()}, directory / SINGLE_FILE, metadata)


FORMAT = {"format": "pt"}


@every_layout
@pytest.mark.parametrize("name", ["bert", "llama_bf16", "llama_mixed_dtypes", "t5_fp16", "resnet", "mixtral"])
def test_a_dtype_that_the_config_lacks_is_taken_from_the_same_tensor(name: str, size: str, copy: Copy) -> None:
    directory = copy(name, size, dtype=None)

    loads_alike(ZOO[name].stock_class, directory)
    loads_alike(ZOO[name].stock_class, directory, dtype=torch.float64)


def test_a_dtype_that_the_config_lacks_is_taken_from_the_index_first(copy: Copy) -> None:
    directory = copy("bert", SHARDS, dtype=None)
    index = read_json(directory / INDEX)
    index["metadata"]["dtype"] = "bfloat16"
    (directory / INDEX).write_text(json.dumps(index))

    loads_alike(BertModel, directory)
    loads_alike(BertModel, directory, dtype="float16")
    loads_alike(BertModel, directory, torch_dtype=torch.float64)
    assert with_mixin(BertModel).from_pretrained(directory).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["llama_mixed_dtypes", "t5_fp16"])
def test_a_dtype_that_the_config_of_pickled_weights_lacks_is_taken_from_the_same_tensor(name: str, copy: Copy) -> None:
    directory = copy(name, dtype=None)
    (directory / SINGLE_FILE).unlink()
    state_dict = ZOO[name].build().state_dict()
    for order in (list(state_dict), list(reversed(state_dict))):
        torch.save({key: state_dict[key] for key in order}, directory / PICKLE)
        loads_alike(ZOO[name].stock_class, directory)


@every_layout
@pytest.mark.parametrize("name", ["llama_generation", "bart", "whisper"])
def test_a_generation_config_that_is_not_there_comes_from_the_config(name: str, size: str, copy: Copy) -> None:
    directory = copy(name, size)
    (directory / "generation_config.json").unlink()

    loads_alike(ZOO[name].stock_class, directory)


def test_generation_values_in_an_old_config_are_found(copy: Copy) -> None:
    directory = copy("bart", max_length=33, num_beams=3)
    (directory / "generation_config.json").unlink()

    assert loads_alike(ZOO["bart"].stock_class, directory)["generation config"]["num_beams"] == 3


def test_configs_with_infinity_are_loaded_and_cast(saves: Saves, copy: Copy, tmp_path: Path) -> None:
    directory = copy("llama_generation", transformers_weights="other.safetensors", extra=math.inf)
    (directory / SINGLE_FILE).rename(directory / "other.safetensors")
    generation = directory / "generation_config.json"
    generation.write_text(json.dumps({**read_json(generation), "max_time": math.inf}))

    loaded = loads_alike(ZOO["llama_generation"].stock_class, directory)
    hfshard.reshard_checkpoint(directory, tmp_path / "cast", dtype="bfloat16")

    assert loaded["generation config"]["max_time"] == math.inf
    assert read_json(tmp_path / "cast" / "config.json")["extra"] == math.inf


@every_layout
def test_weights_that_the_config_names_are_read(size: str, copy: Copy) -> None:
    file = SINGLE_FILE if size == WHOLE else INDEX
    other = file.replace("model", "consolidated")
    directory = copy("bert", size, transformers_weights=other)
    (directory / file).rename(directory / other)
    save_single(directory, {"wrong": torch.zeros(1)}, FORMAT)

    loads_alike(BertModel, directory)


def test_a_single_file_is_read_before_an_index(copy: Copy) -> None:
    directory = copy("bert", SHARDS)
    save_single(directory, {key: value + 1 for key, value in bert_weights().items()}, FORMAT)

    loads_alike(BertModel, directory)


@pytest.mark.parametrize("metadata", [None, {}, FORMAT], ids=str)
def test_a_file_with_or_without_metadata_is_read_as_transformers_reads_it(metadata: Any, copy: Copy) -> None:
    directory = copy("bert")
    save_single(directory, bert_weights(), metadata)

    loads_alike(BertModel, directory)


def test_an_index_without_metadata_is_read_as_transformers_reads_it(copy: Copy) -> None:
    directory = copy("bert", SHARDS)
    (directory / INDEX).write_text(json.dumps({**read_json(directory / INDEX), "metadata": {}}))

    loads_alike(BertModel, directory)


def test_files_that_the_config_class_names_are_read(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(BertConfig, "extra_files"):
        pytest.skip("this transformers has no extra_files")
    monkeypatch.setattr(BertConfig, "extra_files", ("head.safetensors",))
    directory = copy("bert")
    state_dict = bert_weights()
    head = {key: state_dict.pop(key) for key in ("pooler.dense.weight", "pooler.dense.bias")}
    save_single(directory, state_dict, FORMAT)
    save_file(head, directory / "head.safetensors", FORMAT)

    assert loads_alike(BertModel, directory)["loading info"]["missing_keys"] == []


def test_an_index_beside_no_model_is_loaded_with_the_config_that_is_given(copy: Copy) -> None:
    directory = copy("bert", SHARDS)
    (directory / "config.json").unlink()

    loads_alike(BertModel, directory, config=ZOO["bert"].make_config())


WRECKS: dict[str, tuple[dict[str, str], str]] = {
    "nothing": ({}, ""),
    "empty": ({}, "*"),
    "no config": ({}, "config.json"),
    "no weights": ({}, SINGLE_FILE),
    "weights outside": ({"transformers_weights": "../model.safetensors"}, "none"),
    "weights of another kind": ({"transformers_weights": "model.bin"}, "none"),
}
"""What the config says, and the files that are removed; with "", the directory."""


@pytest.mark.parametrize(("values", "removed"), WRECKS.values(), ids=WRECKS)
def test_what_is_no_checkpoint_is_refused_with_the_same_kind_of_error(values: Any, removed: str, copy: Copy) -> None:
    directory = copy("bert", **values)
    for path in directory.glob(removed or "*"):
        path.unlink()
    if not removed:
        directory.rmdir()

    # Without a config, transformers builds the default model, of which these leave a small part.
    ours, _ = fails_alike(BertModel, directory, num_hidden_layers=1, vocab_size=67)

    assert str(directory) in str(ours)


def test_a_config_that_is_no_json_is_damage(copy: Copy) -> None:
    directory = copy("bert")
    (directory / "config.json").write_text("{")

    with pytest.raises(hfshard.HfshardError, match=f"{directory}/config.json"):
        with_mixin(BertModel).from_pretrained(directory)


@every_layout
def test_the_default_device_makes_no_difference_to_reads_and_writes(size: str, saves: Saves, tmp_path: Path) -> None:
    model = ZOO["bert"].build(with_mixin(BertModel))
    with torch.device("meta"):
        for mapped in (True, False):
            tensors = hfshard.load_state_dict(saves.stock("bert", size), disable_mmap=not mapped)
            assert bits_of(tensors) == raw_tensors(saves.stock("bert"))
        model.save_pretrained(tmp_path, max_shard_size=size)

    assert raw_tensors(tmp_path) == raw_tensors(saves.stock("bert"))


def test_a_load_on_the_meta_device_is_refused_as_transformers_refuses_it(saves: Saves) -> None:
    with torch.device("meta"):
        ours, theirs = fails_alike(BertModel, saves.stock("bert"))

    assert type(ours) is type(theirs) and str(ours) == str(theirs)


def test_a_load_that_fits_needs_no_look_at_the_models_tensors(saves: Saves, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = saves.ours("bert")
    collect = nn.Module.state_dict
    callers: set[str] = set()

    def noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        callers.add(str(sys._getframe(1).f_globals["__name__"]).split(".")[0])
        return collect(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "state_dict", noted)
    hfshard.load_model(BertModel, directory)
    assert callers == {"transformers", "torch"}  # torch's collects those of the modules inside


def write_pickle(directory: Path, name: str, state_dict: Any = None, *, shards: int = 1, zipped: bool = True) -> None:
    """Write the config and the pickled weights of a specimen, or other contents, as before safetensors."""
    model = ZOO[name].build()
    model.config.architectures = [ZOO[name].class_name]
    model.config.save_pretrained(directory)
    contents = model.state_dict() if state_dict is None else state_dict
    if shards == 1:
        torch.save(contents, directory / PICKLE, _use_new_zipfile_serialization=zipped)
        return
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        part = {key: contents[key] for key in list(contents)[number::shards]}
        weight_map |= dict.fromkeys(part, file)
        torch.save(part, directory / file, _use_new_zipfile_serialization=zipped)
    total_size = sum(getattr(value, "nbytes", 0) for value in contents.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (directory / f"{PICKLE}.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("value", [3, None, {"scale": torch.ones(2)}, torch.ones(2, device="meta")], ids=type)
def test_an_entry_of_a_pickle_that_is_no_tensor_is_unexpected(value: Any, shards: int, tmp_path: Path) -> None:
    contents = {**bert_weights(), "pooler._extra_state": value}
    write_pickle(tmp_path, "bert", contents, shards=shards)

    assert loads_alike(BertModel, tmp_path)["loading info"]["unexpected_keys"] == ["pooler._extra_state"]

    write_pickle(tmp_path, "bert", {**bert_weights(), "pooler.dense.bias": value}, shards=shards)
    for ignored in (False, True):
        with pytest.raises(DamagedCheckpointError, match=r"its entry 'pooler\.dense\.bias' is a "):
            with_mixin(BertModel).from_pretrained(tmp_path, ignore_mismatched_sizes=ignored)


def write_bert(directory: Path, rename: Callable[[str], str], kind: str = "bin") -> None:
    """Write the weights of a specimen under other names, pickled or not."""
    state_dict = {rename(key): value.clone() for key, value in bert_weights().items()}
    write_pickle(directory, "bert", state_dict)
    if kind == "safetensors":
        (directory / PICKLE).unlink()
        save_single(directory, state_dict, FORMAT)


@pytest.mark.parametrize(
    ("name", "shards", "zipped"),
    [(name, 1, True) for name in ("bert", "gpt2", "llama_tied", "mixtral", "resnet", "llama_bf16", "wav2vec2")]
    + [(name, 1, False) for name in ("bert", "llama_tied", "llama_bf16")]
    + [(name, 3, True) for name in ("bert", "llama_tied", "mixtral")]
    + [("llama_tied", 3, False)],
)
def test_a_pickled_checkpoint_loads_as_in_transformers(name: str, shards: int, zipped: bool, tmp_path: Path) -> None:
    write_pickle(tmp_path, name, shards=shards, zipped=zipped)

    loads_alike(ZOO[name].stock_class, tmp_path)


@pytest.mark.parametrize(
    "options", [{"dtype": torch.float16}, {"device_map": "cpu"}, {"use_safetensors": False}], ids=str
)
def test_an_option_does_what_transformers_does_with_pickles(options: dict[str, Any], tmp_path: Path) -> None:
    write_pickle(tmp_path, "bert", shards=3)

    loads_alike(BertModel, tmp_path, **options)


def test_a_variant_of_a_pickled_checkpoint_loads_as_transformers_loads_it(tmp_path: Path) -> None:
    write_pickle(tmp_path, "bert")
    (tmp_path / PICKLE).rename(tmp_path / "pytorch_model.fp16.bin")

    loads_alike(BertModel, tmp_path, variant="fp16")


@pytest.mark.parametrize("use", [None, True, False])
def test_use_safetensors_chooses_between_two_formats_as_transformers_does(use: bool | None, tmp_path: Path) -> None:
    state_dict = bert_weights()
    pickled = {key: value + 1 for key, value in state_dict.items()}
    write_pickle(tmp_path, "bert", pickled)
    save_single(tmp_path, state_dict, FORMAT)

    loads_alike(BertModel, tmp_path, use_safetensors=use)
    loaded = with_mixin(BertModel).from_pretrained(tmp_path, use_safetensors=use)
    expected = pickled if use is False else state_dict
    assert torch.equal(loaded.get_parameter("pooler.dense.bias"), expected["pooler.dense.bias"])


def test_safetensors_asked_of_a_pickled_checkpoint_are_not_found(tmp_path: Path) -> None:
    write_pickle(tmp_path, "bert")

    for error in fails_alike(BertModel, tmp_path, use_safetensors=True):
        assert isinstance(error, OSError)


def _old_layer_norm(name: str) -> str:
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def _expected(name: str) -> dict[str, Any]:
    return bits_of(ZOO[name].build().state_dict())


def _loaded(directory: Path, model_class: type[PreTrainedModel]) -> dict[str, Any]:
    return bits_of(model_class.from_pretrained(directory).state_dict())


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
def test_gamma_and_beta_are_renamed_as_transformers_renames_them(kind: str, tmp_path: Path) -> None:
    write_bert(tmp_path, _old_layer_norm, kind)

    loads_alike(BertModel, tmp_path)
    assert _loaded(tmp_path, with_mixin(BertModel)) == _expected("bert")


def test_a_model_with_gamma_and_beta_is_saved_under_the_names_of_transformers(tmp_path: Path) -> None:
    write_bert(tmp_path, _old_layer_norm)
    maps = []
    for who, model_class in (("theirs", BertModel), ("ours", with_mixin(BertModel))):
        model_class.from_pretrained(tmp_path).save_pretrained(tmp_path / who, max_shard_size=SHARDS)
        maps.append(read_json(tmp_path / who / INDEX)["weight_map"])

    assert maps[0].keys() == maps[1].keys()


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before zip"])
def test_a_state_dict_inside_a_training_checkpoint_is_found(zipped: bool, tmp_path: Path) -> None:
    write_pickle(tmp_path, "bert", {"state_dict": bert_weights(), "epoch": 3, "lr": 1e-3}, zipped=zipped)

    assert _loaded(tmp_path, with_mixin(BertModel)) == _expected("bert")


PREFIXES: dict[str, Callable[[str], str]] = {
    "DataParallel": lambda name: f"module.{name}",
    "compile": lambda name: f"_orig_mod.{name}",
    "compiled DataParallel": lambda name: f"_orig_mod.module.{name}",
    "DataParallel of compiled": lambda name: f"module._orig_mod.{name}",
    "a layer in DataParallel": lambda name: name.replace("encoder.layer.", "encoder.layer.module."),
    "twice": lambda name: f"module.module.{name}",
    "a compiled layer": lambda name: name.replace("layer.0.", "layer.0._orig_mod."),
    "a compiled layer in DataParallel": lambda name: "module." + name.replace("layer.1.", "layer.1._orig_mod."),
    "gamma and beta in DataParallel": lambda name: f"module.{_old_layer_norm(name)}",
}


@pytest.mark.parametrize(
    ("kind", "wrapper"),
    [("bin", wrapper) for wrapper in PREFIXES] + [("safetensors", "DataParallel"), ("safetensors", "a compiled layer")],
)
def test_the_prefixes_of_wrappers_are_taken_off(wrapper: str, kind: str, tmp_path: Path) -> None:
    write_bert(tmp_path, PREFIXES[wrapper], kind)

    assert _loaded(tmp_path, with_mixin(BertModel)) == _expected("bert")


@pytest.mark.parametrize("name", ["llama_tied", "mixtral", "llava", "wav2vec2", "vit"])
def test_the_prefixes_of_wrappers_are_taken_off_converted_names(name: str, saves: Saves, tmp_path: Path) -> None:
    stored = load_file(saves.stock(name) / SINGLE_FILE)
    write_pickle(tmp_path, name, {f"module.{key}": value for key, value in stored.items()})

    assert _loaded(tmp_path, with_mixin(ZOO[name].stock_class)) == _expected(name)


def test_the_prefixes_are_taken_off_a_base_model_that_a_head_is_put_on(tmp_path: Path) -> None:
    write_bert(tmp_path, PREFIXES["DataParallel"])

    loaded = load(with_mixin(BertForSequenceClassification), tmp_path)

    assert loaded.info["missing_keys"] == {"classifier.weight", "classifier.bias"}
    assert loaded.info["unexpected_keys"] == set()
    assert bits_of(loaded.model.get_submodule("bert").state_dict()) == _expected("bert")


@pytest.mark.parametrize("prefix", ["module.", "module.net.", "_orig_mod.net."])
def test_a_key_mapping_renames_the_names_in_the_file(prefix: str, tmp_path: Path) -> None:
    write_bert(tmp_path, lambda key: f"{prefix}{key}", "safetensors")

    options = {"key_mapping": {f"^{re.escape(prefix)}": ""}}

    loads_alike(BertModel, tmp_path, **options)
    assert bits_of(load(with_mixin(BertModel), tmp_path, **options).model.state_dict()) == _expected("bert")


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


class SizedModel(ModuleModel):
    """One whose constructor takes more than the config."""

    def __init__(self, config: ModuleConfig, width: int, *, bias: bool) -> None:
        super().__init__(config)
        self.more = nn.Linear(width, 2, bias=bias)
        self.post_init()  # type: ignore[no-untyped-call]


def _module_model(model_class: Any = ModuleModel, *args: Any, **options: Any) -> Any:
    model = model_class(ModuleConfig(), *args, **options)
    scramble(model)
    return model


@pytest.mark.parametrize("size", ["5GB", "5KB"])
def test_a_child_honestly_called_module_keeps_its_name(size: str, tmp_path: Path) -> None:
    for number, saved_class in enumerate((Mine, ModuleModel)):
        _module_model(saved_class).save_pretrained(tmp_path / str(number), max_shard_size=size)
        for model_class in (Mine, ModuleModel):
            assert _loaded(tmp_path / str(number), model_class) == bits_of(_module_model().state_dict())


def test_a_child_honestly_called_module_loads_from_a_wrapped_models_checkpoint_too(tmp_path: Path) -> None:
    state_dict = _module_model().state_dict()
    ModuleConfig().save_pretrained(tmp_path)
    torch.save({f"module.{key}": value.clone() for key, value in state_dict.items()}, tmp_path / PICKLE)

    assert _loaded(tmp_path, Mine) == bits_of(state_dict)


def test_its_constructor_gets_all_arguments(tmp_path: Path) -> None:
    model = _module_model(SizedModel, 3, bias=True)
    model.save_pretrained(tmp_path)

    loads_alike(SizedModel, tmp_path, 3, bias=True)

    with pytest.raises(
        StateDictMismatchError, match=r"1 of another shape: more.weight \[2, 3\] in the checkpoint, \[2, 5\] in"
    ):
        with_mixin(SizedModel).from_pretrained(tmp_path, 5, bias=True)


def test_names_that_fit_nothing_are_an_error_and_never_a_random_model(tmp_path: Path) -> None:
    write_bert(tmp_path, lambda key: f"student.{key}")

    with pytest.raises(hfshard.HfshardError, match="missing"):
        with_mixin(BertModel).from_pretrained(tmp_path)
