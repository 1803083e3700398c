"""What a save collects: tensors without bytes are refused, and frozen weights have files of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

from hfshard.errors import UnstorableTensorError
from hfshard.saving.save_request import SaveOptions
from hfshard.training import CheckpointManager, TrainingState
from hfshard.training.state.collect_state import request_from_model
from tests.training.ingredients import Keeps


class Wrapper(torch.Tensor):
    """Its values lie in another tensor, and it has no memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.held = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].held)
        raise NotImplementedError(func)


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("tensor", [Wrapper(torch.ones(4)), torch.eye(3).to_sparse()], ids=["wrapper", "sparse"])
def test_a_tensor_without_bytes_is_refused_before_it_is_copied(
    tmp_path: Path, tensor: torch.Tensor, blocking: bool
) -> None:
    with pytest.raises(UnstorableTensorError, match="Cannot store 'keeps/tensor'"):
        CheckpointManager(tmp_path).save(1, TrainingState(keeps=Keeps(tensor)), blocking=blocking)
    assert list(tmp_path.iterdir()) == []


class Counts(nn.Linear):
    """A layer that counts how often it is asked for its state."""

    asked = 0

    def get_extra_state(self) -> int:
        self.asked += 1
        return 7

    def set_extra_state(self, state: Any) -> None:
        assert state == 7


def test_a_save_asks_a_module_for_its_state_once(tmp_path: Path) -> None:
    model, ema = Counts(2, 2), Counts(2, 2)
    state = TrainingState(model=model, ema=ema)

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        assert (model.asked, ema.asked) == (1, 1)

        assert manager.restore_latest(state) == 1


def test_frozen_weights_between_trained_ones_have_files_of_their_own_that_are_linked(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6)))
    for layer in list(model)[::2]:
        layer.requires_grad_(False)
    with CheckpointManager(tmp_path, max_shard_size=10_000) as manager:
        first = Path(manager.save(1, TrainingState(model=model)))
        with torch.no_grad():
            model.get_parameter("1.weight").add_(1)
        second = Path(manager.save(2, TrainingState(model=model)))
    names = sorted(path.name for path in second.glob("model-*.safetensors"))
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    # The trained ones come first, and the frozen ones lie in the other file.
    assert [(first / name).stat().st_ino == (second / name).stat().st_ino for name in names] == [False, True]


CONFIG = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=10)


class Net(nn.Module):
    """A module of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("model", "has_config"), [(Net(), False), (BertModel(CONFIG), True)], ids=["plain", "pretrained"]
)
def test_a_request_is_for_the_model_inside_its_wrappers(model: nn.Module, has_config: bool) -> None:
    wrapped = nn.DataParallel(nn.DataParallel(model))

    request = request_from_model(wrapped, None, SaveOptions())

    assert set(request.tensors) == set(model.state_dict())
    assert (request.config is not None) is has_config


def test_tensors_that_are_given_are_saved_instead_and_stay_as_they_are() -> None:
    given: dict[str, Any] = {"layer.bias": torch.ones(2)}

    request = request_from_model(Net(), given, SaveOptions())

    assert list(request.tensors) == list(given) == ["layer.bias"]
    assert request.tensors["layer.bias"] is given["layer.bias"]
