"""Two managers that save into one run, and a reader beside one: one of them wins, and what is read is of one save."""

from __future__ import annotations

import threading

import pytest

from hfshard.errors import RemoteChangedError
from hfshard.training import CheckpointManager, TrainingState
from tests.stores.runs.bucket_run import BucketRun, Net, save_steps
from tests.stores.runs.test_faults import values
from tests.stores.services.fault_proxy import FaultProxy

MEETINGS = {
    "before its first file": "put .*checkpoint-00000002/training_state",
    "amid its weights": "put .*checkpoint-00000002/model-",
    "at its index": "put .*checkpoint-00000002/model.safetensors.index.json",
    "before its manifest": "put .*checkpoint-00000002/checkpoint.json",
}
"""Where a second manager saves amid a save of the first one."""


@pytest.mark.parametrize("scheme", ["s3"])
@pytest.mark.parametrize(
    ("meeting", "other_step"), [(meeting, 5 if meeting == "amid its weights" else 2) for meeting in MEETINGS]
)
def test_the_manager_that_begins_last_wins(run: BucketRun, proxy: FaultProxy, meeting: str, other_step: int) -> None:
    first = CheckpointManager(run.root, max_shard_size="1KB")
    save_steps(first, 1)
    second = CheckpointManager(run.root, max_shard_size="1KB")
    proxy.fail("race", MEETINGS[meeting], action=lambda: save_other(second, other_step))

    with pytest.raises(RemoteChangedError):
        save_steps(first, 2)

    assert values(run) == {1: 1.0, other_step: 9.0}
    save_steps(second, 6)
    assert values(run) == {1: 1.0, other_step: 9.0, 6: 6.0}
    assert run.litter() == []


def save_other(manager: CheckpointManager, step: int) -> None:
    """Save other weights."""
    manager.save(step, TrainingState(model=Net(9.0)))


@pytest.mark.parametrize("scheme", ["s3", "hf"])
def test_a_reader_beside_a_writer_reads_one_save(run: BucketRun) -> None:
    with CheckpointManager(run.root, max_to_keep=1, max_shard_size="1KB") as manager:
        save_steps(manager, 1)
        failures: list[BaseException] = []
        reads, ended = threading.Semaphore(0), threading.Event()

        def write() -> None:
            try:
                for step in (2, 3, 4, 5, 5):
                    assert reads.acquire(timeout=100)  # a read has begun, which this save overtakes
                    save_steps(manager, step)
            except BaseException as error:
                failures.append(error)
            finally:
                ended.set()

        writing = threading.Thread(target=write)
        writing.start()
        net = Net()
        seen: list[int] = []
        is_last = False
        while not is_last:
            is_last = ended.is_set()
            reads.release()
            restored = CheckpointManager(run.root).restore_latest(TrainingState(model=net))
            assert restored == net.value()
            seen.append(int(restored or 0))
        writing.join()
    assert not failures
    assert seen == sorted(seen)
    assert (seen[0] <= 2, seen[-1]) == (True, 5)
