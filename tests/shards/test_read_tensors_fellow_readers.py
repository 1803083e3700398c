"""A file that several processes read at once is read by way of the page cache, and past it by one that is alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.disk.direct_io import is_cached
from hfshard.shards import read_tensors
from hfshard.shards.read_tensors import lock_shared, read_by_other_processes
from tests.helpers.page_cache import make_cold

VALUES = torch.arange(2_000_000, dtype=torch.float32)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """A cold checkpoint in one file, which is open."""
    hfshard.save_state_dict({"x": VALUES, "y": VALUES + 1}, tmp_path, checksum=None)
    make_cold(tmp_path / "model.safetensors")
    fd = os.open(tmp_path / "model.safetensors", os.O_RDONLY)
    yield fd
    os.close(fd)


def is_cached_once_read(fd: int, place: Path) -> bool:
    """Read past the page cache, if nothing speaks against it; whether the page cache has the file then."""
    found = hfshard.load_state_dict(place, read="pread")
    assert torch.equal(found["x"], VALUES) and torch.equal(found["y"], VALUES + 1)
    return is_cached(fd, 4096, 16_000_000)


def test_others_see_that_a_file_is_read_until_it_is_closed(fd: int, tmp_path: Path) -> None:
    other = os.open(tmp_path / "model.safetensors", os.O_RDONLY)
    lock_shared(fd)
    assert (read_by_other_processes(fd), read_by_other_processes(other)) == (False, True)
    lock_shared(other)
    assert read_by_other_processes(fd)
    os.close(other)
    assert not read_by_other_processes(fd)


def test_a_reader_that_is_alone_leaves_the_page_cache_as_it_was(fd: int, tmp_path: Path) -> None:
    assert not is_cached_once_read(fd, tmp_path)


def test_a_file_that_somebody_else_reads_is_read_into_the_page_cache(fd: int, tmp_path: Path) -> None:
    lock_shared(fd)
    assert is_cached_once_read(fd, tmp_path)


@pytest.mark.parametrize(("ranks", "is_cached_then"), [("4", True), ("1", False)])
def test_one_of_several_ranks_reads_into_the_page_cache(
    ranks: str, is_cached_then: bool, fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert is_cached_once_read(fd, tmp_path) == is_cached_then


def test_where_there_are_no_locks_every_reader_seems_alone(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    other = os.dup(fd)
    os.close(other)
    for closed in (True, False):
        monkeypatch.setattr(read_tensors, "_HAS_LOCKS", closed)
        lock_shared(other)
        assert not read_by_other_processes(other)
