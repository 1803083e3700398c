"""Tensors of an optimizer's state come back with the dtypes that were saved, on the devices that they had."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ConstantLR

from hfshard.training import CheckpointManager, TrainingState
from hfshard.training.state.optimizer import exact
from hfshard.training.state.scheduler import encode_scheduler, plan_scheduler


def _one(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.ones(1, dtype=dtype, device=device)


def test_what_the_optimizer_kept_elsewhere_than_its_parameter_stays_there() -> None:
    loaded = {"product": _one(torch.bfloat16), "average": _one(), "list": [_one(torch.bfloat16)]}
    saved = {"product": _one(), "average": _one(), "list": [_one()]}

    found = exact(loaded, saved, {"product": _one(device="meta"), "average": _one()})

    assert {key: (found[key].dtype, found[key].device.type) for key in ("product", "average")} == {
        "product": (torch.float32, "meta"),
        "average": (torch.float32, "cpu"),
    }
    assert found["list"][0].dtype == torch.float32


def test_a_state_that_is_new_to_the_optimizer_lies_where_torch_put_it() -> None:
    found = exact({"product": _one(torch.bfloat16, "meta")}, {"product": _one()}, None)

    assert (found["product"].dtype, found["product"].device.type) == (torch.float32, "meta")


def kept(tmp_path: Path, value: Any, dtype: torch.dtype) -> Any:
    """Save an optimizer with a value of any kind for its parameter, and return what another has after a restore."""

    def built() -> tuple[nn.Parameter, torch.optim.SGD, TrainingState]:
        parameter = nn.Parameter(_one(dtype))
        optimizer = torch.optim.SGD([parameter])
        return parameter, optimizer, TrainingState(model=nn.ParameterList([parameter]), optimizer=optimizer)

    parameter, optimizer, state = built()
    optimizer.state[parameter]["kept"] = value
    manager = CheckpointManager(tmp_path)
    manager.save(1, state)
    again, restored, state = built()
    manager.restore(state, 1)
    return restored.state[again]["kept"]


@pytest.mark.parametrize(
    "value",
    [
        "int8",
        ["row", ("column",)],
        {"kind": "blocks", "scales": {"first": 0.5}},
        deque([1 / 3, "last"], maxlen=3),
        defaultdict(int, {"seen": 2}),
        OrderedDict(first=Counter("aab")),
    ],
)
def test_text_and_containers_come_back_as_they_were_saved(tmp_path: Path, value: Any) -> None:
    assert repr(kept(tmp_path, value, torch.bfloat16)) == repr(value)


def test_tensors_in_a_deque_keep_their_dtypes(tmp_path: Path) -> None:
    found = kept(tmp_path, deque([_one(torch.float64) / 3], maxlen=2), torch.float32)

    assert (found.maxlen, found[0].dtype, found[0].item()) == (2, torch.float64, 1 / 3)


def test_a_schedulers_tensors_come_to_the_devices_of_the_one_that_was_built() -> None:
    def built(device: str) -> ConstantLR:
        optimizer = torch.optim.SGD([nn.Parameter(_one())], lr=torch.tensor(0.5))
        scheduler = ConstantLR(optimizer)
        scheduler.base_lrs = [torch.tensor(0.25, device=device)]
        return scheduler

    saved = encode_scheduler(built("cpu"), "scheduler", {})
    del saved["state"]
    scheduler = built("meta")
    plan_scheduler(scheduler, {**saved, "state": built("cpu").state_dict()}, "scheduler", "run/checkpoint-1").load()

    assert [torch.as_tensor(rate).device.type for rate in scheduler.base_lrs] == ["meta"]


def test_a_state_that_is_finer_than_its_parameters_is_restored_to_the_bit(tmp_path: Path) -> None:
    def built() -> tuple[nn.Parameter, torch.optim.Adam, TrainingState]:
        parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        optimizer = torch.optim.Adam([parameter])
        return parameter, optimizer, TrainingState(model=nn.ParameterList([parameter]), optimizer=optimizer)

    parameter, optimizer, state = built()
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.state[parameter]["exp_avg"] = torch.tensor([1 / 3, 2 / 3])
    manager = CheckpointManager(tmp_path)
    manager.save(1, state)

    again, restored, state = built()
    manager.restore(state, 1)

    average = restored.state[again]["exp_avg"]
    assert average.dtype == torch.float32
    assert torch.equal(average, torch.tensor([1 / 3, 2 / 3]))
