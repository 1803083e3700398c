"""Checkpoints of runs in stores, pushed to a hub, and restored from an address."""

from __future__ import annotations

from pathlib import Path

import pytest

import hfshard
from hfshard.errors import CheckpointNotFoundError, IntegrityError
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.training import CheckpointManager, TrainingState
from tests.stores.runs.bucket_run import BucketRun, Net, save_steps

pytestmark = pytest.mark.parametrize("scheme", ["s3"])


def test_checkpoints_are_pushed_to_a_hub(run: BucketRun, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    with CheckpointManager(run.root) as manager:
        save_steps(manager, 1, 2)
        assert len(manager.push(hub, "all")) == 2
    with CheckpointManager(run.root, push_to_hub=hub) as manager:
        save_steps(manager, 3)

    messages = {one.message for one in DirectoryHub.open(hub).revisions()}
    assert messages == {"Checkpoint at step 1", "Checkpoint at step 2", "Checkpoint at step 3"}
    net = Net()
    assert CheckpointManager(tmp_path / "other").restore(TrainingState(model=net), hub) == 3
    assert net.value() == 3.0


def test_what_is_damaged_is_not_pushed(run: BucketRun, tmp_path: Path) -> None:
    with CheckpointManager(run.root) as manager:
        save_steps(manager, 1)
        name = next(name for name in run.names() if "/model-" in name)
        raw = bytearray(run.read(name))
        raw[-1] ^= 1
        run.put(name, bytes(raw))
        with pytest.raises(IntegrityError, match=f"{run.root}/{name}"):
            manager.push(tmp_path / "hub")
    assert not (tmp_path / "hub").exists()


def test_a_checkpoint_is_restored_and_loaded_by_its_address(run: BucketRun, tmp_path: Path) -> None:
    with CheckpointManager(run.root) as manager:
        save_steps(manager, 1, 2)
    local = CheckpointManager(tmp_path)
    net = Net()
    restored = local.restore(TrainingState(model=net), f"{run.root}/checkpoint-00000001")
    assert (restored, restored.path, net.value()) == (1, f"{run.root}/checkpoint-00000001", 1.0)

    hfshard.load_model(net, manager.path_of(2))
    assert net.value() == 2.0

    with pytest.raises(CheckpointNotFoundError, match=r"It is a run\. Pass one of its checkpoints"):
        local.restore(TrainingState(model=net), run.root)
    with pytest.raises(CheckpointNotFoundError, match="has: 2, 1"):
        manager.restore(TrainingState(model=net), 7)
    assert CheckpointManager(f"{run.root}/empty").restore_latest(TrainingState(model=net)) is None
