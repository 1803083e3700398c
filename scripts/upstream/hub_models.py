"""A Hub on loopback that has tiny random models under the names for which other packages' tests ask."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

VOCABULARY: Final = 300  # the tokenizer's bytes, and special tokens

_SIZES: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}
_TOKENS: Final = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DECODER: Final = {**_SIZES, **_TOKENS, "num_key_value_heads": 2}
_GPT2: Final = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_OPT: Final = {**_SIZES, **_TOKENS, "num_hidden_layers": 6, "ffn_dim": 64, "word_embed_proj_dim": 32}
_T5: Final = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_BART: Final = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "max_position_embeddings": 128,
    **{f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 64))},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
}
_EXPERTS: Final = {**_DECODER, "num_experts_per_tok": 2}


@dataclass(frozen=True, slots=True)
class HubModel:
    """One repository: a model of transformers' class, made from a config of these values, with a tokenizer."""

    class_name: str
    config_name: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HubAdapter:
    """One repository: a LoRA adapter for the model of another one."""

    base: str
    auto_class: str
    task: str
    """PEFT's name of the task."""


_LLAMA: Final = HubModel("LlamaForCausalLM", "LlamaConfig", _DECODER)
_GPT2_LM: Final = HubModel("GPT2LMHeadModel", "GPT2Config", {**_GPT2, **_TOKENS})
_OPT_LM: Final = HubModel("OPTForCausalLM", "OPTConfig", _OPT)
_T5_LM: Final = HubModel(
    "T5ForConditionalGeneration", "T5Config", {**_T5, "decoder_start_token_id": 0, "tie_word_embeddings": True}
)
_BART_LM: Final = HubModel("BartForConditionalGeneration", "BartConfig", _BART)
_GEMMA3: Final = HubModel(
    "Gemma3ForCausalLM", "Gemma3TextConfig", {**_DECODER, "head_dim": 8, "tie_word_embeddings": True}
)
_MIXTRAL: Final = HubModel("MixtralForCausalLM", "MixtralConfig", {**_EXPERTS, "num_local_experts": 4})
_QWEN3_MOE: Final = HubModel(
    "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8}
)

HUB_MODELS: Final = {
    "facebook/opt-125m": _OPT_LM,
    "hf-internal-testing/Mixtral-tiny": _MIXTRAL,
    "hf-internal-testing/tiny-qwen3-moe": _QWEN3_MOE,
    "hf-internal-testing/tiny-random-BertModel": HubModel("BertModel", "BertConfig", _SIZES),
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM": _GEMMA3,
    "hf-internal-testing/tiny-random-LlamaForCausalLM": _LLAMA,
    "hf-internal-testing/tiny-random-MistralForCausalLM": HubModel("MistralForCausalLM", "MistralConfig", _DECODER),
    "hf-internal-testing/tiny-random-gpt2": _GPT2_LM,
    "peft-internal-testing/opt-125m": _OPT_LM,
    "peft-internal-testing/tiny-clip-text-2": HubModel("CLIPTextModel", "CLIPTextConfig", {**_SIZES, **_TOKENS}),
    "peft-internal-testing/tiny-dummy-qwen2": HubModel("Qwen2ForCausalLM", "Qwen2Config", _DECODER),
    "peft-internal-testing/tiny-random-BartForConditionalGeneration": _BART_LM,
    "peft-internal-testing/tiny-random-BertForSequenceClassification": HubModel(
        "BertForSequenceClassification", "BertConfig", _SIZES
    ),
    "peft-internal-testing/tiny-random-BertModel": HubModel("BertModel", "BertConfig", _SIZES),
    "peft-internal-testing/tiny-random-BloomForCausalLM": HubModel(
        "BloomForCausalLM", "BloomConfig", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    ),
    "peft-internal-testing/tiny-random-DebertaModel": HubModel("DebertaModel", "DebertaConfig", _SIZES),
    "peft-internal-testing/tiny-random-DebertaV2Model": HubModel("DebertaV2Model", "DebertaV2Config", _SIZES),
    "peft-internal-testing/tiny-random-GPT2LMHeadModel": _GPT2_LM,
    "peft-internal-testing/tiny-random-GPTJForCausalLM": HubModel(
        "GPTJForCausalLM", "GPTJConfig", {**_GPT2, **_TOKENS, "rotary_dim": 4}
    ),
    "peft-internal-testing/tiny-random-GPTNeoXForCausalLM": HubModel("GPTNeoXForCausalLM", "GPTNeoXConfig", _SIZES),
    "peft-internal-testing/tiny-random-LlamaForCausalLM": _LLAMA,
    "peft-internal-testing/tiny-random-OPTForCausalLM": _OPT_LM,
    "peft-internal-testing/tiny-random-RobertaForSequenceClassification": HubModel(
        "RobertaForSequenceClassification", "RobertaConfig", _SIZES
    ),
    "peft-internal-testing/tiny-random-RobertaModel": HubModel("RobertaModel", "RobertaConfig", _SIZES),
    "peft-internal-testing/tiny-random-T5ForConditionalGeneration": _T5_LM,
    "peft-internal-testing/tiny-random-T5ForConditionalGeneration-calibrated": _T5_LM,
    "peft-internal-testing/tiny-random-gpt2": _GPT2_LM,
    "peft-internal-testing/tiny-random-t5": _T5_LM,
    "trl-internal-testing/tiny-GptOssForCausalLM": HubModel(
        "GptOssForCausalLM", "GptOssConfig", {**_EXPERTS, "num_local_experts": 4, "head_dim": 8}
    ),
    "trl-internal-testing/tiny-LlamaForSequenceClassification-3.2": HubModel(
        "LlamaForSequenceClassification", "LlamaConfig", _DECODER
    ),
    "trl-internal-testing/tiny-Qwen3ForCausalLM": HubModel(
        "Qwen3ForCausalLM", "Qwen3Config", {**_DECODER, "head_dim": 8}
    ),
    "trl-internal-testing/tiny-Qwen3MoeForCausalLM": _QWEN3_MOE,
    "trl-internal-testing/tiny-random-LlamaForCausalLM": _LLAMA,
}

HUB_ADAPTERS: Final = {
    "peft-internal-testing/gpt2-lora-random": HubAdapter(
        "hf-internal-testing/tiny-random-gpt2", "AutoModelForCausalLM", "CAUSAL_LM"
    ),
    "peft-internal-testing/tiny-OPTForCausalLM-lora": HubAdapter(
        "peft-internal-testing/tiny-random-OPTForCausalLM", "AutoModelForCausalLM", "CAUSAL_LM"
    ),
    "peft-internal-testing/tiny_GPT2ForTokenClassification-lora": HubAdapter(
        "hf-internal-testing/tiny-random-gpt2", "AutoModelForTokenClassification", "TOKEN_CLS"
    ),
    "peft-internal-testing/tiny_OPTForFeatureExtraction-lora": HubAdapter(
        "peft-internal-testing/tiny-random-OPTForCausalLM", "AutoModel", "FEATURE_EXTRACTION"
    ),
    "peft-internal-testing/tiny_OPTForQuestionAnswering-lora": HubAdapter(
        "peft-internal-testing/tiny-random-OPTForCausalLM", "AutoModelForQuestionAnswering", "QUESTION_ANS"
    ),
    "peft-internal-testing/tiny_OPTForSequenceClassification-lora": HubAdapter(
        "peft-internal-testing/tiny-random-OPTForCausalLM", "AutoModelForSequenceClassification", "SEQ_CLS"
    ),
    "peft-internal-testing/tiny_T5ForSeq2SeqLM-lora": HubAdapter(
        "peft-internal-testing/tiny-random-T5ForConditionalGeneration", "AutoModelForSeq2SeqLM", "SEQ_2_SEQ_LM"
    ),
}


@contextmanager
def serving(home: Path) -> Iterator[dict[str, str]]:
    """Serve the models while the block runs; gives the environment variables that lead there.

    Args:
        home: An empty folder, for the repositories.
    """
    from tests.servers.hub.hub_server import HubServer

    with HubServer(home) as server:
        for repo_id, files in _repos().items():
            server.create_repo(repo_id).commit(files, "tiny and random")
        yield {"HF_ENDPOINT": server.endpoint, "HF_TOKEN": "hf_write", "HF_HUB_DISABLE_XET": "1"}


@cache
def _repos() -> dict[str, Mapping[str, bytes | None]]:
    """The files of each repository."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    made = {id(model): _files_of(model) for model in {id(model): model for model in HUB_MODELS.values()}.values()}
    repos = {repo_id: made[id(model)] for repo_id, model in HUB_MODELS.items()}
    adapters = {repo_id: _files_of_adapter(adapter, repos[adapter.base]) for repo_id, adapter in HUB_ADAPTERS.items()}
    return {**repos, **adapters}


def _files_of(model: HubModel) -> dict[str, bytes | None]:
    """What stock transformers saves of the model, and a tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, model.config_name)(**model.values)
    with tempfile.TemporaryDirectory() as directory:
        getattr(transformers, model.class_name)(config).save_pretrained(directory)
        _tokenizer().save_pretrained(directory)
        return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def _files_of_adapter(adapter: HubAdapter, base: Mapping[str, bytes | None]) -> dict[str, bytes | None]:
    """What PEFT saves of an adapter for the model that these files are."""
    import transformers
    from peft import LoraConfig, get_peft_model

    with tempfile.TemporaryDirectory() as directory:
        for name, content in base.items():
            (Path(directory) / name).write_bytes(content or b"")
        model = getattr(transformers, adapter.auto_class).from_pretrained(directory)
        place = Path(directory) / "adapter"
        get_peft_model(model, LoraConfig(task_type=adapter.task, init_lora_weights=False)).save_pretrained(place)
        config = json.loads((place / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = adapter.base  # only now, as PEFT would look for it on the Hub
        (place / "adapter_config.json").write_text(json.dumps(config))
        return {path.name: path.read_bytes() for path in place.iterdir()}


def _tokenizer() -> Any:
    """A token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(special + letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
