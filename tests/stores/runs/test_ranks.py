"""Runs in stores that are saved by several ranks: each sends its own files, and restores its own parts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hfshard.errors import HfshardError
from hfshard.training import CheckpointManager, TrainingState
from tests.distributed.gloo import check_ranks
from tests.servers.stores import running
from tests.servers.stores.kinds import SERVICES
from tests.stores.runs.bucket_run import BucketRun, Net
from tests.training.models import Run
from tests.training.test_spread_save_on_ranks import Refusing
from tests.training.test_spread_save_runs_on_ranks import assert_same


def save_and_restore(rank: int, root: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    run = Run("fsdp")
    with CheckpointManager(f"{root}/parts", max_to_keep=2) as manager:
        for step in (1, 2, 3):
            run.train(1)
            manager.save(step, run.state, blocking=step != 2)
        with pytest.raises(HfshardError):
            manager.save(4, TrainingState(model=run.net, other=Refusing(stores=rank == 0)))
        assert manager.all_steps() == [2, 3]
        again = Run("fsdp")
        assert manager.restore_latest(again.state) == 3
        assert_same(again.local(), run.local())

    net = Net(7.0)
    with CheckpointManager(f"{root}/copies") as manager:
        manager.save(1, TrainingState(model=net))
        net.fill(0.0)
        assert manager.restore_latest(TrainingState(model=net)) == 1
    assert net.value() == 7.0


@pytest.mark.parametrize("scheme", ["s3"])
def test_ranks_send_their_files_and_restore_their_parts(scheme: str, run: BucketRun, tmp_path: Path) -> None:
    environment = dict(SERVICES[scheme].environment(running.url_of(scheme)))
    check_ranks(tmp_path / "ranks", 2, save_and_restore, run.root, environment)

    parts = BucketRun(run.bucket, f"{run.root}/parts")
    assert parts.folders() == ["checkpoint-00000002", "checkpoint-00000003"]
    assert parts.litter() == []
    assert CheckpointManager(parts.synced(tmp_path / "local")).verify() == {2: [], 3: []}
