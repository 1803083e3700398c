"""Checkpoints are as large as their tensors, and stay as large as they were, however often a run is resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hfshard.training import CheckpointManager, TrainingState
from tests.flows.resume_cases import CASES, REPEATED
from tests.flows.resume_runs import Run

CYCLES = 4
"""What a cycle adds, each one does; without the blanks that fill files up, a byte more is seen."""
SLACK_BYTES = 64 * 1024
SHARE = 1.001
RNG_BYTES = 5056 + 624 * 8
"""torch's own state, and numpy's 624 words if they take eight bytes each."""
SCHEDULED = [name for name in CASES if name.startswith("scheduler-")]
HOLDING = [
    "scheduler-lambda-holds-optimizer", "scheduler-sequential-stateful", "scheduler-chained", "scheduler-plateau",
    "scheduler-own-crowded", "scheduler-own-bound-method", "scheduler-one-cycle-cos", "scheduler-hf-greedy",
]  # fmt: skip
"""Schedulers whose state holds other objects, or grows in most ways; some first fill a short history."""
OTHERS = ["optimizer-adamw-three-groups", "optimizer-own-master-weights", "ema-batch-norm-buffers", "autocast-scaler"]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _bare_size(folder: Path) -> int:
    """Without the blanks that fill files up: what grows by a byte would else show when it needs another block."""
    return sum(len(path.read_bytes().rstrip()) for path in folder.rglob("*.json")) + sum(
        path.stat().st_size for path in folder.rglob("*.safetensors")
    )


def _sizes_after_cycles(name: str, root: Path, cycles: int, size_of: Callable[[Path], int]) -> list[int]:
    """So often: build everything anew, restore, make one step, save. The sizes, from the first save on."""
    sizes = []
    for number in range(1, cycles + 2):
        run = Run(CASES[name], seed=number)
        with CheckpointManager(root) as manager:
            assert run.resume(manager) == (None if number == 1 else number - 1)
            run.train(number)
            path = manager.save(number, run.state())
        run.close()
        sizes.append(size_of(Path(path)))
    return sizes


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in REPEATED else ())
        for name in SCHEDULED
        if name not in HOLDING
    ],
)
def test_cycles_of_load_and_save_leave_the_size_to_the_byte(name: str, tmp_path: Path) -> None:
    sizes = _sizes_after_cycles(name, tmp_path, CYCLES, _bare_size)
    assert len(sizes) == CYCLES + 1
    assert set(sizes) == {sizes[0]}, sizes


@pytest.mark.parametrize("name", HOLDING + OTHERS)
def test_ten_cycles_of_load_and_save_leave_the_size_to_the_byte(name: str, tmp_path: Path) -> None:
    sizes = _sizes_after_cycles(name, tmp_path, 10, _size)
    assert len(sizes) == 11
    assert set(sizes) == {sizes[0]}, sizes


def _trained(model: nn.Module, dtype: torch.dtype = torch.float32) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("max_shard_size", ["5GB", "1MB"])
def test_a_checkpoint_is_as_large_as_its_tensors(tmp_path: Path, max_shard_size: str) -> None:
    model = nn.Sequential(nn.Linear(512, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 256))
    optimizer = _trained(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, ema=AveragedModel(model))
    # Weights and biases, then the norm's two weights; its two buffers, and the count of its batches in 8 bytes.
    weights = 512 * 1024 + 1024 + 2 * 1024 + 1024 * 256 + 256
    buffers = 4 * 2 * 1024 + 8
    # AdamW has two averages for each weight, and one number for each of the six parameters.
    of_optimizer = 2 * 4 * weights + 6 * 4
    # The average has the weights and the buffers again, and a count.
    of_ema = 4 * weights + buffers + 8
    tensor_bytes = 4 * weights + buffers + of_optimizer + of_ema + RNG_BYTES
    assert tensor_bytes == 12_662_640
    path = CheckpointManager(tmp_path, max_shard_size=max_shard_size).save(1, state)
    assert tensor_bytes - RNG_BYTES <= _size(Path(path)) <= SHARE * tensor_bytes + SLACK_BYTES


def test_small_and_many_tensors_take_little_more_than_their_bytes(tmp_path: Path) -> None:
    """As many tensors as a MiniLM has: 103 parameters, 309 tensors in the optimizer."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(51)], nn.LayerNorm(8, bias=False))
    state = TrainingState(model=model, optimizer=_trained(model))
    weights = 51 * 72 + 8
    tensor_bytes = 4 * weights + 2 * 4 * weights + 103 * 4 + RNG_BYTES
    path = CheckpointManager(tmp_path).save(1, state)
    assert _size(Path(path)) <= SHARE * tensor_bytes + SLACK_BYTES


def test_state_in_the_dtype_of_bf16_parameters_takes_two_bytes(tmp_path: Path) -> None:
    model = nn.Linear(1000, 1000).to(torch.bfloat16)
    state = TrainingState(model=model, optimizer=_trained(model))
    tensor_bytes = 3 * 2 * 1_001_000 + 2 * 4 + RNG_BYTES
    path = CheckpointManager(tmp_path).save(1, state)
    assert _size(Path(path)) <= SHARE * tensor_bytes + SLACK_BYTES


def test_parameters_without_a_gradient_have_no_state_on_disk(tmp_path: Path) -> None:
    model = nn.ModuleDict({"frozen": nn.Linear(1000, 1000), "trained": nn.Linear(10, 10)})
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model["trained"].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    path = CheckpointManager(tmp_path).save(1, TrainingState(model=model, optimizer=optimizer))
    tensor_bytes = 4 * 1_001_000 + 3 * 4 * 110 + 2 * 4 + RNG_BYTES
    assert _size(Path(path)) <= SHARE * tensor_bytes + SLACK_BYTES


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(1000, 500), "head": nn.Linear(500, 1000, bias=False)})
    model["head"].weight = model["embed"].weight
    path = CheckpointManager(tmp_path).save(1, TrainingState(model=model, optimizer=_trained(model)))
    tensor_bytes = 3 * 4 * 500_000 + 4 + RNG_BYTES
    assert _size(Path(path)) <= SHARE * tensor_bytes + SLACK_BYTES


def test_a_callable_that_holds_the_optimizer_adds_nothing(tmp_path: Path) -> None:
    """A pickle of the scheduler would hold the momentum of the whole model."""
    case = CASES["scheduler-lambda-holds-optimizer"]
    model = nn.Sequential(nn.Linear(500, 500), nn.Linear(500, 1))
    assert case.scheduler is not None
    sizes: list[int] = []
    for make in (case.scheduler, lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        state = TrainingState(model=model, optimizer=optimizer, scheduler=make(optimizer))
        sizes.append(_size(Path(CheckpointManager(tmp_path / str(len(sizes))).save(1, state))))
    assert sizes[0] - sizes[1] < 4096
