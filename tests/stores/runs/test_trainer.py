"""A Trainer whose checkpoints are in a store: saved, resumed on another machine, the best one loaded in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hfshard.errors import CheckpointNotFoundError
from hfshard.training import CheckpointCallback, CheckpointManager
from tests.flows.resume_trainings import Case, everything, trainer
from tests.stores.runs.bucket_run import BucketRun

pytestmark = [pytest.mark.compat, pytest.mark.parametrize("scheme", ["s3"])]

CASE = Case(
    0,
    (),
    {
        "max_steps": 9,
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "metric_for_best_model": "loss",
        "greater_is_better": False,
        "load_best_model_at_end": True,
    },
)


def trained(manager: CheckpointManager, directory: Path, place: Any = None, **arguments: Any) -> Any:
    """A training that has ended."""
    made = trainer(CASE, directory, **arguments)
    CheckpointCallback(manager, blocking=False).attach(made)
    made.train(resume_from_checkpoint=place)
    return made


def manager_of(place: str) -> CheckpointManager:
    return CheckpointManager(place, keep_best="eval_loss", max_to_keep=2)


def test_a_training_is_resumed_on_another_machine(run: BucketRun, tmp_path: Path) -> None:
    here = everything(trained(manager_of(str(tmp_path / "run")), tmp_path / "here"))
    with manager_of(run.root) as manager:
        straight = trained(manager, tmp_path / "straight")
        assert everything(straight) == here
        best = manager.best_step()
        assert straight.state.best_model_checkpoint == manager.path_of(best or 0)
    assert not list((tmp_path / "straight").rglob("*.safetensors"))

    place = f"{run.root}/checkpoint-00000006"
    with manager_of(run.root) as manager:
        resumed = trained(manager, tmp_path / "resumed", place)
    assert everything(resumed) == here
    assert resumed.state.best_model_checkpoint == straight.state.best_model_checkpoint
    assert not list((tmp_path / "resumed").rglob("*.safetensors"))

    with manager_of(run.root) as manager:
        longer = trained(manager, tmp_path / "longer", True, max_steps=10)
    logged = [entry["step"] for entry in longer.state.log_history if "loss" in entry]
    assert logged == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_a_place_without_a_checkpoint_is_named(run: BucketRun, tmp_path: Path) -> None:
    place = f"{run.root}/checkpoint-00000006"
    with pytest.raises(CheckpointNotFoundError, match=f"'{place}' holds no training checkpoint"):
        trained(manager_of(run.root), tmp_path, place)
