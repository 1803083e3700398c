"""Tensors are assigned as torch's own `load_state_dict` does it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hfshard.errors import InvalidArgumentError
from hfshard.tensors.state_dict import assign, may_be_divided


class Telling(nn.Module):
    """Tells in which order it was asked to load, and with what."""

    def __init__(self, told: list[tuple[str, list[str]]], version: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.told, self._version = told, version
        self.register_load_state_dict_pre_hook(self.before)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            lambda _, keys: told.append(("after", sorted(keys.missing_keys)))
        )

    def before(self, _: nn.Module, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.told.append((f"{prefix} version {metadata.get('version')}", sorted(state_dict)))


def told_by(load: Any) -> list[tuple[str, list[str]]]:
    """What the modules of a model tell when `load` brings two of its three weights."""
    told: list[tuple[str, list[str]]] = []
    model = nn.Sequential(Telling(told, 3), nn.ModuleList([Telling(told)]))
    setattr(model, "a.b", Telling(told))
    load(model, {"0.weight": torch.ones(1), "a.b.weight": torch.ones(1)})
    assert [float(value) for value in model.state_dict().values()] == [1, 0, 1]
    return told


def test_modules_hooks_see_what_torch_would_show_them() -> None:
    assert told_by(assign) == [
        ("0. version 3", ["0.weight"]),
        ("after", []),
        ("1.0. version 1", []),
        ("after", ["1.0.weight"]),
        ("a.b. version 1", ["a.b.weight"]),
        ("after", ["1.0.weight"]),
    ]


def test_a_tensor_of_another_shape_is_refused_as_by_torch() -> None:
    with pytest.raises(RuntimeError, match=r"loading state_dict for Linear:\n\tsize mismatch for weight"):
        assign(nn.Linear(2, 2), {"weight": torch.zeros(3, 3)})


def test_a_model_that_loads_by_itself_is_asked_to() -> None:
    class Own(nn.Linear):
        given: Any = None

        def load_state_dict(self, state_dict: Any, *arguments: Any, **options: Any) -> Any:
            self.given = list(state_dict), options

    model = Own(1, 1)
    assign(model, {"weight": torch.zeros(1, 1)})
    assert model.given == (["weight"], {"strict": False, "assign": False})


class Doubled(nn.Module):
    """Is stored as twice its weight, and loads that by a method of its own, which copies in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "twice"] = self.weight.detach() * 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.weight.data.copy_(state_dict[prefix + "twice"] / 2)


def test_what_stays_on_the_meta_device_is_not_called_loaded() -> None:
    stored = {"0.twice": torch.tensor([6.0, 8.0])}
    with torch.device("meta"):
        doubled = Doubled()
        model = nn.Sequential(doubled)

    with pytest.raises(InvalidArgumentError, match=r"'0\.twice' of the model is on the meta device after it was load"):
        assign(model, stored)

    assign(model.to_empty(device="cpu"), stored)
    assert doubled.weight.tolist() == [3.0, 4.0]


def test_a_module_is_divided_only_if_a_library_has_marked_a_parameter_or_taken_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    assert not may_be_divided(model)

    marked: Any = model[1].weight
    for mark in ("ds_id", "_fsdp_flattened"):  # DeepSpeed's, FSDP1's
        setattr(marked, mark, 1)
        assert may_be_divided(model)
        delattr(marked, mark)
    assert not may_be_divided(model)

    parameters: dict[str, Any] = model[0]._parameters
    parameters["weight"] = torch.zeros(2, 2)  # a view of a flat parameter, during a pass of FSDP1
    assert may_be_divided(model)
