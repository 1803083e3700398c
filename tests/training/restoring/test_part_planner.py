"""What was loaded is put back when a part refuses, on this rank or on another."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from hfshard.training import CheckpointManager, TrainingState
from hfshard.training.restoring.part_planner import all_or_nothing
from hfshard.training.run_ranks import ALONE


class Pressed:
    """Presses Ctrl-C at one of the lines that the package and torch run within the block, or counts them."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.lines = 0

    def __enter__(self) -> Pressed:
        self._signal = signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        signal.signal(signal.SIGINT, self._signal)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not any(part in frame.f_code.co_filename for part in ("/hfshard/training/", "/torch/optim/", "/torch/nn/")):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                os.kill(os.getpid(), signal.SIGINT)
        return self._trace


def trained(steps: int) -> TrainingState:
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(steps):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    return TrainingState(model=model, optimizer=optimizer, scheduler=scheduler)


def numbers(state: TrainingState) -> list[float]:
    """All that a restore changes."""
    parts: dict[str, Any] = state.components

    def flat(value: Any) -> Iterator[float]:
        if isinstance(value, torch.Tensor):
            yield from value.detach().double().flatten().tolist()
        elif isinstance(value, dict):
            yield from (one for key in sorted(value, key=str) for one in flat(value[key]))
        elif isinstance(value, list | tuple):
            yield from (one for item in value for one in flat(item))
        elif isinstance(value, int | float):
            yield float(value)

    states = [part.state_dict() for part in parts.values()]
    return [*flat(states), *flat(torch.get_rng_state())]


def test_ctrl_c_at_any_line_of_a_restore_leaves_all_as_it_was_or_restores_all(tmp_path: Path) -> None:
    saved = trained(2)
    with CheckpointManager(tmp_path) as manager:
        manager.save(2, saved)
        new = numbers(saved)
        manager.restore(trained(5), 2)  # which fills caches
        state = trained(5)
        with Pressed() as counted:
            manager.restore(state, 2)
        found = []
        for at in sorted(random.Random(1).sample(range(1, counted.lines + 1), 120)):
            state = trained(5)
            old = numbers(state)
            with pytest.raises(KeyboardInterrupt), Pressed(at):
                manager.restore(state, 2)
            found.append({False: "new", True: "old"}[numbers(state) == old])
            assert numbers(state) in (old, new), at
    assert found == sorted(found, reverse=True)  # first none, then all
    assert {*found} == {"new", "old"}


def test_each_part_is_put_back_though_one_refuses_that_too(caplog: pytest.LogCaptureFixture) -> None:
    was_put_back = []

    def refuse() -> None:
        raise ValueError("not for me either")

    undo = [lambda: was_put_back.append("first"), refuse, lambda: was_put_back.append("last")]
    with caplog.at_level(logging.ERROR), pytest.raises(KeyError, match="weights"), all_or_nothing(ALONE, undo):
        raise KeyError("weights")
    assert was_put_back == ["last", "first"]
    assert "can't be put back as it was, and is mixed: not for me either" in caplog.text
