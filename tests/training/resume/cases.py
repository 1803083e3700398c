"""The table of runs that must resume exactly: every optimizer, every scheduler, and what else a run may have."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from hfshard.training import enable_gradient_checkpointing
from tests.training import ingredients
from tests.training.resume import companions, optimizers, schedulers
from tests.training.resume.runs import Case


def _checkpointed(make: Any) -> nn.Module:
    model: nn.Module = make()
    enable_gradient_checkpointing(model)
    return model


def _checkpointed_dropout() -> nn.Module:
    model = ingredients.with_dropout()
    enable_gradient_checkpointing(model, ["0", "2"])
    return model


def _augmented(source: str, workers: int, **loader: Any) -> dict[str, Any]:
    return {"data": partial(ingredients.Augmented, source), "loader": {"num_workers": workers, **loader}}


_PERSISTENT = {"persistent_workers": True, "prefetch_factor": 2}
_SCALED = {"autocast": True, "scaler": True}
_LLAMA = {"data": ingredients.Tokens, "loss": ingredients.causal_lm}

LOOP: dict[str, dict[str, Any]] = {
    "in-order": {"loader": {"shuffle": False}},
    "no-loader": {"data": None},
    "other-loader": {"own_loader": companions.Stateful},
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
    "gradient-checkpointing": {"model": _checkpointed_dropout},
    "llama": {"model": ingredients.llama, **_LLAMA, "compat": True},
    "llama-gradient-checkpointing": {"model": partial(_checkpointed, ingredients.llama), **_LLAMA},
    "tied": {"model": ingredients.Tied, "data": ingredients.Tokens, "loss": ingredients.next_token},
    "frozen": {"model": ingredients.frozen},
    "frozen-not-in-optimizer": {"model": ingredients.frozen, "optimizer": optimizers.only_trainable},
    "unused": {"model": ingredients.Unused},
    "alternating-gradients": {"model": ingredients.Alternating},
    "extra-state": {"model": ingredients.Remembering},
    "child-called-module": {"model": ingredients.Honest},
    "ema": {"extras": companions.ema},
    "ema-batch-norm-buffers": {"model": ingredients.with_batch_norm, "extras": companions.ema_with_buffers},
    "ema-of-the-user": {"extras": companions.shadow},
    "stateful-diary": {"extras": companions.diary},
    "generators-of-the-user": {"extras": companions.generators},
    "rotated-to-one": {"manager": {"max_to_keep": 1}, "save_every": 1},
    "rotated-to-one-frozen": {"manager": {"max_to_keep": 1}, "save_every": 1, "model": ingredients.frozen},
    "sharded": {"manager": {"max_shard_size": "8KB", "max_to_keep": 2, "checksum": "sha256"}, "extras": companions.ema},
    "killed-while-saving": {"kill": (5, "saving"), "save_every": 1},
    "killed-while-saving-rotated": {
        "kill": (7, "saving"), "save_every": 1, "manager": {"max_to_keep": 1}, "extras": companions.everything,
    },
    "killed-while-saving-async": {
        "kill": (6, "saving"), "save_every": 1, "manager": {"max_to_keep": 1}, "blocking": False,
    },
    "async": {"blocking": False, "save_every": 1},
    "async-every-2-killed-after-save": {"blocking": False, "save_every": 2, "kill": (8, "saved")},
    "async-everything": {
        "blocking": False, "save_every": 1, "model": ingredients.with_dropout, "extras": companions.everything,
        **_augmented("all", 2),
        "scheduler": schedulers.TORCH["cyclic-callable"].make, "optimizer": optimizers.two_groups,
    },
    "everything": {
        "save_every": 1, **_augmented("all", 2, **_PERSISTENT), **_SCALED,
        "model": ingredients.with_batch_norm, "extras": companions.everything,
        "scheduler": schedulers.TORCH["sequential-stateful"].make, "optimizer": optimizers.two_groups, "accumulate": 2,
    },
}  # fmt: skip
"""What is neither optimizer nor scheduler."""


def _of_schedulers() -> dict[str, dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {}
    for name, kind in schedulers.ALL.items():
        options = {"optimizer": optimizers.two_groups, **kind.options}
        made[f"scheduler-{name}"] = {"scheduler": kind.make, "scheduler_takes_loss": kind.takes_loss, **options}
    adafactor = {
        "optimizer": optimizers.hf_adafactor(),
        "scheduler": schedulers.of_transformers("get_adafactor_schedule"),
    }
    tensor_lr = optimizers.ALL["adamw-tensor-lr"]["optimizer"]
    made["scheduler-hf-adafactor"] = adafactor
    for name in ("cosine", "lambda-callable", "multi-step"):
        made[f"scheduler-{name}-tensor-lr"] = {"optimizer": tensor_lr, "scheduler": schedulers.TORCH[name].make}
    return made


def _table() -> dict[str, Case]:
    rows = {f"optimizer-{name}": options for name, options in optimizers.ALL.items()} | _of_schedulers() | LOOP
    return {name: Case(name=name, **options) for name, options in rows.items()}


CASES = _table()

REPEATED = frozenset(
    {
        *(f"optimizer-{name}" for name in (
            "sgd-momentum", "sgd-fused", "adam-amsgrad", "adamw-foreach", "adamw-fused", "adamw-channels-last", "nadam",
            "asgd", "radam", "adamax", "adafactor", "hf-adafactor", "rmsprop", "lbfgs", "muon",
        )),
        *(f"scheduler-{name}" for name in (
            "lambda-function", "lambda-lambda", "multiplicative", "exponential", "cyclic-triangular",
            "cyclic-function", "cyclic-lambda", "one-cycle-linear", "one-cycle-three-phases", "plateau-max",
            "sequential", "swa", "hf-constant-warmup", "hf-cosine", "hf-cosine-restarts", "hf-inverse-sqrt",
            "hf-cosine-min-lr", "hf-wsd-1-sqrt", "multi-step-tensor-lr",
        )),
        "end-of-second-epoch-batch", "first-batch-of-epoch", "saved-every-step", "saved-every-4-batch", "2-workers",
        "2-workers-persistent", "augmented-python-2-workers", "augmented-numpy-2-workers", "augmented-torch-2-workers",
        "augmented-in-the-loop-later", "dropout", "accumulate-2", "autocast-bf16", "scaler-accumulate", "frozen", "ema",
        "llama-gradient-checkpointing", "rotated-to-one", "async",
    }
)  # fmt: skip
"""Cases of which each thing is in another one, too: its class, its kind of state, its way to save."""
