"""Small models that are trained with and without gradient checkpointing, and what is compared."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from hfshard.training.gradient_checkpointing import enable_gradient_checkpointing

WORDS, LENGTH = 97, 16
Model = Any  # a module, whose children are reached by name
Random = tuple[Tensor, Any, Any]


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            attention_dropout=0.1,
            tie_word_embeddings=True,
        )
    )


def bert() -> PreTrainedModel:
    return BertForMaskedLM(
        BertConfig(vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
    )


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=3, n_head=4, n_positions=LENGTH))


def t5(dropout: float = 0.1) -> PreTrainedModel:
    config: Any = T5Config
    return T5ForConditionalGeneration(
        config(
            vocab_size=WORDS,
            d_model=64,
            d_kv=32,
            d_ff=128,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
            dropout_rate=dropout,
        )
    )


def t5_without_dropout() -> PreTrainedModel:
    return t5(0.0)


LANGUAGE_MODELS = [llama, bert, gpt2, t5, t5_without_dropout]


class Residual(nn.Module):
    """A block of layers beside a shortcut."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return x + scale * self.layers(x)


class Stack(nn.Module):
    """Blocks in a list, the first of them called once more at the end."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.blocks[0](x)


def residual() -> Residual:
    return Residual(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 8))


def sequential() -> nn.Sequential:
    return nn.Sequential(*(residual() for _ in range(4)), nn.Linear(8, 3))


def build(factory: Callable[[], Model]) -> Model:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return without_cache(factory().train())


def without_cache(model: Model) -> Model:
    """Turn off the cache of keys and values, as gradient checkpointing does, so that like is compared with like.

    The cache hands the attention contiguous copies in place of strided views: the same numbers, whose products some
    processors (AMD's, for one) sum in another order.
    """
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False
    return model


def loss_of(model: Model) -> Any:
    if isinstance(model, PreTrainedModel) and model.main_input_name == "input_ids":
        ids = torch.randint(0, WORDS, (2, LENGTH))
        return model(input_ids=ids, labels=ids).loss
    if isinstance(model, PreTrainedModel):
        return model(pixel_values=torch.randn(2, 3, 64, 64), labels=torch.tensor([0, 1])).loss
    return model(torch.randn(6, 8)).square().mean()


def random_state() -> Random:
    name, words, *rest = np.random.get_state()
    return torch.get_rng_state(), random.getstate(), (name, np.asarray(words).tolist(), *rest)


def train(model: Model, steps: int = 1) -> tuple[dict[str, Any], Random]:
    """Train, and return the last gradients and the states of the random number generators."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    return gradients_of(model), random_state()


def gradients_of(model: Model) -> dict[str, Any]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_tensors(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        assert (value is None) == (other[name] is None), name
        assert value is None or torch.equal(value, other[name]), name


def assert_trains_alike(factory: Callable[[], Model], modules: str | None = None, steps: int = 6) -> Model:
    """Train with and without; return the model that was trained with it."""
    plain = build(factory)
    gradients, state = train(plain, steps)
    model = build(factory)
    handle = enable_gradient_checkpointing(model, modules)
    assert handle.names
    again, state_again = train(model, steps)
    assert_same_tensors(gradients, again)
    assert_same_tensors(plain.state_dict(), model.state_dict())
    assert torch.equal(state[0], state_again[0])
    assert state[1:] == state_again[1:]
    return model


def assert_same_results(
    factory: Callable[[], Model], run: Callable[[Model], dict[str, Any]], modules: str | None = None
) -> None:
    """Compare what a run of a fresh model returns with and without."""
    results = []
    for is_on in (False, True):
        model = build(factory)
        if is_on:
            enable_gradient_checkpointing(model, modules)
        results.append(run(model))
    assert_same_tensors(*results)


def count_calls(block: Model) -> list[int]:
    calls: list[int] = []
    block.layers[0].register_forward_hook(lambda *_: calls.append(1))
    return calls


def saved_bytes(model: Model) -> int:
    """Bytes of the tensors that one forward pass keeps for the backward pass, parameters aside; each storage once."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, tuple[int, Tensor]] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss_of(model)
    return sum(size for size, _ in found.values())
