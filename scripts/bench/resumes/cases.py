"""The cases of the comparison of resumes: what the training is like, and what happens to its checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Damage = Callable[[Path], None]
"""What happens to the newest checkpoint, a directory or (torch.save's) a file."""

WAYS = ("torch.save", "Trainer", "Accelerate", "hfshard", "hfshard in Trainer", "hfshard in Accelerate")

MID_EPOCH = {"save_every": 4, "kill_after": 10}
"""Saved after step 4 and 8 (of 6 in an epoch), killed after 10."""
EARLY = {"save_every": 2, "kill_after": 3}
"""Where NAdam's running product is still large enough to matter."""
EPOCH_END = {"save_every": 6, "kill_after": 8}
CYCLES = 10
"""Saves, each after a load, of the case of the growing file."""
FLIPPED = 0b100
"""Of the third byte of a float32: its value changes by a few percent."""


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table."""

    title: str
    training: dict[str, Any] = field(default_factory=dict)
    """Fields of `task.Job`."""
    times: dict[str, int] = field(default_factory=lambda: dict(MID_EPOCH))
    damage: Damage | None = None
    grows: bool = False


def _no_optimizer(newest: Path) -> None:
    if newest.is_file():
        raise NotApplicableError
    for path in newest.glob("optimizer*"):
        path.unlink()


def _flip_in_optimizer(newest: Path) -> None:
    _flip(newest if newest.is_file() else _largest(newest, "optimizer*"))


def _flip_in_weights(newest: Path) -> None:
    _flip(newest if newest.is_file() else _largest(newest, "model*"))


def _partial(newest: Path) -> None:
    """Leave half of the optimizer's file and none after it, as a kill does where files are written one by one."""
    if newest.is_file():
        _halve(newest)
        return
    for path in newest.iterdir():
        if path.name.startswith("optimizer"):
            _halve(path)
        elif not path.name.startswith(("model", "config")):
            path.unlink() if path.is_file() else shutil.rmtree(path)


class NotApplicableError(Exception):
    """The way has no such file."""


def _largest(directory: Path, pattern: str) -> Path:
    return max(directory.glob(pattern), key=lambda path: path.stat().st_size)


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    middle = len(raw) * 3 // 5  # in the tensors of each of the formats, which all begin at multiples of 4
    raw[middle - middle % 4 + 2] ^= FLIPPED
    path.write_bytes(raw)


def _halve(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


IN_ORDER = {"shuffle": False}
"""Where every way is exact but for what the case is about."""

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
    "flip-optimizer": Case("a bit of the optimizer's file is flipped", IN_ORDER, damage=_flip_in_optimizer),
    "flip-weights": Case("a bit of the newest weights is flipped", IN_ORDER, damage=_flip_in_weights),
    "partial": Case("the newest checkpoint is partial", IN_ORDER, damage=_partial),
    "full-disk": Case("the disk is full, and one checkpoint is kept", {"keep_one": True, "full_from": 8, **IN_ORDER}),
}
