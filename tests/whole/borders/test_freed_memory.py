"""Tensors whose memory was freed or shrunk: refused by name, before anything is written, copied or loaded.

Without the check, each of these ends the process, or writes what lies behind the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import hfshard
from hfshard.errors import InvalidArgumentError, UnstorableTensorError
from tests.helpers.tiny_bert import bert


def resized(tensor: torch.Tensor, nbytes: int, view: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A view of a tensor whose storage then gets another size."""
    found = view(tensor)
    tensor.untyped_storage().resize_(nbytes)
    return found


def matrix() -> torch.Tensor:
    """Of 4000 bytes."""
    return torch.arange(1000.0).reshape(10, 100)


REFUSED: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "freed": (0, lambda tensor: tensor),
    "freed parameter": (0, lambda tensor: nn.Parameter(tensor)),
    "shrunk by one byte": (3999, lambda tensor: tensor),
    "turned": (3999, lambda tensor: tensor.t()),
    "strided": (3800, lambda tensor: tensor[::3, ::9]),
    "last row": (3999, lambda tensor: tensor[9:]),
    "expanded": (3, lambda tensor: tensor[0, :1].expand(5)),
    "as bytes": (0, lambda tensor: tensor.view(torch.uint8)),
    "conjugated": (0, lambda tensor: tensor.view(torch.complex64).conj()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensor_beyond_its_storage_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    state_dict = {"whole": torch.ones(3), "head.weight": resized(matrix(), *REFUSED[name])}
    for refused in (
        lambda: hfshard.plan_shards(state_dict),
        lambda: hfshard.save_state_dict(state_dict, tmp_path / "out", max_shard_size=100),
    ):
        with pytest.raises(UnstorableTensorError, match=r"Can't store 'head\.weight': its memory was freed") as raised:
            refused()
        assert raised.value.fqn == "head.weight"
    assert list(tmp_path.iterdir()) == []


def test_tensor_within_its_storage_is_saved(tmp_path: Path) -> None:
    state_dict = {
        "first row": resized(matrix(), 400, lambda tensor: tensor[:1]),
        "strided": resized(matrix(), 3996, lambda tensor: tensor[::9, :99]),
        "nothing": resized(matrix(), 0, lambda tensor: tensor[5:5]),
        "grown": resized(matrix(), 5000, lambda tensor: tensor),
    }

    hfshard.save_state_dict(state_dict, tmp_path)

    loaded = hfshard.load_state_dict(tmp_path)
    assert torch.equal(loaded["first row"], torch.arange(100.0).reshape(1, 100))
    assert torch.equal(loaded["strided"], matrix()[::9, :99])
    assert loaded["nothing"].shape == (0, 100)
    assert torch.equal(loaded["grown"], matrix())


@pytest.mark.compat
def test_freed_weight_of_a_transformers_model_is_refused(tmp_path: Path) -> None:
    model = bert(1.0)
    model.pooler.dense.weight.untyped_storage().resize_(0)

    with pytest.raises(UnstorableTensorError, match=r"'pooler\.dense\.weight': its memory was freed"):
        hfshard.save_model(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("blocking", [True, False])
def test_freed_memory_is_neither_copied_nor_restored_into(blocking: bool, tmp_path: Path) -> None:
    model = nn.Linear(30, 30)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(30)).sum().backward()
    optimizer.step()
    state = hfshard.training.TrainingState(model=model, optimizer=optimizer)
    with hfshard.CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        hfshard.save_model(model, tmp_path / "model")

        optimizer.state[model.bias]["exp_avg"].untyped_storage().resize_(0)
        with pytest.raises(UnstorableTensorError, match="'bias/exp_avg': its memory was freed"):
            manager.save(2, state, blocking=blocking)
        bias = model.bias.detach().zero_()
        model.weight.untyped_storage().resize_(8)
        with pytest.raises(UnstorableTensorError, match="'weight': its memory was freed"):
            manager.save(2, state, blocking=blocking)
        with pytest.raises(InvalidArgumentError, match="Can't load into 'weight' of the model: its memory was freed"):
            manager.restore(state, 1)
        with pytest.raises(InvalidArgumentError, match="Can't load into 'weight' of the model: its memory was freed"):
            hfshard.load_model(model, tmp_path / "model")

        assert manager.all_steps() == [1]
    assert torch.equal(bias, torch.zeros(30))
