"""Stored tensors are read as a spread state has them: in full, or this rank's part, and never another rank's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import hfshard
from hfshard.checkpoint.open_checkpoint import open_checkpoint
from hfshard.format.index import FileDigest
from hfshard.training import TrainingState
from hfshard.training.restoring.restoration import read_set
from hfshard.training.restoring.spread_read import StateLayouts, read_local_parts
from hfshard.training.run.manifest import CheckpointManifest, folder_at

RANK = 1


def spread(whole: torch.Tensor) -> DTensor:
    """Rank 1's rows of a tensor on two ranks; no process group is needed."""
    mesh = DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=RANK)
    local = whole.chunk(2)[RANK].clone()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())


@pytest.fixture
def state() -> TrainingState:
    """A model of four spread rows and a plain bias, an optimizer that has not run, and a count."""
    model = nn.Linear(2, 4)
    model.weight = nn.Parameter(spread(torch.zeros(4, 2)))
    return TrainingState(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize(
    ("base", "name", "shape", "local_shape"),
    [
        pytest.param("model", "weight", (4, 2), (2, 2), id="a spread parameter"),
        pytest.param("model", "bias", (4,), None, id="a plain parameter"),
        pytest.param("model", "weight", (2, 4), None, id="another shape"),
        pytest.param("optimizer", "weight/exp_avg", (4, 2), (2, 2), id="a slot like its parameter"),
        pytest.param("optimizer", "weight/step", (), None, id="a count"),
        pytest.param("optimizer", "weight/row", (4,), (4,), id="a statistic of rows"),
        pytest.param("optimizer", "bias/exp_avg", (4,), None, id="a slot of a plain parameter"),
        pytest.param("state", "ema/weight", (4, 2), None, id="a part that the state lacks"),
    ],
)
def test_a_tensor_is_spread_as_its_counterpart_is(
    state: TrainingState, base: str, name: str, shape: tuple[int, ...], local_shape: tuple[int, ...] | None
) -> None:
    target = StateLayouts(state).empty(base, name, shape, torch.bfloat16)

    if local_shape is None:
        assert target is None
        return
    assert isinstance(target, DTensor)
    assert (target.shape, target.to_local().shape, target.dtype) == (shape, local_shape, torch.bfloat16)
    assert target.placements == ((Replicate(),) if shape == local_shape else (Shard(0),))


def test_a_spread_state_reads_its_own_rows_of_tied_names_too(tmp_path: Path, state: TrainingState) -> None:
    rows = torch.arange(8.0).reshape(4, 2)
    state.components["model"].register_parameter("tied", state.components["model"].weight)
    hfshard.save_state_dict({"weight": rows, "tied": rows, "bias": torch.ones(4)}, tmp_path)
    manifest = CheckpointManifest(1, 0, {}, {"model.safetensors": FileDigest()})

    found = read_set(folder_at(str(tmp_path)), manifest, RANK, StateLayouts(state), "model")

    assert isinstance(found["weight"], DTensor)
    assert found["weight"].to_local().tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert found["bias"].tolist() == [1.0] * 4
    assert found["tied"] is found["weight"]


@pytest.mark.parametrize("is_wanted", [None, lambda name: not name.startswith("count")], ids=["all", "some"])
def test_another_ranks_own_tensors_are_not_read(
    tmp_path: Path, state: TrainingState, is_wanted: Callable[[str], bool] | None
) -> None:
    names = ["count/state", "rank0/rng", "rank1/rng", "rank11/rng", "ranking/state"]
    save_file({name: torch.ones(2) for name in names}, tmp_path / "state.safetensors")

    with open_checkpoint(str(tmp_path), base="state") as checkpoint:
        found = read_local_parts(checkpoint, "state", StateLayouts(state), RANK, is_wanted)

    assert sorted(found) == [*(["count/state"] if is_wanted is None else []), "rank1/rng", "ranking/state"]
