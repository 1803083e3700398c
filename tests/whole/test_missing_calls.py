"""On kernels and file systems that lack a call: the same bytes, without a warning, whatever is missing."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertModel

import hfshard
from hfshard.disk import direct_io
from hfshard.pickles.pickle_file import MemoryFile
from hfshard.shards import shard_file
from tests.helpers.tiny_bert import bert, value_of

FULL_FLUSH = 51
"""F_FULLFSYNC of macOS."""
UNKNOWN = 9999
"""Advice that no kernel knows."""

WAYS: tuple[tuple[str, Any, Any], ...] = (
    ("saved", "mmap", "structure"),
    ("saved", "pread", "full"),
    ("resharded", "mmap", "full"),
    ("resharded", "pread", "structure"),
)
"""What is loaded, and the arguments `read` and `verify`."""


@cache
def tensors() -> dict[str, torch.Tensor]:
    """The same ones each time."""
    generator = torch.Generator().manual_seed(5)
    return {
        "large": torch.randn(2000, 1100, generator=generator),  # 9 MB
        "other": torch.randn(1_000_003, generator=generator, dtype=torch.float64),
        **{f"small.{number}": torch.full((number,), number, dtype=torch.int16) for number in range(50)},
    }


def no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    monkeypatch.setattr(shard_file, "_HUGE_PAGE", UNKNOWN)


def no_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    open_file, set_flags = os.open, fcntl.fcntl

    def refuse(flags: int) -> None:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def opened(path: str, flags: int, *arguments: int, **keywords: int) -> int:
        refuse(flags)
        return open_file(path, flags, *arguments, **keywords)

    def controlled(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL:
            refuse(argument)
        return set_flags(fd, command, argument)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(fcntl, "fcntl", controlled)


def no_direct_io_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT")


def no_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_file, "_POPULATE_READ", UNKNOWN)


def no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_POPULATE_READ", "_WILL_NEED", "_HUGE_PAGE"):
        monkeypatch.setattr(shard_file, name, UNKNOWN)


def no_mincore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io.LIBRARY, "mincore", lambda *_arguments: -1)


def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for lack in (no_huge_pages, no_direct_io_in_python, no_advice, no_mincore):
        lack(monkeypatch)


LACKS = [no_huge_pages, no_direct_io, no_direct_io_in_python, no_populate, no_advice, no_mincore, nothing]


def make_cold(directory: Path) -> None:
    """Drop the files from the page cache, as far as the system does so."""
    for path in directory.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """File -> bytes of a save, and of a re-shard of it, on this machine as it is."""
    directory = tmp_path_factory.mktemp("expected")
    save_and_reshard(directory)
    return contents(directory)


def save_and_reshard(directory: Path) -> None:
    hfshard.save_state_dict(tensors(), directory / "saved", max_shard_size="9MB")
    make_cold(directory / "saved")
    hfshard.reshard_checkpoint(directory / "saved", directory / "resharded", max_shard_size="1GB")
    make_cold(directory / "resharded")


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.glob("*/*") if path.is_file()}


@pytest.mark.parametrize("lack", LACKS, ids=lambda lack: lack.__name__)
def test_whatever_is_missing_the_bytes_are_the_same(
    lack: Callable[[pytest.MonkeyPatch], None],
    expected: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    lack(monkeypatch)
    save_and_reshard(tmp_path)
    for name in ("saved", "resharded"):
        assert hfshard.verify_checkpoint(tmp_path / name).ok
    for name, read, verify in WAYS:
        make_cold(tmp_path / name)
        found = hfshard.load_state_dict(tmp_path / name, read=read, verify=verify)
        assert all(torch.equal(found[key], tensor) for key, tensor in tensors().items())
    assert contents(tmp_path) == expected
    assert not recwarn.list and not caplog.records


def test_a_device_map_is_made_where_the_system_does_not_tell_free_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bert(3, cls=BertModel).save_pretrained(tmp_path)
    ask = os.sysconf

    def as_on_macos(name: str) -> int:
        if name == "SC_AVPHYS_PAGES":
            raise ValueError("unrecognized configuration name")
        return ask(name)

    monkeypatch.setattr(os, "sysconf", as_on_macos)

    with hfshard.install(quiet=True):
        assert value_of(BertModel.from_pretrained(tmp_path, device_map="auto")) == 3


@pytest.mark.parametrize("is_known", [True, False])
def test_the_disk_is_flushed_where_fsync_does_not_do_it(
    is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, flush = fcntl.fcntl, os.fsync
    flushed: dict[str, int] = {"disk": 0, "file": 0}

    def controlled(fd: int, command: int, argument: Any = 0) -> Any:
        if command != FULL_FLUSH:
            return control(fd, command, argument)
        flushed["disk"] += 1
        if not is_known:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        return 0

    def synced(fd: int) -> None:
        flushed["file"] += 1
        flush(fd)

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", FULL_FLUSH, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", controlled)
    monkeypatch.setattr(os, "fsync", synced)

    hfshard.save_state_dict({"a": torch.ones(3)}, tmp_path / "out")

    assert flushed["disk"] > 1
    assert flushed["file"] == (0 if is_known else flushed["disk"])


def test_files_in_memory_are_temporary_ones_where_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    file = MemoryFile(3, lambda begin, target: target.__setitem__(slice(None), b"abc"[begin:]))
    with os.fdopen(file.open(), "rb") as reading:
        assert (len(list(tmp_path.iterdir())), reading.read()) == (1, b"abc")
    del file

    assert list(tmp_path.iterdir()) == []


def test_a_system_without_posix_is_told_so_by_the_import(child_environment: dict[str, str]) -> None:
    code = "import sys; sys.modules['fcntl'] = None\nimport hfshard"

    done = subprocess.run(  # not of the tests' own server, which has imported it
        [sys.executable, "-c", code], env=child_environment, capture_output=True, text=True, timeout=110
    )

    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: hfshard needs a POSIX system, such as Linux or macOS")
