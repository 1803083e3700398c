"""Runs of transformers models under `fully_shard`, with an average of the weights beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hfshard.training import CheckpointManager, TrainingState
from tests.distributed.gloo import check_ranks
from tests.training.models import whole
from tests.training.test_spread_save_runs_on_ranks import assert_same


def llama(*, is_spread: bool) -> Any:
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=19,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        )
    )
    if is_spread:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def state_of(model: Any, average: Any) -> TrainingState:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tokens = torch.arange(12).reshape(2, 6)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(parameter, 0.5)
    return TrainingState(model=model, optimizer=optimizer, average=average)


def wholes(state: TrainingState) -> dict[str, torch.Tensor]:
    model, average = state.components["model"], state.components["average"]
    found = {**model.state_dict(), **{f"average {name}": one for name, one in average.state_dict().items()}}
    for number, slots in enumerate(state.components["optimizer"].state.values()):
        found |= {f"{number} {slot}": one for slot, one in slots.items()}
    return {name: whole(one) for name, one in found.items()}


def save_llama(rank: int, place: Path) -> None:
    state = state_of(llama(is_spread=True), llama(is_spread=True))
    manager = CheckpointManager(place / "run", max_shard_size="6KB")
    manager.save(1, state, metric={"loss": 1.0})
    saved = wholes(state)
    if rank == 0:
        torch.save(saved, place / "saved.pt")
    fresh = state_of(llama(is_spread=True), llama(is_spread=True))
    fresh.components["model"](input_ids=torch.tensor([[1]])).logits.sum().backward()
    fresh.components["optimizer"].step()
    manager.restore(fresh)
    assert_same(wholes(fresh), saved)


def test_a_spread_llama_is_saved_as_stock_transformers_loads_it(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    check_ranks(tmp_path / "ranks", 2, save_llama, tmp_path)

    saved = torch.load(tmp_path / "saved.pt")
    checkpoint = tmp_path / "run" / "checkpoint-00000001"
    assert len(list(checkpoint.glob("optimizer-*.safetensors"))) > 2
    stock = LlamaForCausalLM.from_pretrained(checkpoint).state_dict()
    assert_same(stock, {name: tensor for name, tensor in saved.items() if name in stock})
    alone = state_of(llama(is_spread=False), llama(is_spread=False))
    CheckpointManager(tmp_path / "run").restore(alone)
    assert_same(wholes(alone), saved)
