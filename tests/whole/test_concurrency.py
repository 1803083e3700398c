"""Several processes at one directory: writers wait for each other, a reader sees only whole checkpoints."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import hfshard
from tests.crash.sweep import memory
from tests.helpers import forkserver
from tests.whole.concurrency_child import bert, state_dict


@contextmanager
def child(environment: dict[str, str], *arguments: object) -> Iterator[forkserver.Child]:
    command = ["-m", "tests.whole.concurrency_child", *arguments]
    with forkserver.start(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def ended(process: forkserver.Child) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


@contextmanager
def held(folder: Path, environment: dict[str, str]) -> Iterator[forkserver.Child]:
    with child(environment, "hold", folder) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        yield holder


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is some: reads do not wait for the disk, and saves would, hundreds of times."""
    with tempfile.TemporaryDirectory(dir=memory() or tmp_path) as folder:
        yield Path(folder)


def generation_in(folder: Path) -> int:
    loaded = hfshard.load_state_dict(folder, verify="full")
    (value,) = {tensor.unique().item() for tensor in loaded.values()}
    assert loaded.keys() == state_dict(int(value)).keys()
    return int(value)


def test_two_writers_leave_one_whole_checkpoint_of_one_of_them(
    tmp_path: Path, child_environment: dict[str, str]
) -> None:
    with (
        child(child_environment, "save", tmp_path, 0, 40) as first,
        child(child_environment, "save", tmp_path, 60, 100) as second,
    ):
        ended(first)
        ended(second)
    assert generation_in(tmp_path) in (39, 99)
    stray = [warning for warning in hfshard.verify_checkpoint(tmp_path).warnings if "belongs to nothing" in warning]
    assert stray == []
    assert not (tmp_path / ".cache").exists()


def test_a_second_writer_that_waits_too_long_is_told_so(tmp_path: Path, child_environment: dict[str, str]) -> None:
    with held(tmp_path, child_environment), child(child_environment, "wait", tmp_path) as waiting:
        assert re.fullmatch(
            rf"'{tmp_path}' is locked: process \d+ \(.*\) has been saving there for 0.2 s. "
            r"Wait for it, or save into another directory.\n",
            ended(waiting),
        )


def test_a_killed_writer_frees_the_lock_and_its_litter_is_swept(
    tmp_path: Path, child_environment: dict[str, str]
) -> None:
    with held(tmp_path, child_environment) as holder:
        assert (tmp_path / ".cache/huggingface/hfshard/00000.weights").exists()
        holder.kill()
        holder.wait()
        hfshard.save_state_dict(state_dict(1), tmp_path)
    assert generation_in(tmp_path) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors"}


@pytest.mark.parametrize("saves", [40, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["state_dict", "model"])
def test_a_reader_beside_many_saves_reads_only_whole_checkpoints(
    kind: str, saves: int, place: Path, child_environment: dict[str, str]
) -> None:
    folder, stop, enough = place / "model", place / "stop", place / "enough"
    hfshard.save_model(bert(0), folder)
    with child(child_environment, "read", folder, kind, stop, enough) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == "reading\n"
        with child(child_environment, "write", folder, saves, enough) as writer:
            end = time.monotonic() + 100 + saves
            while writer.poll() is None and reader.poll() is None and time.monotonic() < end:
                with suppress(subprocess.TimeoutExpired):
                    writer.wait(0.1)
            if reader.poll() is None:
                ended(writer)
        stop.touch()
        reads, generations = map(int, ended(reader).split())
    print(f"\n{kind}: {reads} reads beside {saves} saves saw {generations} generations")
    assert reads > 10 and generations > 5
