"""Tiny models made from real transformers configs: each by name, of the class that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

SEED = 1
VOCABULARY = 67  # odd, so that a transposed or padded embedding is noticed

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
TEXT = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 40}
DECODER = {**TEXT, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
VISION = {**SIZES, "image_size": 16, "patch_size": 8}

Finish = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Specimen:
    """One model of the zoo."""

    name: str
    class_name: str
    """Of the stock class, in transformers."""
    make_config: Callable[[], Any]
    finish: Finish | None = None
    """What is done to the model after its weights are drawn."""

    @property
    def stock_class(self) -> type[PreTrainedModel]:
        """The class itself; transformers imports it now."""
        found: type[PreTrainedModel] = getattr(transformers, self.class_name)
        return found

    def build(self, model_class: type[PreTrainedModel] | None = None) -> Any:
        """Make the model, always with the same weights, as the stock class or a subclass of it.

        Its type is left open: transformers declares neither a model's layers nor what `model.to` takes.
        """
        torch.manual_seed(SEED)
        model: Any = (model_class or self.stock_class)(self.make_config())
        scramble(model)
        if self.finish is not None:
            self.finish(model)
        return model.eval()


def scramble(model: nn.Module, seed: int = SEED) -> None:
    """Give every parameter and stored buffer its own values, so that no two zeros or ones can be exchanged unseen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in {id(value): value for value in model.state_dict(keep_vars=True).values()}.values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * 0.1 + 0.01)
            else:
                tensor.copy_(torch.randint(1, 9, tensor.shape, generator=generator))


def _config(class_name: str, **values: Any) -> Any:
    return getattr(transformers, class_name)(**values)


def _llava() -> Any:
    vision = _config("CLIPVisionConfig", **VISION, projection_dim=32)
    text = _config("LlamaConfig", **DECODER)
    return _config("LlavaConfig", vision_config=vision, text_config=text, image_token_index=5)


def _llama4() -> Any:
    layers = {"layer_types": ["chunked_attention", "full_attention"], "interleave_moe_layer_step": 1}
    sizes = {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 48}
    outputs = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    return _config("Llama4Config", text_config={**DECODER, **layers, **sizes}, vision_config={**VISION, **outputs})


def _clip() -> Any:
    text = {**TEXT, "projection_dim": 32, "bos_token_id": 1, "eos_token_id": 2}
    return _config("CLIPConfig", text_config=text, vision_config={**VISION, "projection_dim": 32}, projection_dim=32)


def _vision_encoder_decoder() -> Any:
    decoder = _config("BertConfig", **TEXT, is_decoder=True, add_cross_attention=True)
    encoder = _config("ViTConfig", **VISION)
    return transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)


def _whisper() -> Any:
    sizes = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 32))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8, "max_source_positions": 12}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    lengths = {"d_model": 32, "max_target_positions": 20, "vocab_size": VOCABULARY}
    return _config("WhisperConfig", **sizes, **heads, **tokens, **lengths, suppress_tokens=None)


def _wav2vec2() -> Any:
    layers = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    sizes = {**SIZES, "num_hidden_layers": 1}
    return _config("Wav2Vec2Config", **sizes, **layers, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)


def _t5(**values: Any) -> Any:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2, "vocab_size": VOCABULARY}
    return _config("T5Config", **sizes, decoder_start_token_id=0, **values)


def _bart(class_name: str) -> Any:
    layers = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 32))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 32, "max_position_embeddings": 20}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    return _config(class_name, vocab_size=VOCABULARY, **layers, **heads, **tokens, forced_eos_token_id=2)


def _deepseek() -> Any:
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    return _moe("DeepseekV3Config", num_key_value_heads=2, moe_intermediate_size=16, **ranks, **experts)


def _ernie() -> Any:
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1}
    return _config("Ernie4_5_MoeConfig", **DECODER, **experts, moe_layer_start_index=0, head_dim=16)


def _qwen2_vl() -> Any:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 1}
    return _config("Qwen2VLConfig", text_config={**DECODER, "rope_parameters": rope}, vision_config=vision)


def _segformer() -> Any:
    stages = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_encoder_blocks": 2, "num_attention_heads": [1, 2]}
    patches = {"sr_ratios": [2, 1], "patch_sizes": [3, 3], "strides": [2, 2], "mlp_ratios": [2, 2]}
    return _config("SegformerConfig", **stages, **patches, decoder_hidden_size=16, num_labels=3)


def _levit() -> Any:
    sizes = {"hidden_sizes": [16, 24, 32], "num_attention_heads": [1, 1, 1], "depths": [1, 1, 1], "key_dim": [8, 8, 8]}
    return _config("LevitConfig", **sizes, image_size=64)


def _swin() -> Any:
    sizes = {"image_size": 16, "patch_size": 4, "embed_dim": 16, "window_size": 2}
    return _config("SwinConfig", **sizes, depths=[1, 1], num_heads=[2, 2])


def _moe(class_name: str, **values: Any) -> Any:
    return _config(class_name, **{**DECODER, "num_experts_per_tok": 2, **values})


def _cast(model: Any, dtype: torch.dtype, kept: str = " ") -> None:
    """Cast a model but for the modules whose names end so, which stay in float32."""
    model.to(dtype)
    for name, module in model.named_modules():
        if name.endswith(kept):
            module.to(torch.float32)


_to_bf16 = partial(_cast, dtype=torch.bfloat16)


def _resize(model: Any) -> None:
    model.resize_token_embeddings(VOCABULARY + 8, mean_resizing=False)
    scramble(model)


def _generation(model: Any) -> None:
    values = {"do_sample": True, "temperature": 0.7, "top_k": 7, "max_new_tokens": 9, "repetition_penalty": 1.3}
    model.generation_config.update(**values, forced_eos_token_id=2)


def _encoders() -> list[Specimen]:
    bert = partial(_config, "BertConfig", **TEXT)
    resnet = partial(_config, "ResNetConfig", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], num_labels=3)
    return [
        Specimen("bert", "BertModel", bert),
        Specimen("bert_head", "BertForSequenceClassification", partial(bert, num_labels=3)),
        Specimen("bert_pretraining", "BertForPreTraining", bert),
        Specimen("vit", "ViTModel", partial(_config, "ViTConfig", **VISION)),
        Specimen("vit_head", "ViTForImageClassification", partial(_config, "ViTConfig", **VISION, num_labels=3)),
        Specimen("swin", "SwinModel", _swin),
        Specimen("levit", "LevitModel", _levit),  # children honestly called `module`
        Specimen("segformer", "SegformerForSemanticSegmentation", _segformer),
        Specimen("resnet", "ResNetForImageClassification", partial(resnet, layer_type="basic")),
        Specimen("clip", "CLIPModel", _clip),
        Specimen("clip_vision", "CLIPVisionModel", partial(_config, "CLIPVisionConfig", **VISION)),
        Specimen("wav2vec2", "Wav2Vec2Model", _wav2vec2),
    ]


def _decoders() -> list[Specimen]:
    gpt2 = partial(_config, "GPT2Config", vocab_size=VOCABULARY, n_positions=40, n_embd=32, n_layer=2, n_head=2)
    gpt2 = partial(gpt2, bos_token_id=1, eos_token_id=2)
    llama = partial(_config, "LlamaConfig", **DECODER)
    mamba = partial(_config, "MambaConfig", vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=2)
    return [
        Specimen("gpt2", "GPT2LMHeadModel", gpt2),
        Specimen("gpt2_resized", "GPT2LMHeadModel", gpt2, _resize),
        Specimen("gpt_neox", "GPTNeoXForCausalLM", partial(_config, "GPTNeoXConfig", **TEXT)),
        Specimen("llama_untied", "LlamaForCausalLM", llama),
        Specimen("llama_tied", "LlamaForCausalLM", partial(llama, tie_word_embeddings=True)),
        Specimen("llama_bf16", "LlamaForCausalLM", llama, _to_bf16),
        Specimen("llama_mixed_dtypes", "LlamaForCausalLM", llama, partial(_to_bf16, kept="norm")),
        Specimen("llama_generation", "LlamaForCausalLM", llama, _generation),
        Specimen("mamba", "MambaForCausalLM", mamba),
    ]


def _mixtures_of_experts() -> list[Specimen]:
    qwen = {"num_experts": 4, "moe_intermediate_size": 16}
    qwen2 = partial(_moe, "Qwen2MoeConfig", **qwen)
    return [
        Specimen("mixtral", "MixtralForCausalLM", partial(_moe, "MixtralConfig", num_local_experts=4)),
        Specimen("qwen2_moe", "Qwen2MoeForCausalLM", partial(qwen2, shared_expert_intermediate_size=16)),
        Specimen("qwen3_moe", "Qwen3MoeForCausalLM", partial(_moe, "Qwen3MoeConfig", **qwen, head_dim=16)),
        Specimen("deepseek_v3", "DeepseekV3ForCausalLM", _deepseek),
        Specimen("ernie_bf16", "Ernie4_5_MoeForCausalLM", _ernie, _to_bf16),
    ]


def _encoder_decoders() -> list[Specimen]:
    t5_in_fp16 = partial(_cast, dtype=torch.float16, kept="wo")
    return [
        Specimen("t5", "T5ForConditionalGeneration", _t5),
        Specimen("t5_fp16", "T5ForConditionalGeneration", partial(_t5, tie_word_embeddings=False), t5_in_fp16),
        Specimen("bart", "BartForConditionalGeneration", partial(_bart, "BartConfig")),
        Specimen("marian", "MarianMTModel", partial(_bart, "MarianConfig")),
        Specimen("whisper", "WhisperForConditionalGeneration", _whisper),
        Specimen("vision_encoder_decoder", "VisionEncoderDecoderModel", _vision_encoder_decoder),
        Specimen("llava", "LlavaForConditionalGeneration", _llava),
        Specimen("llama4", "Llama4ForConditionalGeneration", _llama4),
        Specimen("qwen2_vl", "Qwen2VLForConditionalGeneration", _qwen2_vl),
    ]


_ALL = _encoders() + _decoders() + _mixtures_of_experts() + _encoder_decoders()
ZOO = {specimen.name: specimen for specimen in _ALL}
