"""Loading into a module: by the module's own means, whatever wraps its children."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import hfshard
from hfshard.errors import StateDictMismatchError


class Transposed(nn.Module):
    """Keeps its weight in one layout, and saves it in another, as quantized and tensor-parallel layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.detach().t().contiguous()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        self.weight.data.copy_(state_dict[f"{prefix}weight"].t())


class Counting(nn.Linear):
    """Has an extra state."""

    steps = 0

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.steps])

    def set_extra_state(self, state: Tensor) -> None:
        self.steps = int(state)


class Tied(nn.Module):
    """Two names of one parameter, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


def test_module_with_its_own_format_is_loaded(tmp_path: Path) -> None:
    inner, loaded = Transposed(), Transposed()
    hfshard.save_model(nn.Sequential(inner), tmp_path)
    assert not torch.equal(inner.weight, loaded.weight)
    hfshard.load_model(nn.Sequential(loaded), tmp_path)
    assert torch.equal(inner.weight, loaded.weight)


def test_module_whose_state_dict_is_a_copy_is_loaded(tmp_path: Path) -> None:
    saved, loaded = nn.Linear(2, 2), nn.Linear(2, 2)
    loaded._register_state_dict_hook(lambda module, state, prefix, local: {k: v.clone() for k, v in state.items()})
    hfshard.save_model(saved, tmp_path)
    hfshard.load_model(loaded, tmp_path)
    assert torch.equal(saved.weight, loaded.weight)


def test_extra_state_is_given_back(tmp_path: Path) -> None:
    saved, loaded = Counting(2, 2), Counting(2, 2)
    saved.steps = 7
    hfshard.save_model(saved, tmp_path)
    hfshard.load_model(loaded, tmp_path)
    assert loaded.steps == 7


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own
def test_model_with_a_compiled_child_loads_what_it_saved(tmp_path: Path) -> None:
    child, plain_child = nn.Linear(2, 2), nn.Linear(2, 2)
    saved, plain = (nn.Sequential(first, nn.Linear(2, 2)) for first in (child, plain_child))
    expected = child.weight.detach().clone()
    saved.register_module("0", cast(nn.Module, torch.compile(child, backend="eager")))
    hfshard.save_model(saved, tmp_path)
    with torch.no_grad():
        child.weight.zero_()
    hfshard.load_model(saved, tmp_path)
    assert torch.equal(child.weight, expected)
    hfshard.load_model(plain, tmp_path)
    assert torch.equal(plain_child.weight, expected)


def test_meta_model_keeps_its_ties_dtype_and_frozen_parameters(tmp_path: Path) -> None:
    saved = Tied()
    hfshard.save_model(saved, tmp_path)
    with torch.device("meta"):
        loaded = Tied().to(torch.bfloat16)
    hfshard.load_model(loaded, tmp_path)
    assert loaded.first.weight is loaded.second.weight
    assert torch.equal(loaded.first.weight, saved.first.weight.to(torch.bfloat16))
    assert (loaded.first.weight.requires_grad, loaded.frozen.requires_grad) == (True, False)


def test_a_tensor_that_the_module_lacks_is_refused_unless_names_may_differ(tmp_path: Path) -> None:
    saved, loaded = nn.Linear(2, 2), nn.Linear(2, 2)
    hfshard.save_state_dict({**saved.state_dict(), "extra": torch.ones(1)}, tmp_path)
    before = loaded.weight.clone()

    with pytest.raises(StateDictMismatchError, match="does not fit the model") as raised:
        hfshard.load_model(loaded, tmp_path)

    assert (raised.value.missing_keys, raised.value.unexpected_keys) == ((), ("extra",))
    assert torch.equal(loaded.weight, before)
    hfshard.load_model(loaded, tmp_path, strict=False)
    assert torch.equal(loaded.weight, saved.weight)
