"""Two managers that save into one run, and a reader beside one: neither touches what the other has saved."""

from __future__ import annotations

import threading

import pytest

import hfshard
from hfshard.errors import RemoteChangedError
from hfshard.training import CheckpointManager, TrainingState
from tests.servers.stores.fault_proxy import FaultProxy
from tests.stores.runs.bucket_run import BucketRun, Net, save_steps
from tests.stores.runs.test_faults import values

MEETINGS = {
    "before its mark": r"^PUT put .*/\.saves/",
    "before its first shard": r"^PUT put .*/model-0000",
    "amid its shards": r"^PUT put .*/model-0000[2-9]",
    "before its manifest": r"^PUT put .*/checkpoint-\d{8}-[0-9a-f]{16}\.json",
    "amid its plain copies": r"^PUT put .*/model\.safetensors\.index\.json",
    "before its plain manifest": r"^PUT put .*/checkpoint\.json",
    "before it lists its folder": r"^GET list .*prefix=[^&]*checkpoint-",
    "before it looks for others": r"^GET list .*prefix=[^&]*\.saves",
    "before it deletes": r"^POST delete_many ",
    "before its rotation deletes": r"^POST delete_many ",
}
"""Where a manager is suspended, and another one saves: the request that it was about to send."""
SKIPPED = {"before it looks for others": 1, "before its rotation deletes": 1}
"""Requests like it that come before: the look, and the delete of the mark."""
CHOSEN = [
    ("before its mark", 5, None),
    ("before its first shard", 5, None),
    ("amid its shards", 5, 1),
    ("before its manifest", 2, None),
    ("before its manifest", 5, 2),
    ("amid its plain copies", 5, 1),
    ("before its plain manifest", 2, None),
    ("before it lists its folder", 5, None),
    ("before it looks for others", 2, 1),
    ("before it deletes", 2, None),
    ("before its rotation deletes", 1, 1),
]
EVERY = [
    (meeting, step, keep)
    for meeting in MEETINGS
    for step in (1, 2, 5)
    for keep in (None, 1, 2)
    if keep == 1 or "rotation" not in meeting
]
"""Meeting, the step that the other manager saves (the first one saves 2), and how many checkpoints are kept."""


@pytest.mark.parametrize("scheme", ["s3"])
@pytest.mark.parametrize(
    ("meeting", "other_step", "keep"),
    [*CHOSEN, *(pytest.param(*one, marks=pytest.mark.slow) for one in EVERY if one not in CHOSEN)],
)
def test_a_suspended_manager_touches_nothing_of_its_successor(
    run: BucketRun, proxy: FaultProxy, meeting: str, other_step: int, keep: int | None
) -> None:
    first, second = (CheckpointManager(run.root, max_shard_size="1KB", max_to_keep=keep) for _ in range(2))
    save(first, 2, 0.5)
    save(first, 1, 1.0)
    suspended = proxy.fail(
        "race", MEETINGS[meeting], skip=SKIPPED.get(meeting, 0), action=lambda: save(second, other_step, 9.0)
    )
    is_told = False
    try:
        save(first, 2, 2.0)
    except RemoteChangedError:
        is_told = True
    assert suspended.reached.is_set()

    found = values(run)
    newest = CheckpointManager(run.root).latest_step()
    if meeting == "before its mark":  # then both saves have one number, and the higher id counts
        assert newest == (other_step if is_told else 2)
        assert found[newest] == (9.0 if is_told else 2.0)
    else:
        assert is_told is ("deletes" not in meeting)  # then it was done
        assert (newest, found[other_step]) == (other_step, 9.0)

    for manager, step in ((second, 6), (first, 7)):
        save(manager, step, float(step))
        assert CheckpointManager(run.root).latest_step() == step
        assert values(run)[step] == step
        assert run.litter() == []


def save(manager: CheckpointManager, step: int, value: float) -> None:
    """Save a model whose weights all have this value."""
    manager.save(step, TrainingState(model=Net(value)))


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "hf"])
def test_managers_may_take_turns(run: BucketRun) -> None:
    first, second = (CheckpointManager(run.root, max_to_keep=3) for _ in range(2))
    save(first, 1, 1.0)
    save(second, 2, 2.0)
    save(first, 3, 3.0)
    save(second, 2, 2.5)
    save(second, 4, 4.0)
    assert first.latest_step() == second.latest_step() == 4
    assert values(run) == {2: 2.5, 3: 3.0, 4: 4.0}
    assert run.litter() == []


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


@pytest.mark.parametrize("scheme", ["s3"])
def test_a_save_of_which_others_delete_a_shard_is_no_checkpoint(run: BucketRun, proxy: FaultProxy) -> None:
    with CheckpointManager(run.root, max_to_keep=1) as manager:
        save_steps(manager, 1)

        def delete_shards() -> None:
            for name in run.names("checkpoint-00000002/model-0"):
                run.delete(name)

        proxy.fail("race", MEETINGS["before its manifest"], action=delete_shards)
        with pytest.raises(RemoteChangedError, match="were deleted while it ran"):
            save_steps(manager, 2)

    assert CheckpointManager(run.root).all_steps() == [1]
    assert CheckpointManager(run.root).verify() == {1: []}


@pytest.mark.parametrize("scheme", ["s3"])
def test_a_rotation_counts_what_is_there(run: BucketRun) -> None:
    with CheckpointManager(run.root, max_to_keep=2) as manager:
        save_steps(manager, 4, 5)
        hfshard.remove_checkpoint(run.root, step=5)
        assert manager.latest_step() == 4
        save_steps(manager, 6)

    assert CheckpointManager(run.root).all_steps() == [4, 6]
