"""`save_model` and `load_model` without the mixin, and checkpoints of one class that another loads: heads and bases."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, BertModel

import hfshard
from tests.models.conftest import SHARDS, Saves
from tests.zoo.compare import (
    Through,
    bits_of,
    contents,
    differences,
    facts_of_load,
    file_differences,
    load,
    raw_tensors,
)
from tests.zoo.mixin_classes import with_mixin
from tests.zoo.models import ZOO
from tests.zoo.parameters import every_layout_by_representatives, every_model_by_representatives, parameters


@every_layout_by_representatives
def test_save_model_writes_what_the_stock_model_writes(name: str, size: str, saves: Saves, tmp_path: Path) -> None:
    hfshard.save_model(ZOO[name].build(), tmp_path, max_shard_size=size)

    assert file_differences(tmp_path, saves.stock(name, size)) == []
    assert contents(tmp_path) == contents(saves.ours(name, size))


@every_model_by_representatives
def test_load_model_builds_an_stock_class_as_it_builds_itself(name: str, saves: Saves) -> None:
    assert saves.differences(Through(ZOO[name].stock_class), saves.ours(name, SHARDS), name, SHARDS) == []


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
    theirs, ours = (load(target, directory, **options) for target in (auto, Through(auto)))

    assert type(ours.model) is type(theirs.model)
    assert differences(facts_of_load(ours, directory), facts_of_load(theirs, directory)) == []


@pytest.mark.compat
@pytest.mark.parametrize(
    ("auto", "name"), [(transformers.AutoModelForSpeechSeq2Seq, "vit"), (transformers.AutoModelForSeq2SeqLM, "bert")]
)
def test_an_auto_class_that_has_no_such_model_refuses_as_transformers_does(auto: Any, name: str, saves: Saves) -> None:
    for load_it in (auto.from_pretrained, partial(hfshard.load_model, auto)):
        with pytest.raises(ValueError):
            load_it(saves.stock(name))


@pytest.mark.compat
@pytest.mark.parametrize("who", ["ours", "stock"])
@pytest.mark.parametrize("name", ["bert", "llama_tied", "resnet", "gpt2"])
def test_load_model_fills_a_model_that_is_there(name: str, who: str, saves: Saves) -> None:
    model = ZOO[name].build()
    expected = bits_of(model.state_dict())
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    storage = {key: value.data_ptr() for key, value in model.state_dict().items()}

    returned = hfshard.load_model(model, getattr(saves, who)(name, SHARDS), strict=who == "ours")

    assert returned is model
    assert bits_of(model.state_dict()) == expected
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

    assert file_differences(tmp_path, saves.stock(name, SHARDS)) == []


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
    assert bits_of(hfshard.load_state_dict(saves.stock(name, SHARDS))) == raw_tensors(saves.stock(name))


@pytest.mark.compat
def test_a_tied_name_is_the_same_tensor_again(saves: Saves) -> None:
    tensors = hfshard.load_state_dict(saves.ours("llama_tied", SHARDS))

    assert tensors["lm_head.weight"] is tensors["model.embed_tokens.weight"]


@pytest.mark.compat
def test_what_is_no_model_and_no_class_is_refused(saves: Saves) -> None:
    with pytest.raises(hfshard.HfshardError, match="takes a module or a transformers class, got"):
        hfshard.load_model("bert", saves.stock("bert"))
    with pytest.raises(TypeError, match=r"varient.*variant"):
        hfshard.load_model(ZOO["bert"].build(), saves.stock("bert"), varient="fp16")


@pytest.mark.compat
def test_load_model_builds_a_class_with_strict_only_when_all_fits(saves: Saves) -> None:
    assert isinstance(hfshard.load_model(BertModel, saves.stock("bert"), strict=True), BertModel)

    with pytest.raises(hfshard.HfshardError, match="classifier"):
        hfshard.load_model(transformers.BertForSequenceClassification, saves.stock("bert"), strict=True)


TARGETS = {
    "bert": ("BertForSequenceClassification", "BertForMaskedLM", "BertLMHeadModel"),
    "bert_head": ("BertModel", "BertForTokenClassification"),
    "bert_pretraining": ("BertModel", "BertForMaskedLM"),
    "gpt2": ("GPT2Model", "GPT2ForSequenceClassification"),
    "llama_untied": ("LlamaModel", "LlamaForTokenClassification"),
    "llama_tied": ("LlamaModel",),
    "mixtral": ("MixtralModel", "MixtralForSequenceClassification"),
    "qwen3_moe": ("Qwen3MoeModel",),
    "t5": ("T5EncoderModel", "T5Model"),
    "bart": ("BartModel", "BartForSequenceClassification"),
    "vit": ("ViTForImageClassification",),
    "vit_head": ("ViTModel",),
    "clip": ("CLIPTextModel", "CLIPVisionModel", "CLIPVisionModelWithProjection"),
    "whisper": ("WhisperModel", "WhisperForAudioClassification"),
    "wav2vec2": ("Wav2Vec2ForCTC",),
    "mamba": ("MambaModel",),
    "resnet": ("ResNetModel",),
    "llava": ("LlavaModel",),
    "qwen2_vl": ("Qwen2VLModel",),
}
PAIRS = [(name, target) for name, targets in TARGETS.items() for target in targets]
ON_OLDEST = {
    *(("bert", "BertForSequenceClassification"), ("bert_pretraining", "BertForMaskedLM"), ("gpt2", "GPT2Model")),
    *(("llama_tied", "LlamaModel"), ("mixtral", "MixtralModel"), ("mixtral", "MixtralForSequenceClassification")),
    *(("t5", "T5EncoderModel"), ("bart", "BartForSequenceClassification"), ("wav2vec2", "Wav2Vec2ForCTC")),
    *(("clip", "CLIPVisionModelWithProjection"), ("llava", "LlavaModel"), ("qwen2_vl", "Qwen2VLModel")),
}
"""Heads that are missing, not expected and tied, parts of models, and what is converted."""
every_pair = pytest.mark.parametrize(("name", "target"), parameters(PAIRS, ON_OLDEST))
_OTHERS = [pair for pair in PAIRS if pair not in ON_OLDEST]
by_those_on_oldest = pytest.mark.parametrize(("name", "target"), parameters(PAIRS, ON_OLDEST, _OTHERS))
"""For files whose tensors are those of stock files, as test_collect_zoo.py shows: others run with --slow."""

BASES = [
    ("LlamaModel", "llama_untied", "LlamaForCausalLM"),
    ("LlamaModel", "llama_tied", "LlamaForCausalLM"),
    ("GPT2Model", "gpt2", "GPT2LMHeadModel"),
    ("MixtralModel", "mixtral", "MixtralForCausalLM"),
    ("T5Model", "t5", "T5ForConditionalGeneration"),
    ("LlavaModel", "llava", "LlavaForConditionalGeneration"),
]


@every_pair
def test_a_stock_checkpoint_of_another_class_loads_as_in_transformers(name: str, target: str, saves: Saves) -> None:
    mine = with_mixin(getattr(transformers, target))

    assert saves.differences(mine, saves.stock(name, SHARDS), name, SHARDS, target) == []


@by_those_on_oldest
def test_stock_reads_our_checkpoint_of_another_class_as_its_own(name: str, target: str, saves: Saves) -> None:
    stock_class = getattr(transformers, target)

    assert saves.differences(stock_class, saves.ours(name, SHARDS), name, SHARDS, target) == []


@pytest.mark.compat
@pytest.mark.parametrize(("base", "name", "target"), BASES)
def test_a_head_over_a_base_model_that_hfshard_saved_loads_and_reports_as_transformers(
    base: str, name: str, target: str, saves: Saves, tmp_path: Path
) -> None:
    stock_base, stock_class = getattr(transformers, base), getattr(transformers, target)
    seen = []
    for number, base_class in enumerate((stock_base, with_mixin(stock_base))):
        at = tmp_path / str(number)
        base_class.from_pretrained(saves.stock(name)).save_pretrained(at, max_shard_size=SHARDS)
        seen += [facts_of_load(load(model_class, at), at) for model_class in (stock_class, with_mixin(stock_class))]

    theirs, *ours = seen
    for facts in ours:
        assert differences(facts, theirs) == []


@pytest.mark.compat
def test_the_pairs_do_differ_in_their_keys(saves: Saves) -> None:
    head = load(transformers.BertForSequenceClassification, saves.stock("bert"))
    base = load(transformers.BertModel, saves.stock("bert_head"))

    assert head.info["missing_keys"] == {"classifier.weight", "classifier.bias"}
    assert base.info["unexpected_keys"] == {"classifier.weight", "classifier.bias"}
    assert "LOAD REPORT" in head.log[0]


@pytest.mark.compat
@pytest.mark.parametrize("name", ["bert_head", "llama_tied", "mixtral"])
def test_every_model_of_the_zoo_has_a_loss_of_its_own_class(name: str, saves: Saves) -> None:
    stock_class = ZOO[name].stock_class
    theirs, ours = (each.from_pretrained(saves.stock(name)) for each in (stock_class, with_mixin(stock_class)))

    assert ours.loss_function is theirs.loss_function
