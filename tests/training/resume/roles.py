"""What a process is told to do: runs of a case, straight, killed or resumed, and a report of each."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hfshard.training import CheckpointManager, TrainingState
from tests.training.resume.cases import CASES
from tests.training.resume.runs import LATEST_SECONDS, STEPS, Manager, Run
from tests.training.resume.torch_save import TorchSave

FURTHEST = 9
"""The step that a run reaches before it returns to an older one."""
OTHER_SEED = 1000
"""A resumed run begins with other weights and other random numbers, so that all of them come from the checkpoint."""
_NOT_OURS = (
    # Of Python 3.12 and later: a DataLoader's workers are forked beside the thread of an async save.
    ".*use of fork\\(\\) may lead to deadlocks.*",
    # torch, about its own sparse gradients.
    "Sparse invariant checks are implicitly disabled.*",
    # torch, of a run whose first act after a restore is to end an epoch, and so to step the scheduler.
    "Detected call of `lr_scheduler.step\\(\\)` before.*",
)
"""Warnings that a run may give; every other one is an error."""

STORES: dict[str, tuple[Callable[..., Manager], Callable[..., Any]]] = {
    "hfshard": (CheckpointManager, TrainingState),
    "torch.save": (TorchSave, dict),
}
"""Name -> what opens the store of a directory, and what makes a state of named objects."""


def run_roles(name: str, roles: Sequence[str], root: Path, store: str = "hfshard") -> None:
    """Do some of the runs of a case, in this process, and leave a report of each in `root`.

    Args:
        name: Of the case.
        roles: "straight" never saves, "saving" does, "killed" saves and does not come back, "resumed" goes on from the
            newest; so does "killed again", and is; "rolled back" returns to an older one without an end.
        root: Of the case: `run` holds the checkpoints, `<role>.json` is the report.
        store: A key of `STORES`.
    """
    for role in roles:
        _run_role(name, role, root, store)


def _run_role(name: str, role: str, root: Path, store: str) -> None:
    case = CASES[name]
    warnings.simplefilter("error")
    for message in _NOT_OURS:
        warnings.filterwarnings("ignore", message=message)
    torch.set_num_threads(1)
    open_store, as_state = STORES[store]
    run = Run(case, seed=case.seed + OTHER_SEED * (role == "resumed"), as_state=as_state)
    restored: int | None = None
    if role == "straight":
        run.train()
    else:
        manager = open_store(root / "run", **case.manager)
        if role in ("killed again", "resumed"):
            restored = run.resume(manager)
        if role == "rolled back":
            run.train(FURTHEST, manager=manager)
            restored = run.roll_back(manager, case.back)
        death = {"killed": case.death, "killed again": (STEPS - 1, case.death[1])}.get(role)
        run.train(manager=manager, kill=death)
        manager.close()
        if death is not None:
            if death[1] == "saving":
                threading.Event().wait(LATEST_SECONDS)  # for a kill in the last save
            raise AssertionError(f"nobody killed it at {death}")
    report = {"restored": restored, "steps": run.steps, "everything": run.everything()}
    (root / f"{role}.json").write_text(json.dumps(report))
    run.close()
