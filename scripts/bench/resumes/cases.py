"""Cases of the comparison of resumes: the kind of training, and the damage to its checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

Damage = Callable[[Path], None]
"""Damages the newest checkpoint, a directory or (torch.save's) a file."""

WAYS = ("torch.save", "Trainer", "Accelerate", "hfshard", "hfshard in Trainer", "hfshard in Accelerate")

MID_EPOCH = {"save_every": 4, "kill_after": 10}
"""Saved after step 4 and 8 (of 6 in an epoch), killed after 10."""
EARLY = {"save_every": 2, "kill_after": 3}
"""Early enough that NAdam's running product is still large enough to matter."""
EPOCH_END = {"save_every": 6, "kill_after": 8}
CYCLES = 10
"""Saves, each after a load, of the case of the growing file."""
FLIPPED = 0b100
"""A bit of the third byte of a float32: its value changes by a few percent."""


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table."""

    title: str
    training: dict[str, Any] = field(default_factory=dict)
    """Fields of `task.Job`."""
    times: dict[str, int] = field(default_factory=lambda: dict(MID_EPOCH))
    damage: Damage | None = None
    grows: bool = False


class NotApplicableError(Exception):
    """The way has no such file."""


def _no_optimizer(newest: Path) -> None:
    if newest.is_file():
        raise NotApplicableError
    for path in newest.glob("optimizer*"):
        path.unlink()


def _flip_bit(newest: Path, pattern: str) -> None:
    """Flip a bit in the largest file of a pattern."""
    path = max(newest.glob(pattern), key=lambda path: path.stat().st_size) if newest.is_dir() else newest
    raw = bytearray(path.read_bytes())
    middle = len(raw) * 3 // 5  # in the tensors of each of the formats, which all begin at multiples of 4
    raw[middle - middle % 4 + 2] ^= FLIPPED
    path.write_bytes(raw)


def _partial(newest: Path) -> None:
    """Leave half of the optimizer's file and none after it, as a kill does where files are written one by one."""
    for path in [newest] if newest.is_file() else list(newest.iterdir()):
        if path == newest or path.name.startswith("optimizer"):
            os.truncate(path, path.stat().st_size // 2)
        elif not path.name.startswith(("model", "config")):
            path.unlink() if path.is_file() else shutil.rmtree(path)


IN_ORDER = {"shuffle": False}
"""Every way is exact then, but for what the case is about."""

CASES = {
    "in-order": Case("data in order, saved in mid-epoch", IN_ORDER),
    "shuffle": Case("data shuffled, saved at the end of an epoch", times=EPOCH_END),
    "mid-epoch": Case("data shuffled, saved in mid-epoch"),
    "dropout": Case("dropout, data in order", {"dropout": 0.2, **IN_ORDER}),
    "augmentation": Case("augmentation by Python's, numpy's and torch's RNG", {"augment": True}),
    "workers": Case("the same in 2 workers", {"augment": True, "workers": 2}),
    "nadam": Case("NAdam, bfloat16 parameters", {"nadam_bf16": True, **IN_ORDER}, EARLY),
    "reordered": Case("parameters in another order after the restart", {"reordered": True, **IN_ORDER}),
    "user-schedule": Case("a scheduler that holds its own method; size after 10 saves", IN_ORDER, grows=True),
    "no-optimizer": Case("the optimizer's file is missing", IN_ORDER, damage=_no_optimizer),
    "flip-optimizer": Case(
        "a bit of the optimizer's file is flipped", IN_ORDER, damage=partial(_flip_bit, pattern="optimizer*")
    ),
    "flip-weights": Case(
        "a bit of the newest weights is flipped", IN_ORDER, damage=partial(_flip_bit, pattern="model*")
    ),
    "partial": Case("the newest checkpoint is partial", IN_ORDER, damage=_partial),
    "full-disk": Case("the disk is full, and one checkpoint is kept", {"keep_one": True, "full_from": 8, **IN_ORDER}),
}
