"""transformers' common tests of models, for tiny models of many architectures.

The source archive has the tests, `ModelTesterMixin`, and not the testers of each architecture. These are ours.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers_tests import test_modeling_common as common  # type: ignore[import-not-found]

from tests.zoo.models import DECODER, TEXT, VOCABULARY, ZOO

BATCH = 2
LENGTH = 7
IMAGE = 16  # pixels, as in the zoo's vision models

Inputs = Callable[[Any], dict[str, torch.Tensor]]


def _ids(vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(6, vocabulary, (BATCH, LENGTH))  # above the special tokens


def _text(config: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long)}


def _tokens(config: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": _ids()}


def _text_to_text(config: Any) -> dict[str, torch.Tensor]:
    return {**_text(config), "decoder_input_ids": _ids()}


def _pixels(config: Any) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.rand(BATCH, 3, IMAGE, IMAGE)}


def _pixels_and_text(config: Any) -> dict[str, torch.Tensor]:
    return {**_text(config), **_pixels(config)}


def _pixels_to_text(config: Any) -> dict[str, torch.Tensor]:
    return {**_pixels(config), "decoder_input_ids": _ids()}


def _image_tokens(config: Any) -> dict[str, torch.Tensor]:
    """As many image tokens as the vision tower has patches."""
    inputs = _pixels_and_text(config)
    inputs["input_ids"][:, :4] = config.image_token_index
    return inputs


def _waves(config: Any) -> dict[str, torch.Tensor]:
    return {"input_values": torch.rand(BATCH, 400)}


def _spectrogram(config: Any) -> dict[str, torch.Tensor]:
    frames = 2 * config.max_source_positions
    return {"input_features": torch.rand(BATCH, config.num_mel_bins, frames), "decoder_input_ids": _ids()}


@dataclass(frozen=True, slots=True)
class Architecture:
    """Which classes of one architecture are tested, made from which config, with which inputs."""

    make_config: Callable[[], Any]
    class_names: tuple[str, ...]
    make_inputs: Inputs
    is_encoder_decoder: bool = False
    is_composite: bool = False


class Tester:
    """What the common tests ask for a config and inputs."""

    batch_size = BATCH
    seq_length = LENGTH
    image_size = IMAGE
    is_training = True

    def __init__(self, architecture: Architecture) -> None:
        self._architecture = architecture

    def get_config(self) -> Any:
        """A new config."""
        return self._architecture.make_config()

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """A new config, and inputs for its models."""
        config = self.get_config()
        return config, self._architecture.make_inputs(config)


def _config(name: str, **values: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**values)


def _zoo(name: str) -> Callable[[], Any]:
    return ZOO[name].make_config


def _text_classes(stem: str, *heads: str) -> tuple[str, ...]:
    return (f"{stem}Model", *(f"{stem}For{head}" for head in heads))


_DEBERTA = {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
_GEMMA = {**DECODER, "head_dim": 16, "sliding_window": 4, "num_key_value_heads": 2}
_HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering")

ARCHITECTURES = {
    "Bert": Architecture(_zoo("bert"), _text_classes("Bert", "PreTraining", "MaskedLM", *_HEADS), _text),
    "Roberta": Architecture(
        _config("RobertaConfig", **TEXT), _text_classes("Roberta", "MaskedLM", "SequenceClassification"), _text
    ),
    "DebertaV2": Architecture(
        _config("DebertaV2Config", **_DEBERTA), _text_classes("DebertaV2", "MaskedLM", *_HEADS), _text
    ),
    "GPT2": Architecture(
        _zoo("gpt2"), ("GPT2Model", "GPT2LMHeadModel", "GPT2DoubleHeadsModel", "GPT2ForTokenClassification"), _text
    ),
    "GPTNeoX": Architecture(_zoo("gpt_neox"), _text_classes("GPTNeoX", "CausalLM", "TokenClassification"), _text),
    "Llama": Architecture(_zoo("llama_untied"), _text_classes("Llama", "CausalLM", *_HEADS), _text),
    "LlamaTied": Architecture(_zoo("llama_tied"), _text_classes("Llama", "CausalLM"), _text),
    "Gemma2": Architecture(
        _config("Gemma2Config", **_GEMMA), _text_classes("Gemma2", "CausalLM", "SequenceClassification"), _text
    ),
    "Gemma3Text": Architecture(_config("Gemma3TextConfig", **_GEMMA), ("Gemma3TextModel", "Gemma3ForCausalLM"), _text),
    "Mamba": Architecture(_zoo("mamba"), ("MambaModel", "MambaForCausalLM"), _tokens),
    "Mixtral": Architecture(_zoo("mixtral"), _text_classes("Mixtral", "CausalLM", "SequenceClassification"), _text),
    "Qwen2Moe": Architecture(_zoo("qwen2_moe"), _text_classes("Qwen2Moe", "CausalLM"), _text),
    "Qwen3Moe": Architecture(_zoo("qwen3_moe"), _text_classes("Qwen3Moe", "CausalLM"), _text),
    "DeepseekV3": Architecture(_zoo("deepseek_v3"), _text_classes("DeepseekV3", "CausalLM"), _text),
    "T5": Architecture(
        _zoo("t5"), _text_classes("T5", "ConditionalGeneration"), _text_to_text, is_encoder_decoder=True
    ),
    "T5Encoder": Architecture(_zoo("t5"), ("T5EncoderModel", "T5ForTokenClassification"), _text),
    "Bart": Architecture(
        _zoo("bart"), _text_classes("Bart", "ConditionalGeneration"), _text_to_text, is_encoder_decoder=True
    ),
    "Marian": Architecture(_zoo("marian"), ("MarianModel", "MarianMTModel"), _text_to_text, is_encoder_decoder=True),
    "Whisper": Architecture(
        _zoo("whisper"), _text_classes("Whisper", "ConditionalGeneration"), _spectrogram, is_encoder_decoder=True
    ),
    "Wav2Vec2": Architecture(_zoo("wav2vec2"), _text_classes("Wav2Vec2", "CTC", "SequenceClassification"), _waves),
    "ViT": Architecture(_zoo("vit"), _text_classes("ViT", "ImageClassification"), _pixels),
    "Swin": Architecture(_zoo("swin"), _text_classes("Swin", "ImageClassification"), _pixels),
    "ResNet": Architecture(_zoo("resnet"), _text_classes("ResNet", "ImageClassification"), _pixels),
    "CLIP": Architecture(_zoo("clip"), ("CLIPModel",), _pixels_and_text, is_composite=True),
    "CLIPVision": Architecture(_zoo("clip_vision"), ("CLIPVisionModel", "CLIPVisionModelWithProjection"), _pixels),
    "VisionEncoderDecoder": Architecture(
        _zoo("vision_encoder_decoder"), ("VisionEncoderDecoderModel",), _pixels_to_text, is_composite=True
    ),
    "Llava": Architecture(
        _zoo("llava"), ("LlavaModel", "LlavaForConditionalGeneration"), _image_tokens, is_composite=True
    ),
}


def _test_class(name: str, architecture: Architecture) -> type[unittest.TestCase]:
    classes = tuple(getattr(transformers, class_name) for class_name in architecture.class_names)
    is_generative = any(model_class.can_generate() for model_class in classes)
    bases = (common.ModelTesterMixin, *([common.GenerationTesterMixin] if is_generative else []), unittest.TestCase)

    def set_up(self: Any) -> None:
        torch.manual_seed(0)
        self.model_tester = Tester(architecture)

    members = {
        "__module__": __name__,
        "all_model_classes": classes,
        "is_encoder_decoder": architecture.is_encoder_decoder,
        "_is_composite": architecture.is_composite,
        "setUp": set_up,
    }
    return type(f"{name}ModelTest", bases, members)


globals().update({f"{name}ModelTest": _test_class(name, architecture) for name, architecture in ARCHITECTURES.items()})
