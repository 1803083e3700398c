"""A checkpoint of one class loaded by another: a head over a base model, and a base model out of a head."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tests.models.conftest import SHARDS, Saves
from tests.zoo.compare import differences, facts_of_load, load
from tests.zoo.mixin_classes import with_mixin
from tests.zoo.models import ZOO

PAIRS = [
    ("bert", "BertForSequenceClassification"),
    ("bert", "BertForMaskedLM"),
    ("bert", "BertLMHeadModel"),
    ("bert_head", "BertModel"),
    ("bert_head", "BertForTokenClassification"),
    ("bert_pretraining", "BertModel"),
    ("bert_pretraining", "BertForMaskedLM"),
    ("gpt2", "GPT2Model"),
    ("gpt2", "GPT2ForSequenceClassification"),
    ("llama_untied", "LlamaModel"),
    ("llama_tied", "LlamaModel"),
    ("llama_untied", "LlamaForTokenClassification"),
    ("mixtral", "MixtralModel"),
    ("mixtral", "MixtralForSequenceClassification"),
    ("qwen3_moe", "Qwen3MoeModel"),
    ("t5", "T5EncoderModel"),
    ("t5", "T5Model"),
    ("bart", "BartModel"),
    ("bart", "BartForSequenceClassification"),
    ("vit", "ViTForImageClassification"),
    ("vit_head", "ViTModel"),
    ("clip", "CLIPTextModel"),
    ("clip", "CLIPVisionModel"),
    ("clip", "CLIPVisionModelWithProjection"),
    ("whisper", "WhisperModel"),
    ("whisper", "WhisperForAudioClassification"),
    ("wav2vec2", "Wav2Vec2ForCTC"),
    ("mamba", "MambaModel"),
    ("resnet", "ResNetModel"),
    ("llava", "LlavaModel"),
    ("qwen2_vl", "Qwen2VLModel"),
]
ON_OLDEST = {
    ("bert", "BertForSequenceClassification"),
    ("bert_pretraining", "BertForMaskedLM"),
    ("gpt2", "GPT2Model"),
    ("llama_tied", "LlamaModel"),
    ("mixtral", "MixtralModel"),
    ("mixtral", "MixtralForSequenceClassification"),
    ("t5", "T5EncoderModel"),
    ("bart", "BartForSequenceClassification"),
    ("clip", "CLIPVisionModelWithProjection"),
    ("wav2vec2", "Wav2Vec2ForCTC"),
    ("llava", "LlavaModel"),
    ("qwen2_vl", "Qwen2VLModel"),
}
"""Heads that are missing, not expected and tied, parts of models, and what is converted."""
every_pair = pytest.mark.parametrize(
    ("name", "target"),
    [pytest.param(*pair, marks=[pytest.mark.compat] if pair in ON_OLDEST else []) for pair in PAIRS],
)
by_those_on_oldest = pytest.mark.parametrize(
    ("name", "target"),
    [pytest.param(*pair, marks=pytest.mark.compat if pair in ON_OLDEST else pytest.mark.slow) for pair in PAIRS],
)
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
def test_a_stock_checkpoint_of_another_class_loads_and_reports_as_transformers(
    name: str, target: str, saves: Saves
) -> None:
    directory, stock_class = saves.stock(name, SHARDS), getattr(transformers, target)

    ours = facts_of_load(load(with_mixin(stock_class), directory), directory)

    assert differences(ours, saves.stock_facts(name, SHARDS, target)) == []


@by_those_on_oldest
def test_stock_reads_our_checkpoint_of_another_class_as_its_own(name: str, target: str, saves: Saves) -> None:
    directory, stock_class = saves.ours(name, SHARDS), getattr(transformers, target)

    ours = facts_of_load(load(stock_class, directory), directory)

    assert differences(ours, saves.stock_facts(name, SHARDS, target)) == []


@pytest.mark.compat
@pytest.mark.parametrize(("base", "name", "target"), BASES)
def test_a_head_over_a_base_model_that_hfshard_saved_loads_and_reports_as_transformers(
    base: str, name: str, target: str, saves: Saves, tmp_path: Path
) -> None:
    stock_base, stock_class = getattr(transformers, base), getattr(transformers, target)
    theirs_at, ours_at = tmp_path / "theirs", tmp_path / "ours"
    stock_base.from_pretrained(saves.stock(name)).save_pretrained(theirs_at, max_shard_size=SHARDS)
    with_mixin(stock_base).from_pretrained(saves.stock(name)).save_pretrained(ours_at, max_shard_size=SHARDS)
    theirs = facts_of_load(load(stock_class, theirs_at), theirs_at)

    stock_from_ours = facts_of_load(load(stock_class, ours_at), ours_at)
    ours_from_stock = facts_of_load(load(with_mixin(stock_class), theirs_at), theirs_at)
    ours_from_ours = facts_of_load(load(with_mixin(stock_class), ours_at), ours_at)

    for facts in (stock_from_ours, ours_from_stock, ours_from_ours):
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
    theirs = stock_class.from_pretrained(saves.stock(name))

    ours = with_mixin(stock_class).from_pretrained(saves.stock(name))

    assert ours.loss_function is theirs.loss_function
