"""Classes of transformers and of other libraries that have methods of their own: what they add runs, or is refused."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import ModelHubMixin, PyTorchModelHubMixin
from torch import nn
from transformers import AutoModelForTextToWaveform, BertConfig, BertModel, PreTrainedModel
from transformers.modeling_layers import MtpModel

import hfshard
from hfshard.errors import InvalidArgumentError
from hfshard.models.patching import is_plain_class, is_pretrained, is_pretrained_class
from hfshard.models.transformers_methods import without_mixin
from tests.helpers.peft_versions import peft_of_transformers
from tests.zoo.compare import (
    Facts,
    differences,
    facts_of_model,
    fails_alike,
    load,
    loads_alike,
    raw_tensors,
    read_json,
    small_files,
)
from tests.zoo.mixin_classes import with_mixin
from tests.zoo.overriding import BUILDERS, NOT_BUILT, build
from tests.zoo.parameters import parameters

OMNI = "Qwen2_5OmniForConditionalGeneration"
CSM, KYUTAI = "CsmForConditionalGeneration", "KyutaiSpeechToTextForConditionalGeneration"
GRANITE = [name for name in BUILDERS if name.startswith("Granite")]
METHODS = {"from_pretrained", "save_pretrained"}
MIXIN, FUNCTION = ([(name, how) for name in BUILDERS] for how in ("mixin", "function"))
_OTHERS = [way for way in FUNCTION if way[0] not in (CSM, OMNI)]
every_way = pytest.mark.parametrize(("name", "how"), parameters(MIXIN + FUNCTION, MIXIN, _OTHERS))
"""Both ways call the same chain of overrides: by the function, the classes that add most, and others with --slow."""
SPEAKERS = {"Chelsie": {"bos_token": 3, "cond": torch.arange(4.0)}}


class Stock:
    """Models that stock transformers saved, each made when it is asked for; nobody writes into their directories."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._saved = cache(self._save)
        self.loaded_facts = cache(self._loaded_facts)

    def at(self, name: str) -> Path:
        """Where it is."""
        return self._saved(name)[0]

    def saved_facts(self, name: str) -> Facts:
        """What is seen of the model after its save."""
        return self._saved(name)[1]

    def _save(self, name: str) -> tuple[Path, Facts]:
        model = build(name)
        model.save_pretrained(self._root / name)
        if name == OMNI:
            torch.save(SPEAKERS, self._root / name / "spk_dict.pt")
        return self._root / name, _facts(model)

    def _loaded_facts(self, name: str) -> Facts:
        """What is seen of it when stock transformers loads it."""
        return _facts(getattr(transformers, name).from_pretrained(self.at(name)))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    return Stock(tmp_path_factory.mktemp("stock"))


@pytest.mark.compat
def test_every_class_of_the_installed_transformers_that_overrides_is_tested_here() -> None:
    found = {
        name
        for path in sorted(Path(transformers.__path__[0]).rglob("modeling_*.py"))
        for name in _names_of_overriding_models(path)
    }

    assert found == BUILDERS.keys() | NOT_BUILT.keys()


def _names_of_overriding_models(path: Path) -> list[str]:
    """The model classes of a file that define one of the methods; transformers' own base of models does not count."""
    source = path.read_bytes()
    if b"PreTrainedModel" not in source or not any(f"def {method}(".encode() in source for method in METHODS):
        return []
    overriding = [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        and any(isinstance(item, ast.FunctionDef) and item.name in METHODS for item in node.body)
    ]
    parts = path.relative_to(Path(transformers.__path__[0])).with_suffix("").parts
    module = importlib.import_module(".".join(["transformers", *parts])) if overriding else None
    found = [getattr(module, name) for name in overriding]
    return [model.__name__ for model in found if issubclass(model, PreTrainedModel) and model is not PreTrainedModel]


@every_way
def test_a_save_writes_what_the_class_adds(name: str, how: str, stock: Stock, tmp_path: Path) -> None:
    stock_class = getattr(transformers, name)
    model = build(name, with_mixin(stock_class) if how == "mixin" else None)
    if how == "mixin":
        model.save_pretrained(tmp_path)
    else:
        index = hfshard.save_model(model, tmp_path)
        assert index is not None and index.weight_map

    theirs = {path: raw for path, raw in small_files(stock.at(name)).items() if path != "spk_dict.pt"}
    assert differences({"small files": small_files(tmp_path)}, {"small files": theirs}) == []
    assert differences({"tensors": raw_tensors(tmp_path)}, {"tensors": raw_tensors(stock.at(name))}) == []
    assert differences(_facts(model), stock.saved_facts(name)) == []


@every_way
def test_a_load_gives_what_the_class_adds(name: str, how: str, stock: Stock) -> None:
    stock_class = getattr(transformers, name)

    if how == "mixin":
        ours: Any = with_mixin(stock_class).from_pretrained(stock.at(name))
        assert type(ours) is with_mixin(stock_class)
    else:
        ours = hfshard.load_model(stock_class, stock.at(name))
        assert type(ours) is stock_class

    assert differences(_facts(ours), stock.loaded_facts(name)) == []
    if name == CSM:
        assert ours.depth_decoder.generation_config.temperature == 0.625
        assert not hasattr(ours.generation_config, "depth_decoder_temperature")
    elif name == KYUTAI:
        assert ours.codec_model.generation_config.max_length == 77
    elif name == OMNI:
        assert torch.equal(ours.speaker_map["Chelsie"]["cond"], torch.arange(4.0))


def _facts(model: Any) -> Facts:
    """What is seen of a model, with the generation configs of the models in it and the voices of Qwen2.5-Omni."""
    parts = {path: getattr(part, "generation_config", None) for path, part in model.named_modules() if path}
    return {
        **facts_of_model(model),
        "generation configs": {path: part.to_dict() for path, part in parts.items() if part is not None},
        "voices": repr(getattr(model, "speaker_map", None)),
    }


@pytest.mark.compat
@pytest.mark.parametrize("name", [CSM, KYUTAI])
def test_the_class_decides_what_output_loading_info_returns(name: str, stock: Stock) -> None:
    stock_class = getattr(transformers, name)
    loads_alike(stock_class, stock.at(name))

    _, info = hfshard.load_model(stock_class, stock.at(name), output_loading_info=True)
    assert info["missing_keys"] == load(stock_class, stock.at(name)).info["missing_keys"]


@pytest.mark.compat
def test_an_auto_class_calls_the_override(stock: Stock) -> None:
    ours = hfshard.load_model(AutoModelForTextToWaveform, stock.at(CSM), verify="structure")

    assert ours.depth_decoder.generation_config.temperature == 0.625


@pytest.mark.compat
def test_a_push_sends_what_the_class_adds(stock: Stock, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    build(CSM, with_mixin(transformers.CsmForConditionalGeneration)).push_to_hub(f"file://{hub}")
    pulled = hfshard.pull_checkpoint(f"file://{hub}", tmp_path / "pulled")

    assert read_json(Path(pulled) / "generation_config.json") == read_json(stock.at(CSM) / "generation_config.json")
    loaded = hfshard.load_model(transformers.CsmForConditionalGeneration, f"file://{hub}")
    assert loaded.depth_decoder.generation_config.temperature == 0.625


@pytest.mark.compat
def test_voices_come_from_a_directory_hub_too(stock: Stock, tmp_path: Path) -> None:
    hfshard.push_checkpoint(stock.at(OMNI), f"file://{tmp_path / 'hub'}")

    loaded = with_mixin(transformers.Qwen2_5OmniForConditionalGeneration).from_pretrained(tmp_path / "hub")

    assert repr(loaded.speaker_map) == repr(SPEAKERS)


@pytest.mark.compat
@pytest.mark.parametrize("name", NOT_BUILT)
def test_a_class_that_is_not_built_fails_as_in_transformers(name: str) -> None:
    ours, theirs = fails_alike(getattr(transformers, name, MtpModel), "resnet18")

    assert isinstance(ours, (ImportError, AttributeError)) and isinstance(theirs, (ImportError, AttributeError))
    assert str(ours) == str(theirs)


@pytest.mark.compat
@pytest.mark.filterwarnings("ignore:Could not find a config file")  # PEFT's, of a directory that is not there yet
@pytest.mark.parametrize("name", GRANITE)
def test_adapters_are_saved_beside_the_model_as_the_class_does(name: str, tmp_path: Path) -> None:
    peft = peft_of_transformers()
    saved = {}
    for who, model_class in (("theirs", None), ("ours", with_mixin(getattr(transformers, name)))):
        model = build(name, model_class)
        torch.manual_seed(3)
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        model.save_pretrained(str(tmp_path / who))  # the class puts it into JSON
        saved[who] = {path.name: path.read_bytes() for path in (tmp_path / who).iterdir() if path.suffix == ".json"}

    adapter = "adapter_config.json"
    assert saved["ours"].pop(adapter).replace(b"ours", b"theirs") == saved["theirs"].pop(adapter)
    assert saved["ours"] == saved["theirs"]
    assert raw_tensors(tmp_path / "ours") == raw_tensors(tmp_path / "theirs")


class UNet(nn.Module):
    """A model of another library: with a config, a from_pretrained and a save_pretrained of its own."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.width = width
        self.layer = nn.Linear(width, width)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(**config)

    @classmethod
    def from_pretrained(cls, path: Path) -> Any:
        return cls.from_config(json.loads((path / "config.json").read_text()))

    def save_pretrained(self, save_directory: Path) -> None:
        (save_directory / "config.json").write_text(json.dumps({"width": self.width}))


class ShardedUNet(hfshard.ShardedModelMixin, UNet):
    """As a user may try it."""


def test_the_mixin_refuses_them_before_anything_is_written(tmp_path: Path) -> None:
    model: Any = ShardedUNet()
    other: Any = ShardedUNet
    calls: list[Callable[[], Any]] = [
        lambda: model.save_pretrained(tmp_path / "out"),
        lambda: model.push_to_hub(tmp_path / "hub"),
        lambda: other.from_pretrained(tmp_path),
    ]
    for call in calls:
        with pytest.raises(InvalidArgumentError, match=r"ShardedUNet is not a transformers model.*hfshard\.save_model"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_load_model_says_how_to_load_them(tmp_path: Path) -> None:
    UNet().save_pretrained(tmp_path)
    hfshard.save_model(UNet(), tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"but UNet of tests\.models\.test_patching is not one.*module"):
        hfshard.load_model(UNet, tmp_path)


def test_what_it_says_works(tmp_path: Path) -> None:
    saved = UNet()
    saved.save_pretrained(tmp_path)
    hfshard.save_model(saved, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "diffusion_pytorch_model.safetensors")

    built = UNet.from_pretrained(tmp_path)
    hfshard.load_model(built, tmp_path / "diffusion_pytorch_model.safetensors")

    assert torch.equal(built.layer.weight, saved.layer.weight)


# Whether a model is transformers' or one's own, and what lies behind the mixin.


CONFIG = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=10)


class Net(hfshard.ShardedModelMixin, nn.Module):
    """A module of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


class Child(Net):
    """A subclass, in which the mixin is one class further back."""


class Bert(hfshard.ShardedModelMixin, BertModel):
    """A model of transformers."""


@pytest.mark.parametrize(
    ("model_class", "pretrained", "plain"),
    [
        (BertModel, True, False),
        (Bert, True, False),
        (Net, False, True),
        (Child, False, True),
        (nn.Linear, False, False),
    ],
)
def test_a_class_is_of_transformers_or_plain_or_neither(model_class: type, pretrained: bool, plain: bool) -> None:
    assert (is_pretrained_class(model_class), is_plain_class(model_class)) == (pretrained, plain)


def test_an_instance_is_of_the_kind_of_its_class_and_is_no_class() -> None:
    assert [is_pretrained(model) for model in (Net(), Bert(CONFIG), Bert, None)] == [False, True, False, False]
    assert not is_plain_class(Net())


@pytest.mark.parametrize("target", [Net, Child, Bert])
def test_behind_the_mixin_are_neither_it_nor_those_of_huggingface_hub(target: type) -> None:
    found = without_mixin(target)

    assert (found.__thisclass__, found.__self__) == (ModelHubMixin, target)
    assert hasattr(found, "push_to_hub") == (target is Bert)  # transformers has its own
    assert not hasattr(found, "_save_pretrained")


def test_methods_behind_the_mixin_are_bound_to_the_model() -> None:
    model = Child()

    assert list(without_mixin(model).state_dict()) == ["layer.weight", "layer.bias"]
    assert without_mixin(Bert).save_pretrained is PreTrainedModel.save_pretrained


class Base(BertModel):
    """A class of one's own between the mixin and a mixin of huggingface_hub."""


class Both(hfshard.ShardedModelMixin, Base, PyTorchModelHubMixin):
    """A class with both mixins, one before and one behind transformers' class."""


def test_a_class_between_two_mixins_is_not_skipped() -> None:
    assert without_mixin(Both).__thisclass__ is not Base
    behind = Both.__mro__[Both.__mro__.index(without_mixin(Both).__thisclass__) + 1]
    assert behind is Base
