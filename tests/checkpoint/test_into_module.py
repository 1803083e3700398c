"""A module gets every tensor of a checkpoint: what it would merge with another one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hfshard
from hfshard.errors import StateDictMismatchError


class Pair(nn.Module):
    """Two layers, tied or not."""

    def __init__(self, *, tied: bool, device: str = "cpu") -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(2, 2, bias=False, device=device) for _ in range(2))
        if tied:
            self.b.weight = self.a.weight


class Views(nn.Module):
    """Two buffers that overlap in memory: the second half of one is the first half of the other."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        memory = torch.zeros(6, dtype=dtype)
        self.register_buffer("low", memory[:4])
        self.register_buffer("high", memory[2:])


class Expanded(nn.Module):
    """A buffer whose three elements are one, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ones", torch.ones(1).expand(3))
        self.weight = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("strict", [True, False])
def test_two_tensors_that_the_module_ties_are_refused(tmp_path: Path, device: str, strict: bool) -> None:
    hfshard.save_state_dict({"a.weight": torch.ones(2, 2), "b.weight": torch.zeros(2, 2)}, tmp_path)
    model = Pair(tied=True, device=device)
    before = model.a.weight.detach().clone()

    with pytest.raises(StateDictMismatchError, match=r"'b\.weight' and 'a\.weight' share memory in the") as raised:
        hfshard.load_model(model, tmp_path, strict=strict)

    assert raised.value.path == str(tmp_path)
    assert model.a.weight.is_meta or torch.equal(model.a.weight, before)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_two_equal_tensors_are_loaded_into_one(tmp_path: Path, device: str) -> None:
    value = torch.tensor([[1.0, float("nan")], [-0.0, 2.0]])
    hfshard.save_state_dict({"a.weight": value, "b.weight": value.clone()}, tmp_path)
    model = hfshard.load_model(Pair(tied=True, device=device), tmp_path)
    assert model.a.weight is model.b.weight
    assert torch.equal(model.b.weight.detach().view(torch.int32), value.view(torch.int32))


def test_one_tensor_of_two_names_stays_two_parameters_of_an_untied_module(tmp_path: Path) -> None:
    hfshard.save_model(Pair(tied=True), tmp_path)
    for device in ("cpu", "meta"):
        model = hfshard.load_model(Pair(tied=False, device=device), tmp_path)

        assert torch.equal(model.a.weight, model.b.weight)
        assert model.a.weight.data_ptr() != model.b.weight.data_ptr()


def test_a_tied_module_on_meta_takes_a_checkpoint_with_one_of_the_names(tmp_path: Path) -> None:
    hfshard.save_state_dict({"b.weight": torch.ones(2, 2)}, tmp_path)
    model = hfshard.load_model(Pair(tied=True, device="meta"), tmp_path)
    assert model.a.weight is model.b.weight
    assert model.a.weight.sum() == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tensors_that_overlap_in_the_module_have_to_agree(tmp_path: Path, dtype: torch.dtype) -> None:
    hfshard.save_state_dict({"low": torch.arange(4.0), "high": torch.arange(2.0, 6.0)}, tmp_path / "agree")
    hfshard.save_state_dict({"low": torch.arange(4.0), "high": torch.arange(4.0)}, tmp_path / "differ")

    model = hfshard.load_model(Views(dtype), tmp_path / "agree")
    with pytest.raises(StateDictMismatchError, match="'low' and 'high' share memory in the"):
        hfshard.load_model(model, tmp_path / "differ")

    assert model.low.tolist() == [0, 1, 2, 3]
    assert model.high.tolist() == [2, 3, 4, 5]


def test_an_expanded_tensor_is_refused_before_anything_is_assigned(tmp_path: Path) -> None:
    hfshard.save_state_dict({"ones": torch.ones(3), "weight": torch.ones(2)}, tmp_path)
    model = Expanded()
    with pytest.raises(StateDictMismatchError, match=r"'ones' of the model: it is expanded.*Nothing was loaded"):
        hfshard.load_model(model, tmp_path)
    assert model.weight.tolist() == [0, 0]
