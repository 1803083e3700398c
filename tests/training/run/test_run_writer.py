"""The only writer of a run: it takes the place, waits for its own work, and removes what no caller uses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hfshard.commit.transaction import OwnShardWriter
from hfshard.errors import DirectoryLockedError, HfshardError
from hfshard.training.manager import Rotation
from hfshard.training.run.find_checkpoint import open_run
from hfshard.training.run.run_writer import RunWriter
from tests.training.run.storage_contract import payload


def new_writer(root: Path, max_to_keep: int | None = None) -> RunWriter:
    return RunWriter(open_run(str(root)), Rotation(max_to_keep).to_remove, pusher=None, progress=False)


@pytest.fixture
def writer(tmp_path: Path) -> RunWriter:
    """A writer that keeps the newest checkpoint only; with its last reference it gives the place back."""
    return new_writer(tmp_path, max_to_keep=1)


def save(writer: RunWriter, step: int, *, blocking: bool = True) -> None:
    writer.save(step, payload(), None, {"notes.txt": b"x"}, blocking=blocking)


def steps(root: Path) -> list[int]:
    return [int(path.name.removeprefix("checkpoint-")) for path in sorted(root.glob("checkpoint-*"))]


def test_the_place_is_taken_from_the_first_save_until_it_is_closed(tmp_path: Path, writer: RunWriter) -> None:
    other = new_writer(tmp_path)
    assert os.listdir(tmp_path) == []
    save(writer, 1)

    with pytest.raises(DirectoryLockedError):
        other.begin()
    writer.close()
    save(other, 2)
    other.close()

    assert steps(tmp_path) == [1, 2]
    assert (tmp_path / "checkpoint-00000002" / "notes.txt").read_bytes() == b"x"


@pytest.mark.parametrize("blocking", [True, False])
def test_kept_checkpoints_stay_until_the_block_ends(tmp_path: Path, writer: RunWriter, blocking: bool) -> None:
    save(writer, 1)

    with writer.kept(open_run(str(tmp_path)).checkpoints) as found:
        for step in (2, 3):
            writer.wait()
            save(writer, step, blocking=blocking)
        writer.wait()
        within = steps(tmp_path)

    assert [one.step for one in found] == [1]
    assert (within, steps(tmp_path)) == ([1, 3], [3])


def test_an_error_of_the_thread_is_left_by_join_and_raised_once(
    tmp_path: Path, writer: RunWriter, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise HfshardError("no space")

    writer.start(7, fail)
    writer.join()
    with pytest.raises(HfshardError, match=r"^no space$"):
        writer.wait()
    writer.wait()

    assert f"Saving the checkpoint of step 7 into '{tmp_path}' failed: no space" in caplog.messages


def test_what_other_ranks_refuse_is_not_committed_and_is_cleaned_up(tmp_path: Path, writer: RunWriter) -> None:
    def refuse() -> None:
        assert [name for name in os.listdir(tmp_path) if name.startswith(".tmp-2-")]
        raise HfshardError("rank 3 failed")

    save(writer, 1)
    (tmp_path / ".tmp-9-1").mkdir()
    writer.begin()
    assert (tmp_path / ".tmp-9-1").exists()  # nobody's, as far as this writer knows
    with pytest.raises(HfshardError, match=r"^rank 3 failed$"):
        writer.write(2, payload(), {}, {}, blocking=True, writer=OwnShardWriter(refuse))
    assert steps(tmp_path) == [1]

    writer.begin()
    assert [name for name in os.listdir(tmp_path) if name.startswith(".tmp")] == []


def test_a_writer_is_not_closed_in_the_middle_of_a_change(writer: RunWriter) -> None:
    message = r"^close\(\) was called in the middle of save\(\), in the same thread: by a signal handler, a hook or a"
    with writer.turn("save()"), pytest.raises(HfshardError, match=message):
        writer.close()
