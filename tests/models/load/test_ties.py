"""Tensors that a config ties or does not tie, and what from_pretrained makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import BertConfig, BertForMaskedLM, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hfshard
from hfshard.errors import StateDictMismatchError

BERT = BertConfig(
    vocab_size=6, hidden_size=4, num_hidden_layers=2, num_attention_heads=1, intermediate_size=4,
    max_position_embeddings=4,
)  # fmt: skip


def _llama(*, tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=6, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4,
        tie_word_embeddings=tied,
    )  # fmt: skip


def _second_layer_is_the_first(base: Any) -> bool:
    first, second = (layer.output.dense.weight for layer in base.encoder.layer)
    return first is second


@pytest.mark.compat
def test_two_tensors_that_the_config_ties_are_both_kept_as_in_transformers(tmp_path: Path) -> None:
    saved = LlamaForCausalLM(_llama(tied=False))
    hfshard.save_model(saved, tmp_path)
    config = _llama(tied=True)
    stock = LlamaForCausalLM.from_pretrained(tmp_path, config=config)
    for loaded in (stock, hfshard.load_model(LlamaForCausalLM, tmp_path, config=config, strict=True)):
        assert torch.equal(loaded.lm_head.weight, saved.lm_head.weight)
        assert torch.equal(loaded.model.embed_tokens.weight, saved.model.embed_tokens.weight)

    with pytest.raises(StateDictMismatchError, match="are one tensor"):
        hfshard.load_model(LlamaForCausalLM(_llama(tied=True)), tmp_path)


@pytest.mark.compat
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("saved_class, loaded_class", [(BertForMaskedLM, BertModel), (BertModel, BertForMaskedLM)])
def test_a_tie_is_kept_with_and_without_the_head(
    tmp_path: Path, saved_class: type[PreTrainedModel], loaded_class: type[PreTrainedModel], dtype: torch.dtype
) -> None:
    saved: Any = saved_class(BERT)
    layers = getattr(saved, "bert", saved).encoder.layer
    layers[1].output.dense.weight = layers[0].output.dense.weight
    hfshard.save_model(saved, tmp_path)

    loaded = hfshard.load_model(loaded_class, tmp_path, dtype=dtype)

    assert _second_layer_is_the_first(getattr(loaded, "bert", loaded))


class _InAChain(BertModel):
    """A model that ties a name to one that is tied itself."""

    _tied_weights_keys: Any = {
        "encoder.layer.1.output.dense.weight": "encoder.layer.0.output.dense.weight",
        "encoder.layer.2.output.dense.weight": "encoder.layer.1.output.dense.weight",
    }


@pytest.mark.compat
@pytest.mark.parametrize("max_shard_size", ["1GB", 100])
def test_ties_in_a_chain_are_declared_and_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, max_shard_size: int | str
) -> None:
    config = BertConfig(**{**BERT.to_dict(), "num_hidden_layers": 3, "tie_word_embeddings": True})
    saved: Any = _InAChain(config)
    index = hfshard.save_model(saved, tmp_path, max_shard_size=max_shard_size)

    stock: Any = _InAChain.from_pretrained(tmp_path)
    first, second, third = (layer.output.dense.weight for layer in stock.encoder.layer)

    assert index is not None and index.undeclared_ties == () and "does not declare" not in caplog.text
    assert first is second is third and torch.equal(first, saved.encoder.layer[0].output.dense.weight)


class _Averaged(BertModel):
    """A model with buffers that are the memory of parameters, as averages and caches are until they are first used."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.register_buffer("a_cache", torch.zeros(4))  # one before, and one behind the parameters in the alphabet
        self.register_buffer("z_cache", torch.zeros(4))


@pytest.mark.compat
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_buffer_that_is_a_parameters_memory_is_so_again_and_stays_a_buffer(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    saved = _Averaged(BERT)
    first, last = saved.embeddings.LayerNorm, saved.get_submodule("pooler.dense")
    saved.a_cache, saved.z_cache = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([5.0, 6.0, 7.0, 8.0])
    first.bias, last.bias = nn.Parameter(saved.a_cache), nn.Parameter(saved.z_cache)
    hfshard.save_model(saved, tmp_path)

    loaded = hfshard.load_model(_Averaged, tmp_path, dtype=dtype, strict=True)

    buffers, parameters = dict(loaded.named_buffers()), dict(loaded.named_parameters())
    for cache, name, values in (
        ("a_cache", "embeddings.LayerNorm.bias", [1.0, 2.0, 3.0, 4.0]),
        ("z_cache", "pooler.dense.bias", [5.0, 6.0, 7.0, 8.0]),
    ):
        assert cache not in parameters and not buffers[cache].requires_grad and parameters[name].requires_grad
        assert buffers[cache].tolist() == parameters[name].tolist() == values
        assert buffers[cache].data_ptr() == parameters[name].data_ptr()


@pytest.mark.compat
def test_two_names_that_are_one_without_prefixes_are_refused(tmp_path: Path) -> None:
    BERT.save_pretrained(tmp_path)
    names = {"module.layers.experts.weight": torch.ones(1), "layers.experts.weight": torch.zeros(1)}
    save_file(names, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StateDictMismatchError, match=r"are both 'layers\.experts\.weight' without the prefixes"):
        hfshard.load_model(BertModel, tmp_path)
