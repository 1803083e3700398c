"""The table of runs that must resume exactly: every optimizer, every scheduler, and what else a run may have."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hfshard.training import CheckpointManager, TrainingState, enable_gradient_checkpointing
from tests.flows import resume_optimizers as optimizers
from tests.flows import resume_runs as runs
from tests.flows import resume_schedulers as schedulers
from tests.flows.resume_runs import STEPS, Case, Run
from tests.training import ingredients


def _checkpointed(make: Callable[[], nn.Module], modules: list[str] | None = None) -> nn.Module:
    model = make()
    enable_gradient_checkpointing(model, modules)
    return model


def _augmented(source: str, workers: int, **loader: Any) -> dict[str, Any]:
    return {"data": partial(ingredients.Augmented, source), "loader": {"num_workers": workers, **loader}}


_EMA = {"ema": runs.ema}
_EVERYTHING = {"ema": runs.ema, "shadow": runs.Shadow, "diary": runs.Diary}
_PERSISTENT = {"persistent_workers": True, "prefetch_factor": 2}
_SCALED = {"autocast": True, "scaler": True}
_LLAMA = {"data": ingredients.Tokens, "loss": ingredients.causal_lm}

LOOP: dict[str, dict[str, Any]] = {
    "in-order": {"loader": {"shuffle": False}},
    "no-loader": {"data": None},
    "other-loader": {"own_loader": runs.Stateful},
    "drop-last": {"loader": {"batch_size": 3, "drop_last": True}},
    "ragged-last-batch": {"loader": {"batch_size": 3}},
    "mid-epoch": {"kill": (8, "backward"), "save_every": 1, "compat": True},
    "end-of-epoch-batch": {"kill": (6, "batch"), "save_every": 5},
    "end-of-second-epoch-batch": {"kill": (11, "optimizer"), "save_every": 10},
    "first-batch-of-epoch": {"kill": (7, "optimizer"), "save_every": 6},
    "saved-at-epoch-ends": {"kill": (8, "scheduler"), "save_at": "epoch"},
    "saved-at-epoch-ends-2-workers": {"kill": (7, "scheduler"), "save_at": "epoch", **_augmented("all", 2)},
    "saved-every-step": {"save_every": 1},
    "saved-every-4-batch": {"save_every": 4, "kill": (7, "batch")},
    "killed-right-after-save": {"kill": (6, "saved"), "save_every": 3},
    "epoch-scheduler": {"scheduler": schedulers.TORCH["exponential"].make, "scheduler_steps": "epoch"},
    "epoch-scheduler-boundary": {
        "scheduler": schedulers.TORCH["exponential"].make, "scheduler_steps": "epoch", "kill": (5, "batch"),
        "save_every": 5,
    },
    "2-workers": {"loader": {"num_workers": 2}},
    "2-workers-persistent": {"loader": {"num_workers": 2, **_PERSISTENT}},
    "2-workers-boundary": {"loader": {"num_workers": 2}, "kill": (6, "batch"), "save_every": 5},
    "augmented-python": _augmented("python", 0),
    "augmented-numpy": _augmented("numpy", 0),
    "augmented-torch": _augmented("torch", 0),
    "augmented-python-2-workers": _augmented("python", 2),
    "augmented-numpy-2-workers": _augmented("numpy", 2),
    "augmented-torch-2-workers": _augmented("torch", 2),
    "augmented-all-persistent": {**_augmented("all", 2, **_PERSISTENT)},
    "augmented-all-1-worker": {**_augmented("all", 1), "save_every": 2},
    # After an odd number of steps, when Python and numpy each keep the second number of a pair.
    "augmented-in-the-loop": {"loss": ingredients.mixed_up, "kill": (5, "backward"), "save_every": 5},
    "augmented-in-the-loop-later": {"loss": ingredients.mixed_up, "kill": (8, "scheduler"), "save_every": 4},
    "dropout": {"model": ingredients.with_dropout},
    "dropout-2-workers-augmented": {
        "model": ingredients.with_dropout, "fresh": True, "save_every": 1, **_augmented("all", 2),
    },
    "batch-norm": {"model": ingredients.with_batch_norm},
    "spectral-norm": {"model": ingredients.with_spectral_norm},
    "accumulate-2": {"accumulate": 2},
    "accumulate-3-boundary": {
        "accumulate": 3, "model": ingredients.with_dropout, "kill": (6, "backward"), "save_every": 3,
    },
    "autocast-bf16": {"autocast": True},
    "autocast-scaler": {**_SCALED},
    "scaler-skips-steps": {**_SCALED, "loss": ingredients.overflowing},
    "scaler-accumulate": {**_SCALED, "accumulate": 2, "loss": ingredients.overflowing},
    "gradient-checkpointing": {"model": partial(_checkpointed, ingredients.with_dropout, ["0", "2"])},
    "llama": {"model": ingredients.llama, **_LLAMA, "compat": True},
    "llama-gradient-checkpointing": {"model": partial(_checkpointed, ingredients.llama), **_LLAMA},
    "tied": {"model": ingredients.Tied, "data": ingredients.Tokens, "loss": ingredients.next_token},
    "frozen": {"model": ingredients.frozen},
    "frozen-not-in-optimizer": {"model": ingredients.frozen, "optimizer": optimizers.only_trainable},
    "unused": {"model": ingredients.Unused},
    "alternating-gradients": {"model": ingredients.Alternating},
    "extra-state": {"model": ingredients.Remembering},
    "child-called-module": {"model": ingredients.Honest},
    "ema": {"extras": _EMA},
    "ema-batch-norm-buffers": {
        "model": ingredients.with_batch_norm, "extras": {"ema": partial(runs.ema, use_buffers=True)},
    },
    "ema-of-the-user": {"extras": {"shadow": runs.Shadow}},
    "stateful-diary": {"extras": {"diary": runs.Diary}},
    "generators-of-the-user": {"extras": {"generators": runs.Generators}},
    "rotated-to-one": {"manager": {"max_to_keep": 1}, "save_every": 1},
    "rotated-to-one-frozen": {"manager": {"max_to_keep": 1}, "save_every": 1, "model": ingredients.frozen},
    "sharded": {"manager": {"max_shard_size": "8KB", "max_to_keep": 2, "checksum": "sha256"}, "extras": _EMA},
    "killed-while-saving": {"kill": (5, "saving"), "save_every": 1},
    "killed-while-saving-rotated": {
        "kill": (7, "saving"), "save_every": 1, "manager": {"max_to_keep": 1}, "extras": _EVERYTHING,
    },
    "killed-while-saving-async": {
        "kill": (6, "saving"), "save_every": 1, "manager": {"max_to_keep": 1}, "blocking": False,
    },
    "async": {"blocking": False, "save_every": 1},
    "async-every-2-killed-after-save": {"blocking": False, "save_every": 2, "kill": (8, "saved")},
    "async-everything": {
        "blocking": False, "save_every": 1, "model": ingredients.with_dropout, "extras": _EVERYTHING,
        **_augmented("all", 2),
        "scheduler": schedulers.TORCH["cyclic-callable"].make, "optimizer": optimizers.two_groups,
    },
    "everything": {
        "save_every": 1, **_augmented("all", 2, **_PERSISTENT), **_SCALED,
        "model": ingredients.with_batch_norm, "extras": _EVERYTHING,
        "scheduler": schedulers.TORCH["sequential-stateful"].make, "optimizer": optimizers.two_groups, "accumulate": 2,
    },
}  # fmt: skip
"""What is neither optimizer nor scheduler."""


def _scheduled(kind: schedulers.Kind) -> dict[str, Any]:
    made = {"scheduler": kind.make, "scheduler_takes_loss": kind.takes_loss}
    return {"optimizer": optimizers.two_groups, **made, **kind.options}


_TENSOR_LR = optimizers.ALL["adamw-tensor-lr"]
_ROWS: dict[str, dict[str, Any]] = {
    **{f"optimizer-{name}": options for name, options in optimizers.ALL.items()},
    **{f"scheduler-{name}": _scheduled(kind) for name, kind in schedulers.ALL.items()},
    "scheduler-hf-adafactor": {
        "optimizer": optimizers.hf_adafactor(), "scheduler": schedulers.of_transformers("get_adafactor_schedule"),
    },
    **{
        f"scheduler-{name}-tensor-lr": {**_TENSOR_LR, "scheduler": schedulers.TORCH[name].make}
        for name in ("cosine", "lambda-callable", "multi-step")
    },
    **LOOP,
}  # fmt: skip
CASES = {name: Case(name=name, **options) for name, options in _ROWS.items()}

REPEATED = frozenset(
    {
        *(f"optimizer-{name}" for name in (
            "sgd-momentum", "sgd-fused", "sgd-bf16", "sgd-dampening-maximize", "adam-amsgrad", "adamw-foreach",
            "adamw-fused", "adamw-channels-last", "nadam",
            "asgd", "radam", "adamax", "adafactor", "hf-adafactor", "rmsprop", "lbfgs", "muon",
        )),
        *(f"scheduler-{name}" for name in (
            "lambda-function", "lambda-lambda", "multiplicative", "exponential", "cyclic-triangular",
            "cyclic-function", "cyclic-lambda", "one-cycle-linear", "one-cycle-three-phases", "plateau-max",
            "sequential", "swa", "hf-constant-warmup", "hf-cosine", "hf-cosine-restarts", "hf-inverse-sqrt",
            "hf-cosine-min-lr", "hf-wsd-1-sqrt", "multi-step-tensor-lr", "cosine-tensor-lr",
            "cyclic-exp-range", "hf-constant", "hf-linear", "hf-polynomial", "one-cycle-linear-three-phases",
        )),
        "end-of-second-epoch-batch", "first-batch-of-epoch", "saved-every-step", "saved-every-4-batch", "2-workers",
        "2-workers-persistent", "augmented-python-2-workers", "augmented-numpy-2-workers", "augmented-torch-2-workers",
        "augmented-in-the-loop-later", "dropout", "accumulate-2", "autocast-bf16", "scaler-accumulate", "frozen", "ema",
        "llama-gradient-checkpointing", "rotated-to-one", "async",
    }
)  # fmt: skip
"""Cases of which each thing is in another one, too: its class, its kind of state, its way to save."""


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


def run_plain(name: str, role: str, root: Path, store: str = "hfshard") -> None:
    """One role of a case, by a loop of one's own; `run` holds the checkpoints.

    "straight" never saves, "saving" does, "killed" saves and does not come back, "resumed" goes on from the newest; so
    does "killed again", and is; "rolled back" returns to an older one without an end.
    """
    case = CASES[name]
    warnings.simplefilter("error")
    for message in _NOT_OURS:
        warnings.filterwarnings("ignore", message=message)
    torch.set_num_threads(1)
    as_state: Callable[..., Any] = TrainingState if store == "hfshard" else dict
    run = Run(case, seed=case.seed + OTHER_SEED * (role == "resumed"), as_state=as_state)
    restored: int | None = None
    if role == "straight":
        run.train()
    else:
        manager: Any = (CheckpointManager if store == "hfshard" else runs.TorchSave)(root / "run", **case.manager)
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
                threading.Event().wait(runs.LATEST_SECONDS)  # for a kill in the last save
            raise AssertionError(f"nobody killed it at {death}")
    runs.report(root, role, restored, run.steps, run.everything())
    run.close()
