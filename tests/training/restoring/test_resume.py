"""Who restores beside a run that saves and removes finds a whole checkpoint every time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from hfshard.training import CheckpointManager, TrainingState
from tests.sweeps.run_states import Counter

SAVES = 40


@pytest.mark.parametrize("kind", ["rotated", "replaced"])
def test_a_reader_beside_a_run_that_keeps_one_checkpoint_restores_each_time(tmp_path: Path, kind: str) -> None:
    writer, counter = CheckpointManager(tmp_path, max_to_keep=1), Counter()

    def save(number: int) -> None:
        counter.values = {"count": number, "mean": torch.full((2,), float(number))}
        writer.save(number if kind == "rotated" else 1, TrainingState(counter=counter), extra=number)

    def save_on() -> None:
        for number in range(2, SAVES):
            save(number)

    save(1)
    thread = threading.Thread(target=save_on)
    thread.start()
    last, restores = 0, 0
    while thread.is_alive() or restores < 2:
        found = Counter()
        start = CheckpointManager(tmp_path).restore_latest(TrainingState(counter=found))
        assert start is not None
        assert start.extra == found.values["count"] == found.values["mean"][1] >= last
        last, restores = start.extra, restores + 1
        assert [problems for problems in CheckpointManager(tmp_path).verify().values() if problems] == []
    thread.join()
    writer.close()
    assert CheckpointManager(tmp_path).restore_latest(TrainingState(counter=found)) is not None
    assert found.values["count"] == SAVES - 1
