"""Whole checkpoints, runs and hubs, whose files are changed one at a time."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn

import hfshard
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.training import CheckpointManager, TrainingState
from tests.attacks.files import bases, raw
from tests.attacks.target import truth
from tests.foreign import like_deepspeed
from tests.foreign.dcp_files import halves, save_dcp
from tests.golden.cases import CASES
from tests.golden.cases import HERE as GOLDEN

WEIGHTS = ("structure", "full", "pread", "verify", "some")
RUN = ("restore", "run-verify", "run-load")
HUB = ("hub-load", "hub-pull", "hub-revisions")
PARTS = ("parts", "parts-full", "parts-verify", "parts-convert")
TRAINING_STEP = 7
OLD_RUN = "old.pt"


@dataclass(frozen=True, slots=True)
class Base:
    """A directory to damage, and the ways to read it."""

    name: str
    files: raw.Files
    readers: tuple[str, ...] = WEIGHTS
    truth: dict[str, torch.Tensor] = field(default_factory=dict)
    """What `verify="full"` must give where it gives anything; empty where there are no checksums."""
    original: dict[str, torch.Tensor] = field(default_factory=dict)
    """What stood in the files before they were changed: always right."""
    sealed: bool = False
    """Put right the checksums over what was changed, as a stranger would who made the files."""

    @property
    def targets(self) -> list[str]:
        """The files that are changed."""
        return sorted(name for name, content in self.files.items() if content and "lock" not in name)


class Counter:
    """A part of a run of no known kind."""

    def __init__(self) -> None:
        self.state = {"count": 3, "mean": torch.tensor([0.5, 1.5]), "names": ("a", {1: None})}

    def state_dict(self) -> dict[str, object]:
        """What is saved."""
        return dict(self.state)

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take what was saved; an object takes anything."""
        self.state = dict(state)


def training_state(value: float = 0.0) -> TrainingState:
    """A small run."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if value:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return TrainingState(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2), counter=Counter())


def _made(make: Callable[[Path], object]) -> raw.Files:
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        return raw.files_in(Path(folder))


def _run(folder: Path) -> None:
    with CheckpointManager(folder, progress=False) as manager:
        manager.save(TRAINING_STEP, training_state(1.0), metric={"loss": 0.5}, extra={"note": [1, "x", None]})


def _old_run(folder: Path, *, is_zip: bool) -> None:
    """What another program has saved, with an object that is more than data."""
    state = {name: part.state_dict() for name, part in training_state(1.0).components.items()}
    value = {**state, "step": TRAINING_STEP, "object": slice(1), "names": (Counter, OrderedDict)}
    torch.save(value, folder / OLD_RUN, _use_new_zipfile_serialization=is_zip)


def _zero(folder: Path, stage: int) -> None:
    """What DeepSpeed has saved on two ranks."""
    like_deepspeed.write(folder, like_deepspeed.contents(stage, 2))


def _dcp(folder: Path) -> None:
    """What torch.distributed.checkpoint has saved: in rows, in columns and at once, and an optimizer's state."""
    tensors = truth()
    chunks = {f"model.{name}": halves(one.shape, one.dim() - 1) for name, one in tensors.items() if "head" not in name}
    state = {f"model.{name}": one for name, one in tensors.items()}
    save_dcp(folder, {**state, "optimizer.step": 3}, chunks)


def _hub(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as source:
        raw.write(Path(source), bases.ours_sharded())
        hub = DirectoryHub.create(folder)
        hfshard.push_checkpoint(source, folder, progress=False)
        hub.tag("v1", "main")


def all_bases() -> dict[str, Base]:
    """Every base by name."""
    tensors = truth()
    run, hub = _made(_run), _made(_hub)
    found = [
        Base("ours-sharded", bases.ours_sharded(), truth=tensors),
        Base("ours-single", bases.ours_single(), truth=tensors),
        Base("stock-sharded", raw.stock_sharded(), original=tensors),
        Base("stock-single", raw.stock_single(), original=tensors),
        Base("bin-zip", bases.stock_bin(), original=tensors),
        Base("bin-legacy", bases.stock_bin(legacy=True), original=tensors),
        Base("bin-sharded", bases.stock_bin_sharded(), original=tensors),
        Base("run", run, RUN),
        Base("run-sealed", run, RUN, sealed=True),
        Base("old-run", _made(partial(_old_run, is_zip=True)), ("restore-old",)),
        Base("old-run-legacy", _made(partial(_old_run, is_zip=False)), ("restore-old",)),
        *(Base(f"zero-{stage}", _made(partial(_zero, stage=stage)), PARTS) for stage in (1, 3)),
        Base("dcp", _made(_dcp), PARTS),
        Base("hub", hub, HUB, truth=tensors),
        Base("hub-sealed", hub, HUB, sealed=True),
    ]
    found += [Base(f"golden-{name}", raw.files_in(GOLDEN / name)) for name in CASES]
    return {base.name: base for base in found}
