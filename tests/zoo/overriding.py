"""Tiny models of the transformers classes that have a from_pretrained or a save_pretrained of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
}
CODEC: dict[str, Any] = {
    "model_type": "mimi",
    "num_filters": 2,
    "hidden_size": 8,
    "codebook_size": 8,
    "codebook_dim": 4,
    "num_quantizers": 2,
    "vector_quantization_hidden_dimension": 4,
    "upsample_groups": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "upsampling_ratios": [2, 2],
    "head_dim": 4,
}
THINKER: dict[str, Any] = {
    "audio_config": {
        "num_mel_bins": 4,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 8,
        "d_model": 8,
        "max_source_positions": 20,
        "n_window": 4,
        "output_dim": 16,
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
        "fullatt_block_indexes": [0],
    },
    "audio_token_index": 5,
    "image_token_index": 6,
    "video_token_index": 7,
}
TALKER_TOKENS = (
    "tts_text_start_token_id", "tts_text_end_token_id", "tts_text_pad_token_id", "tts_codec_start_token_id",
    "tts_codec_end_token_id", "tts_codec_pad_token_id", "tts_codec_mask_token_id", "vision_start_token_id",
    "vision_end_token_id", "audio_start_token_id", "audio_end_token_id",
)  # fmt: skip
WAVE: dict[str, Any] = {
    "dit_config": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "emb_dim": 8,
        "head_dim": 8,
        "num_embeds": 9,
        "mel_dim": 4,
        "enc_emb_dim": 8,
        "enc_dim": 8,
        "enc_channels": [8, 8, 8, 8, 24],
        "enc_attention_channels": 4,
        "enc_se_channels": 4,
        "look_ahead_layers": [0],
        "look_backward_layers": [0],
    },
    "bigvgan_config": {
        "mel_dim": 4,
        "upsample_initial_channel": 8,
        "upsample_rates": [2],
        "upsample_kernel_sizes": [4],
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3, 5]],
    },
}


def _csm() -> Any:
    model = transformers.CsmForConditionalGeneration(
        transformers.CsmConfig(
            **{**TEXT, "vocab_size": 8},
            text_vocab_size=32,
            num_codebooks=2,
            pad_token_id=0,
            codebook_pad_token_id=1,
            bos_token_id=1,
            eos_token_id=2,
            audio_token_id=3,
            audio_eos_token_id=4,
            depth_decoder_config={**TEXT, "vocab_size": 8, "num_codebooks": 2, "backbone_hidden_size": 16},
            codec_config=CODEC,
        )
    )
    model.generation_config._from_model_config = False  # else transformers drops what it does not know on load
    model.depth_decoder.generation_config.temperature = 0.625
    model.depth_decoder.generation_config.do_sample = True
    return model


def _kyutai() -> Any:
    model = transformers.KyutaiSpeechToTextForConditionalGeneration(
        transformers.KyutaiSpeechToTextConfig(
            **{key: value for key, value in TEXT.items() if key != "intermediate_size"},
            codebook_vocab_size=9,
            num_codebooks=2,
            ffn_dim=16,
            audio_bos_token_id=8,
            audio_pad_token_id=7,
            pad_token_id=3,
            bos_token_id=4,
            sliding_window=8,
            max_position_embeddings=16,
            codec_config=CODEC,
        )
    )
    model.generation_config._from_model_config = False
    model.codec_model.generation_config.max_length = 77
    return model


def _omni() -> Any:
    rope = {"rope_type": "default", "type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    text = {**TEXT, "rope_parameters": rope, "max_position_embeddings": 64}
    return transformers.Qwen2_5OmniForConditionalGeneration(
        transformers.Qwen2_5OmniConfig(
            thinker_config={**THINKER, "text_config": text},
            talker_config={**text, "embedding_size": 16, "head_dim": 8, **dict.fromkeys(TALKER_TOKENS, 1)},
            token2wav_config=WAVE,
        )
    )


def _granite(name: str) -> Any:
    config_class = getattr(transformers, f"{name}Config")
    config = config_class(
        text_config={"model_type": "granite", **TEXT},
        encoder_config={
            "model_type": f"{config_class.model_type}_encoder",
            "input_dim": 4,
            "num_layers": 1,
            "hidden_dim": 8,
            "num_heads": 2,
            "dim_head": 4,
            "output_dim": 4,
            "context_size": 4,
            "max_pos_emb": 8,
        },
        projector_config={
            "model_type": "blip_2_qformer",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "encoder_hidden_size": 8,
            "vocab_size": 8,
            "max_position_embeddings": 16,
        },
        audio_token_index=5,
    )
    model_class: Any = getattr(transformers, f"{name}ForConditionalGeneration")
    return model_class(config)


BUILDERS: dict[str, Callable[[], Any]] = {
    "CsmForConditionalGeneration": _csm,
    "GraniteSpeechForConditionalGeneration": lambda: _granite("GraniteSpeech"),
    "GraniteSpeechPlusForConditionalGeneration": lambda: _granite("GraniteSpeechPlus"),
    "KyutaiSpeechToTextForConditionalGeneration": _kyutai,
    "Qwen2_5OmniForConditionalGeneration": _omni,
}
"""The name of the class -> a tiny model of it."""

NOT_BUILT = {
    "MtpModel": "is a part of another model: its from_pretrained takes that model, no directory",
    "TimmBackbone": "needs the package timm; its from_pretrained takes the name of one of timm's models, no directory",
}
"""The name of the class -> why there is no tiny model of it."""


def build(name: str, model_class: type[PreTrainedModel] | None = None) -> Any:
    """Make the model, always with the same weights, as the stock class or a subclass of it."""
    torch.manual_seed(1)
    model = BUILDERS[name]()
    if model_class is not None:
        model.__class__ = model_class
    return model.eval()
