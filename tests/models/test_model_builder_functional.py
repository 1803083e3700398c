"""`save_model` and `load_model` on models and classes without the mixin."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, BertModel

import hfshard
from tests.models.conftest import SHARDS, Saves
from tests.models.test_load_arguments_options import failure_of
from tests.zoo.compare import bits, differences, facts_of_load, load, raw_tensors, small_files
from tests.zoo.models import ZOO
from tests.zoo.parameters import every_layout_by_representatives, every_model_by_representatives


class _Through:
    """`hfshard.load_model(target, ...)` in the shape of a class with `from_pretrained`."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def from_pretrained(self, *arguments: Any, **options: Any) -> Any:
        return hfshard.load_model(self.target, *arguments, **options)


@every_layout_by_representatives
def test_save_model_writes_what_the_stock_model_writes(name: str, size: str, saves: Saves, tmp_path: Path) -> None:
    hfshard.save_model(ZOO[name].build(), tmp_path, max_shard_size=size)

    theirs = saves.stock(name, size)
    assert differences({"file": raw_tensors(tmp_path)}, {"file": raw_tensors(theirs)}) == []
    assert small_files(tmp_path) == small_files(theirs)
    ours = saves.ours(name, size)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        path.name: path.read_bytes() for path in ours.iterdir()
    }


@every_model_by_representatives
def test_load_model_builds_an_stock_class_as_it_builds_itself(name: str, saves: Saves) -> None:
    directory = saves.ours(name, SHARDS)

    facts = facts_of_load(load(_Through(ZOO[name].stock_class), directory), directory)

    assert differences(facts, saves.stock_facts(name, SHARDS)) == []


AUTO: list[tuple[str, Any, dict[str, Any]]] = [
    ("gpt2", AutoModelForCausalLM, {}),
    ("llama_tied", AutoModelForCausalLM, {"dtype": torch.bfloat16}),
    ("llama_generation", AutoModelForCausalLM, {"device_map": "cpu"}),
    ("mixtral", AutoModelForCausalLM, {"attn_implementation": "eager"}),
    ("mamba", AutoModelForCausalLM, {}),
    ("bert", AutoModel, {"hidden_dropout_prob": 0.3}),
    ("bert", AutoModelForSequenceClassification, {"num_labels": 4}),
    ("bert_head", AutoModelForSequenceClassification, {}),
    ("bert_head", AutoModel, {}),
    ("bert_head", AutoModelForSequenceClassification, {"num_labels": 4, "ignore_mismatched_sizes": True}),
    ("t5", transformers.AutoModelForSeq2SeqLM, {}),
    ("whisper", transformers.AutoModelForSpeechSeq2Seq, {}),
    ("vit", AutoModel, {}),
    ("vit_head", transformers.AutoModelForImageClassification, {}),
    ("clip", AutoModel, {}),
    ("llava", transformers.AutoModelForImageTextToText, {}),
    ("llama4", AutoModelForCausalLM, {}),  # the text model out of a composite, by the text config
    ("llama4", AutoModelForCausalLM, {"dtype": torch.bfloat16, "attn_implementation": "eager"}),
]


@pytest.mark.parametrize(("name", "auto", "options"), AUTO, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize(
    "who", [pytest.param("ours", marks=pytest.mark.compat), pytest.param("stock", marks=pytest.mark.slow)]
)
def test_load_model_builds_through_an_auto_class_as_it_builds_itself(
    who: str, name: str, auto: Any, options: dict[str, Any], saves: Saves
) -> None:
    directory = getattr(saves, who)(name, SHARDS)
    theirs = load(auto, directory, **options)

    ours = load(_Through(auto), directory, **options)

    assert type(ours.model) is type(theirs.model)
    assert differences(facts_of_load(ours, directory), facts_of_load(theirs, directory)) == []


@pytest.mark.compat
@pytest.mark.parametrize(
    ("auto", "name"), [(transformers.AutoModelForSpeechSeq2Seq, "vit"), (transformers.AutoModelForSeq2SeqLM, "bert")]
)
def test_an_auto_class_that_has_no_such_model_refuses_as_transformers_does(auto: Any, name: str, saves: Saves) -> None:
    theirs = failure_of(lambda: auto.from_pretrained(saves.stock(name)))

    ours = failure_of(lambda: hfshard.load_model(auto, saves.stock(name)))

    assert isinstance(theirs, ValueError) and isinstance(ours, ValueError)


@pytest.mark.compat
@pytest.mark.parametrize("who", ["ours", "stock"])
@pytest.mark.parametrize("name", ["bert", "llama_tied", "resnet", "gpt2"])
def test_load_model_fills_a_model_that_is_there(name: str, who: str, saves: Saves) -> None:
    model = ZOO[name].build()
    expected = {key: bits(value) for key, value in model.state_dict().items()}
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    storage = {key: value.data_ptr() for key, value in model.state_dict().items()}

    returned = hfshard.load_model(model, getattr(saves, who)(name, SHARDS), strict=who == "ours")

    assert returned is model
    assert {key: bits(value) for key, value in model.state_dict().items()} == expected
    assert {key: value.data_ptr() for key, value in model.state_dict().items()} == storage


# torch.compile's own import, on its first use.
compiles = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


def compiled(model: nn.Module) -> nn.Module:
    """What `torch.compile` puts around a model; of backends, it imports the one that takes no seconds."""
    return cast(nn.Module, torch.compile(model, backend="eager"))


@pytest.mark.compat
@compiles
@pytest.mark.parametrize("name", ["bert", "llama_tied", "mixtral"])
@pytest.mark.parametrize(
    "wrap",
    [nn.DataParallel, compiled, lambda model: nn.DataParallel(compiled(model))],
    ids=["DataParallel", "compile", "both"],
)
def test_a_wrapped_model_is_saved_as_the_model_itself(name: str, wrap: Any, saves: Saves, tmp_path: Path) -> None:
    hfshard.save_model(wrap(ZOO[name].build()), tmp_path, max_shard_size=SHARDS)

    assert raw_tensors(tmp_path) == raw_tensors(saves.stock(name, SHARDS))
    assert small_files(tmp_path) == small_files(saves.stock(name, SHARDS))


@pytest.mark.compat
@compiles
def test_a_model_whose_layer_is_compiled_is_saved_under_its_own_names(saves: Saves, tmp_path: Path) -> None:
    model = ZOO["bert"].build()
    model.encoder.layer[0] = compiled(model.encoder.layer[0])

    hfshard.save_model(model, tmp_path)

    assert raw_tensors(tmp_path) == raw_tensors(saves.stock("bert"))


@pytest.mark.compat
@pytest.mark.parametrize("name", ["bert", "llama_tied", "resnet", "llama_mixed_dtypes"])
def test_load_state_dict_reads_what_stock_wrote(name: str, saves: Saves) -> None:
    tensors = hfshard.load_state_dict(saves.stock(name, SHARDS))

    assert {key: bits(value) for key, value in tensors.items()} == raw_tensors(saves.stock(name))


@pytest.mark.compat
def test_a_tied_name_is_the_same_tensor_again(saves: Saves) -> None:
    tensors = hfshard.load_state_dict(saves.ours("llama_tied", SHARDS))

    assert tensors["lm_head.weight"] is tensors["model.embed_tokens.weight"]


@pytest.mark.compat
def test_what_is_no_model_and_no_class_is_refused(saves: Saves) -> None:
    with pytest.raises(hfshard.HfshardError, match="neither"):
        hfshard.load_model("bert", saves.stock("bert"))
    with pytest.raises(TypeError, match=r"varient.*variant"):
        hfshard.load_model(ZOO["bert"].build(), saves.stock("bert"), varient="fp16")


@pytest.mark.compat
def test_load_model_builds_a_class_with_strict_only_when_all_fits(saves: Saves) -> None:
    assert isinstance(hfshard.load_model(BertModel, saves.stock("bert"), strict=True), BertModel)

    with pytest.raises(hfshard.HfshardError, match="classifier"):
        hfshard.load_model(transformers.BertForSequenceClassification, saves.stock("bert"), strict=True)
