"""Which blocks gradient checkpointing takes and refuses, when it runs, and that the model stays what it is."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfshard
from hfshard.errors import InvalidArgumentError
from hfshard.training.gradient_checkpointing import enable_gradient_checkpointing
from tests.training.checkpointed import (
    Model,
    Residual,
    assert_same_tensors,
    bert,
    build,
    count_calls,
    gradients_of,
    loss_of,
    residual,
    saved_bytes,
    sequential,
    train,
)


def test_eval_and_no_grad_run_a_block_once() -> None:
    model = build(sequential)
    enable_gradient_checkpointing(model)
    calls = count_calls(model[0])
    with torch.no_grad():
        model(torch.randn(6, 8))
    model.eval()
    model(torch.randn(6, 8)).sum().backward()
    assert len(calls) == 2
    model.train()
    model(torch.randn(6, 8)).sum().backward()
    assert len(calls) == 4


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([residual(), residual()])
        self.head = nn.Linear(8, 3)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (None, "A Named is neither a transformers model nor a Sequential. Name the blocks .* modules='blocks.*'"),
        ("blcks.0", "this Named has no such module: the nearest names are 'blocks.0'"),
        ("*.*.*.*.*", "this Named has no such module: see model.named_modules"),
        ("blocks", "names 'blocks', a ModuleList, which is never called itself. Name its contents: 'blocks.*'"),
        (["blocks.0", "blocks.0.layers"], "'blocks.0' contains 'blocks.0.layers', which is checkpointed too"),
        ([], "modules= is empty"),
        ([nn.Linear(1, 1)], "must contain names such as 'blocks.*', got a Linear"),
    ],
)
def test_blocks_that_can_not_be_are_refused_and_nothing_changes(modules: Any, message: str) -> None:
    model = Named()
    with pytest.raises(InvalidArgumentError, match=message):
        enable_gradient_checkpointing(model, modules)
    assert {type(module) for module in model.modules()} == {type(module) for module in Named().modules()}


def test_sequential_of_layers_alone_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"no blocks: each child is a single layer, .* Group its layers"):
        enable_gradient_checkpointing(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))


def test_compiled_block_is_refused() -> None:
    model: Model = Named()
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    with pytest.raises(InvalidArgumentError, match=r"'blocks.0' .* Enable gradient checkpointing before those"):
        enable_gradient_checkpointing(model, "blocks.*")


def test_enabling_twice_is_enabling_once() -> None:
    model = build(sequential)
    enable_gradient_checkpointing(model)
    handle = enable_gradient_checkpointing(model, ["0", "1"])
    calls = count_calls(model[0])
    loss_of(model).backward()
    assert len(calls) == 2
    handle.remove()
    assert type(model[0]) is Residual
    assert type(model[2]) is not Residual


def test_names_and_looks_of_the_model_do_not_change(tmp_path: Path) -> None:
    plain, model = build(sequential), build(sequential)
    enable_gradient_checkpointing(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert repr(model) == repr(plain)
    hfshard.save_model(plain, tmp_path / "plain")
    hfshard.save_model(model, tmp_path / "model")
    assert (tmp_path / "model/model.safetensors").read_bytes() == (tmp_path / "plain/model.safetensors").read_bytes()
    hfshard.load_model(model, tmp_path / "plain")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("factory", [sequential, bert])
def test_copy_is_checkpointed_and_stands_alone(copied: Callable[[Model], Model], factory: Callable[[], Model]) -> None:
    plain = build(factory)
    gradients, _ = train(plain)
    model = build(factory)
    enable_gradient_checkpointing(model)
    other = copied(model)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    build(factory)
    again, _ = train(other)
    assert_same_tensors(gradients, again)
    assert_same_tensors(plain.state_dict(), other.state_dict())
    assert saved_bytes(other) < 0.5 * saved_bytes(plain)


def test_replica_of_data_parallel_runs_its_own_parameters() -> None:
    block: Model = residual()
    model = nn.Sequential(block)
    enable_gradient_checkpointing(model)
    replica = block._replicate_for_data_parallel()
    replica.layers = nn.Identity()
    assert torch.equal(replica(torch.ones(2, 8)), torch.full((2, 8), 2.0))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks, at a break
def test_compiled_model_trains_bit_for_bit_as_without() -> None:
    plain = build(sequential)
    gradients, _ = train(plain, 2)
    model = build(sequential)
    enable_gradient_checkpointing(model)
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        compiled(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()
    assert_same_tensors(gradients, gradients_of(model))
    assert_same_tensors(plain.state_dict(), model.state_dict())


def test_wrapped_model_is_unwrapped() -> None:
    model: Model = torch.compile(build(sequential), backend="eager")
    assert enable_gradient_checkpointing(model).names == ("0", "1", "2", "3")
