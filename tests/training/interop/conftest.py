"""Checkpoints of Trainer, and an Accelerate that remembers nothing, for the tests of this folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hfshard.training import CheckpointManager
from tests.training.interop.accelerate_runs import forget_accelerate
from tests.training.interop.trainer_runs import SAVED_AT, new_trainer


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What Accelerate keeps in its classes is gone after each test."""
    yield
    forget_accelerate()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint amid the second epoch."""
    place = tmp_path_factory.mktemp("trainer")
    new_trainer(place).train()
    return place / "run" / f"checkpoint-{SAVED_AT}"


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoilt."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoint-9"))


@pytest.fixture
def manager(tmp_path: Path) -> CheckpointManager:
    """Of a run that has no checkpoint yet."""
    return CheckpointManager(tmp_path / "run")
