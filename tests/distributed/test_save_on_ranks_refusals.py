"""What ranks can't save or load, our verbs refuse on every rank, and say what to call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import hfshard
from hfshard.errors import HfshardError
from hfshard.training import CheckpointManager, TrainingState
from tests.distributed.gloo import check_ranks

SAVE_FSDP1 = r"Cannot store '0\.weight': it is a ShardedTensor of FSDP1.*full_state_dict=True"
LOAD_FSDP1 = r"Cannot load into '0\.weight': it is a ShardedTensor of FSDP1.*set_state_dict_type\("
SAVE_PARTIAL = r"Cannot store '0\.weight': its ranks have summands of it.* tensor\.redistribute\("
LOAD_PARTIAL = r"Cannot load into '0\.weight', .*: its ranks have summands of it.* tensor\.redistribute\("


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def of_fsdp1(kind: Any = None) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True)
    if kind is not None:
        FullyShardedDataParallel.set_state_dict_type(model, kind)
    return model


def partial() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    model = net()
    mesh = init_device_mesh("cpu", (2,))
    summand = DTensor.from_local(torch.zeros(4, 4), mesh, [Partial()], run_check=False)
    model[0].weight = nn.Parameter(summand)  # type: ignore[index]
    return model


def turned() -> nn.Module:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model, mesh=DeviceMesh("cpu", [1, 0]))
    return model


def refuse(rank: int, place: Path) -> None:
    from torch.distributed.fsdp import StateDictType

    out = place / "out"
    writer = hfshard.distributed.StorageWriter(out)
    manager = CheckpointManager(place / "run")
    saved = place / "saved" / "checkpoint-00000001"
    verbs: dict[str, Callable[[nn.Module], object]] = {
        "save": lambda model: hfshard.save_model(model, out),
        "save by one": lambda model: hfshard.save_model(model, out, is_main_process=rank == 0),
        "save tensors": lambda model: hfshard.save_state_dict(model.state_dict(), out),
        "dcp": lambda model: dcp.save(model.state_dict(), storage_writer=writer),  # type: ignore[attr-defined]
        "load": lambda model: hfshard.load_model(model, place / "whole"),
        "load tensors": lambda model: hfshard.load_state_dict(place / "whole", like=model.state_dict()),
        "save a run": lambda model: manager.save(1, TrainingState(model=model)),
        "restore": lambda model: manager.restore(TrainingState(model=model), str(saved)),
    }
    model = partial()
    for names, words in (
        (("save", "save by one", "save tensors"), SAVE_PARTIAL),
        (("load", "load tensors"), LOAD_PARTIAL),
        (("save a run", "restore"), r"its ranks have summands of it.* tensor\.redistribute\("),
    ):
        for name in names:
            with pytest.raises(HfshardError, match=words):
                verbs[name](model)
    flat = of_fsdp1(StateDictType.SHARDED_STATE_DICT)  # itself it is saved and loaded, but not its ShardedTensors
    for name, words in (("save tensors", SAVE_FSDP1), ("load tensors", LOAD_FSDP1)):
        with pytest.raises(HfshardError, match=words):
            verbs[name](flat)
    with pytest.raises(dcp.api.CheckpointException):  # torch's planner refuses it in its own words
        verbs["dcp"](partial())
    for name in [name for name in verbs if name != "dcp"]:
        with pytest.raises(HfshardError, match=r"'0\.weight'.*: its mesh .* ranks \[1, 0\], which do not ascend along"):
            verbs[name](turned())
    with pytest.raises(dcp.api.CheckpointException, match="its mesh of shape"):
        verbs["dcp"](turned())
    assert not out.exists()

    verbs["save"](of_fsdp1())
    dist.barrier()
    assert hfshard.load_state_dict(out).keys() == net().state_dict().keys()

    verbs["dcp"](of_fsdp1(StateDictType.SHARDED_STATE_DICT))  # torch's planner knows the parts
    torch.testing.assert_close(hfshard.load_state_dict(out), dict(net().state_dict()), rtol=0, atol=0)


def refuse_quietly(rank: int, place: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # FSDP1 is deprecated
        refuse(rank, place)


def test_what_has_no_parts_of_its_own_is_refused_on_every_rank(tmp_path: Path) -> None:
    hfshard.save_model(net(), tmp_path / "whole")
    with CheckpointManager(tmp_path / "saved") as manager:
        manager.save(1, TrainingState(model=net()))

    check_ranks(tmp_path / "ranks", 2, refuse_quietly, tmp_path)
