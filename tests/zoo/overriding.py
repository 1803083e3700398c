"""Tiny models of the transformers classes that have a from_pretrained or a save_pretrained of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
TEXT: dict[str, Any] = {**HEADS, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "vocab_size": 32}
CODEC: dict[str, Any] = {
    **{"model_type": "mimi", "num_filters": 2, "num_quantizers": 2, "upsample_groups": 2, "upsampling_ratios": [2, 2]},
    **{"codebook_size": 8, "codebook_dim": 4, "vector_quantization_hidden_dimension": 4},
    **{**HEADS, "head_dim": 4, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1},
}
AUDIO = {
    **{"num_mel_bins": 4, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 8, "d_model": 8},
    **{"max_source_positions": 20, "n_window": 4, "output_dim": 16},
}
VISION = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16},
    "fullatt_block_indexes": [0],
}
THINKER: dict[str, Any] = {
    **{"audio_config": AUDIO, "vision_config": VISION},
    **{"audio_token_index": 5, "image_token_index": 6, "video_token_index": 7},
}
TALKER_TOKENS = [
    *(f"tts_{what}_token_id" for what in ("text_start", "text_end", "text_pad")),
    *(f"tts_codec_{what}_token_id" for what in ("start", "end", "pad", "mask")),
    *(f"{what}_{end}_token_id" for what in ("vision", "audio") for end in ("start", "end")),
]
WAVE: dict[str, Any] = {
    "dit_config": {
        **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "emb_dim": 8, "head_dim": 8},
        **{"num_embeds": 9, "mel_dim": 4, "look_ahead_layers": [0], "look_backward_layers": [0]},
        **{"enc_emb_dim": 8, "enc_dim": 8, "enc_channels": [8, 8, 8, 8, 24]},
        **{"enc_attention_channels": 4, "enc_se_channels": 4},
    },
    "bigvgan_config": {
        **{"mel_dim": 4, "upsample_initial_channel": 8, "upsample_rates": [2], "upsample_kernel_sizes": [4]},
        **{"resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3, 5]]},
    },
}


def _csm() -> Any:
    tokens: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "audio_token_id": 3}
    tokens |= {"audio_eos_token_id": 4, "codebook_pad_token_id": 1}
    sizes = {**TEXT, "vocab_size": 8, "num_codebooks": 2}
    parts: dict[str, Any] = {"codec_config": CODEC, "depth_decoder_config": {**sizes, "backbone_hidden_size": 16}}
    config = transformers.CsmConfig(**sizes, **tokens, **parts, text_vocab_size=32)
    model = transformers.CsmForConditionalGeneration(config)
    model.generation_config._from_model_config = False  # else transformers drops what it does not know on load
    model.depth_decoder.generation_config.temperature = 0.625
    model.depth_decoder.generation_config.do_sample = True
    return model


def _kyutai() -> Any:
    tokens: dict[str, Any] = {"audio_bos_token_id": 8, "audio_pad_token_id": 7, "pad_token_id": 3, "bos_token_id": 4}
    sizes: dict[str, Any] = {key: value for key, value in TEXT.items() if key != "intermediate_size"}
    sizes |= {"codebook_vocab_size": 9, "num_codebooks": 2, "ffn_dim": 16, "max_position_embeddings": 16}
    config = transformers.KyutaiSpeechToTextConfig(**sizes, **tokens, sliding_window=8, codec_config=CODEC)
    model = transformers.KyutaiSpeechToTextForConditionalGeneration(config)
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
    encoder = {
        **{"model_type": f"{config_class.model_type}_encoder", "num_layers": 1, "num_heads": 2, "dim_head": 4},
        **{"input_dim": 4, "hidden_dim": 8, "output_dim": 4, "context_size": 4, "max_pos_emb": 8},
    }
    projector = {
        **{"model_type": "blip_2_qformer", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"intermediate_size": 16, "encoder_hidden_size": 8, "vocab_size": 8, "max_position_embeddings": 16},
    }
    text = {"model_type": "granite", **TEXT}
    config = config_class(text_config=text, encoder_config=encoder, projector_config=projector, audio_token_index=5)
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
