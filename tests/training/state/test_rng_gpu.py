"""Training checkpoints on a GPU: its random state, optimizers that keep their state there, page-locked copies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hfshard.training import CheckpointManager, TrainingState, enable_gradient_checkpointing
from hfshard.training.state.rng import rng_state, set_rng_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT RUN: this machine has no CUDA device"),
]

STEPS, SAVED_AT = 8, 4


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def capturable(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01, device="cuda"), capturable=True)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)


def build(seed: int, make: Callable[[nn.Module], torch.optim.Optimizer], dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.BatchNorm1d(64), nn.Linear(64, 8)).to("cuda", dtype)
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": torch.amp.GradScaler("cuda")}


def step(run: dict[str, Any]) -> float:
    inputs = torch.randn(16, 64, device="cuda", dtype=next(run["model"].parameters()).dtype)
    with torch.autocast("cuda", torch.bfloat16):
        loss = run["model"](inputs).float().square().mean()
    run["scaler"].scale(loss).backward()
    run["scaler"].step(run["optimizer"])
    run["scaler"].update()
    run["optimizer"].zero_grad()
    run["scheduler"].step()
    return float(loss.detach())


def same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, torch.Tensor):
        return mine.dtype == theirs.dtype and mine.device == theirs.device and torch.equal(mine, theirs)
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(same(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, list | tuple):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    return bool(mine == theirs)


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("make", [adamw, fused, capturable, momentum])
def test_a_resume_is_exact(tmp_path: Path, make: Callable[..., Any], blocking: bool) -> None:
    run = build(0, make, torch.float32)
    losses = []
    with CheckpointManager(tmp_path) as manager:
        for number in range(1, STEPS + 1):
            losses.append(step(run))
            if number == SAVED_AT:
                manager.save(number, TrainingState(**run), blocking=blocking)
    again = build(9, make, torch.float32)
    step(again)
    assert CheckpointManager(tmp_path).restore_latest(TrainingState(**again)) == SAVED_AT
    assert [step(again) for _ in range(SAVED_AT, STEPS)] == losses[SAVED_AT:]
    for name in run:
        assert same(run[name].state_dict(), again[name].state_dict()), name


def test_an_optimizer_of_bfloat16_parameters_keeps_its_dtypes(tmp_path: Path) -> None:
    run, again = (build(seed, lambda model: torch.optim.NAdam(model.parameters()), torch.bfloat16) for seed in (0, 1))
    for one in (run, again):
        one.pop("scaler"), one.pop("scheduler")
        one["model"](torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)).sum().backward()
        one["optimizer"].step()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainingState(**run))
        manager.restore_latest(TrainingState(**again))
    assert same(run["optimizer"].state_dict(), again["optimizer"].state_dict())


def test_the_state_is_that_of_the_call_though_the_gpu_goes_on(tmp_path: Path) -> None:
    model = nn.Linear(4096, 4096, bias=False, device="cuda")
    with torch.no_grad(), CheckpointManager(tmp_path) as manager:
        model.weight.fill_(1.0)
        manager.save(1, TrainingState(model=model), blocking=False)
        for _ in range(50):
            model.weight.add_(1.0)
        manager.wait_until_finished()
        manager.restore_latest(TrainingState(model=model))
    assert bool((model.weight == 1.0).all())


def test_gradient_checkpointing_takes_less_memory_and_changes_no_gradient() -> None:
    peaks, gradients = [], []
    for is_on in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(512, 512), nn.Dropout(0.1), nn.GELU(), nn.Linear(512, 512), nn.GELU())
                for _ in range(16)
            )
        ).cuda()
        if is_on:
            enable_gradient_checkpointing(model)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(torch.ones(8192, 512, device="cuda")).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        gradients.append([one.grad for one in model.parameters()])
    assert same(gradients[0], gradients[1])
    assert peaks[1] < 0.5 * peaks[0]


def test_a_rank_that_had_another_device_goes_on_with_the_numbers_of_its_own() -> None:
    """As where two machines became one: what was the second device of one is the only one here."""
    torch.rand(3, device="cuda")
    state = rng_state()
    expected = torch.rand(3, device="cuda")
    [own] = state["cuda"]
    set_rng_state({**state, "cuda": [torch.cuda.get_rng_state(), own], "current_devices": {"cuda": 1}})
    assert torch.equal(torch.rand(3, device="cuda"), expected)
