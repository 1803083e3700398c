"""Files that are closed when others need their descriptors, and opened again when they are used."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard._util.threads import run_in_threads
from hfshard.disk.direct_io import BLOCK_BYTES, is_cached
from hfshard.errors import CheckpointChangedError, DamagedCheckpointError
from hfshard.shards import shard_file
from hfshard.shards.shard_file import (
    FilePool,
    PooledFile,
    SafetensorsFile,
    evict_idle_files,
    prefaulted_blocks,
    split_range,
)
from tests.helpers import processes
from tests.helpers.page_cache import make_cold
from tests.helpers.threads import no_thread_is_left


class Files:
    """Files that hold their own names, of which at most two stay open."""

    def __init__(self, folder: Path, names: str) -> None:
        self.folder, self.opens = folder, ""
        self.held: dict[str, PooledFile] = {}
        pool = FilePool(lambda: 2)
        for name in names:
            (folder / name).write_text(name)
            self.held[name] = PooledFile(self.open(name), partial(self.open, name), pool)

    def open(self, name: str) -> int:
        self.opens += name
        return os.open(self.folder / name, os.O_RDONLY)

    def read(self, name: str) -> str:
        with self.held[name].opened() as fd:
            return os.pread(fd, 9, 0).decode()


def test_file_that_was_not_used_for_longest_is_closed_and_opened_again(tmp_path: Path) -> None:
    files = Files(tmp_path, "abc")

    assert [files.read(name) for name in "bcbacb"] == list("bcbacb")

    assert files.opens == "abc" + "ac" + "b"  # b and c were open; for a, c was closed; for c, b; for b, a


def test_file_in_use_is_not_closed(tmp_path: Path) -> None:
    files = Files(tmp_path, "abcd")
    with files.held["a"].opened() as fd:
        inode = os.fstat(fd).st_ino
        assert [files.read(name) for name in "bcdbcd"] == list("bcdbcd")
        files.held["a"].close()
        assert os.fstat(fd).st_ino == inode
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(ValueError, match="closed"):
        files.read("a")


def test_threads_share_few_descriptors(tmp_path: Path) -> None:
    files = Files(tmp_path, "abcdefgh")

    read = run_in_threads(lambda name, _: files.read(name), "abcdefgh" * 200, 4)

    assert "".join(read) == "abcdefgh" * 200


def test_shard_that_is_opened_again_must_be_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    hfshard.save_state_dict({"x": torch.ones(5)}, tmp_path)
    shard = SafetensorsFile(str(path), str(tmp_path))
    fingerprint = shard.fingerprint()
    assert evict_idle_files()
    assert shard.fingerprint() == fingerprint
    mapped = shard.tensor("x")
    evict_idle_files()

    hfshard.save_state_dict({"x": torch.zeros(5)}, tmp_path)

    with pytest.raises(CheckpointChangedError, match=r"'.*model\.safetensors' was replaced or removed") as raised:
        shard.fingerprint()
    assert raised.value.path == str(path)
    path.unlink()
    with pytest.raises(CheckpointChangedError, match="was replaced or removed"):
        list(shard.blocks(shard.header.tensors["x"]))
    assert torch.equal(mapped, torch.ones(5))
    shard.close()


def test_run_of_a_tensor_is_mapped_privately_with_a_storage_of_its_own(tmp_path: Path) -> None:
    pairs = torch.view_as_complex(torch.arange(24, dtype=torch.float64).view(4, 3, 2))
    halves = torch.arange(12, dtype=torch.bfloat16).view(4, 3)
    hfshard.save_state_dict({"pairs": pairs, "halves": halves}, tmp_path)
    path = tmp_path / "model.safetensors"
    before = path.read_bytes()
    shard = SafetensorsFile(str(path), str(tmp_path))

    rows = shard.run("pairs", 3, (2, 3))
    last = shard.run("halves", 11, ())
    shard.close()

    assert torch.equal(rows, pairs[1:3])
    assert rows.untyped_storage().nbytes() == 2 * 3 * 16
    assert not rows._is_view()
    assert last == 11
    rows.zero_()
    assert path.read_bytes() == before


# What will be mapped is read once and stays in the page cache; whatever the kernel lacks, the bytes are the same.

SIZE = 21 * 1024 * 1024 + 777


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SafetensorsFile]:
    words = torch.arange(SIZE // 4, dtype=torch.int32)
    hfshard.save_state_dict({"words": words, "end": torch.arange(777 % 251, dtype=torch.uint8)}, tmp_path)
    shard = SafetensorsFile(str(tmp_path / "model.safetensors"), str(tmp_path))
    yield shard
    shard.close()


def read(file: SafetensorsFile) -> bytes:
    with file.opened() as fd:
        blocks = [bytes(block) for block in prefaulted_blocks(fd, file.mapping, file.header.data_start, file.size)]
    assert {len(block) for block in blocks[:-1]} <= {BLOCK_BYTES}
    return b"".join(blocks)


def bytes_of(file: SafetensorsFile) -> bytes:
    return Path(file.path).read_bytes()[file.header.data_start :]


def test_pieces_end_where_huge_pages_may() -> None:
    assert list(split_range(4096, 20_000_000, 8_388_608)) == [
        (4096, 8_388_608),
        (8_388_608, 16_777_216),
        (16_777_216, 20_000_000),
    ]
    assert list(split_range(8_388_608, 8_388_609, 8_388_608)) == [(8_388_608, 8_388_609)]
    assert list(split_range(5, 5, 8_388_608)) == []


@pytest.mark.parametrize("is_cold", [True, False])
def test_a_stretch_is_read_and_stays_in_the_page_cache(is_cold: bool, file: SafetensorsFile) -> None:
    expected = bytes_of(file)
    if is_cold:
        make_cold(file.path)
    with no_thread_is_left():
        assert read(file) == expected
    with file.opened() as fd:
        assert is_cached(fd, 0, file.size)


@pytest.mark.parametrize("lacks", ["MADV_POPULATE_READ", "all advice", "MADV_HUGEPAGE", "threads"])
def test_what_the_kernel_lacks_is_not_missed(
    lacks: str, file: SafetensorsFile, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    expected = bytes_of(file)
    make_cold(file.path)
    unknown = 9999
    if lacks in ("MADV_POPULATE_READ", "all advice"):
        monkeypatch.setattr(shard_file, "_POPULATE_READ", unknown)
    if lacks == "all advice":
        monkeypatch.setattr(shard_file, "_WILL_NEED", unknown)
    if lacks in ("MADV_HUGEPAGE", "all advice"):
        monkeypatch.setattr(shard_file, "_HUGE_PAGE", unknown)
    if lacks == "threads":
        monkeypatch.setattr(shard_file, "start_worker", lambda *_arguments, **_keywords: None)
    assert read(file) == expected
    assert not recwarn.list


def test_a_reader_that_stops_early_ends_the_thread(file: SafetensorsFile) -> None:
    make_cold(file.path)
    with no_thread_is_left(), file.opened() as fd:
        blocks = prefaulted_blocks(fd, file.mapping, file.header.data_start, file.size)
        next(blocks)
        blocks.close()  # type: ignore[attr-defined]


def check_while_cut(path: str, when: str) -> None:
    """Hash a file that is cut short, and say what came of it; a process of its own, as SIGBUS would end it."""
    file = SafetensorsFile(path, os.path.dirname(path))
    if when == "before":
        os.truncate(path, 3_000_000)
    try:
        file.check_contents(
            file.hfshard_metadata.digests, lambda _count: os.truncate(path, 3_000_000), keep_cached=True
        )
    except DamagedCheckpointError as error:
        print(error.message)


@pytest.mark.parametrize("is_cold", [True, False])
@pytest.mark.parametrize(
    ("when", "message"),
    [
        ("before", "model.safetensors' was truncated while it was being read"),
        ("meanwhile", "model.safetensors' is not the file that was saved: its sha256 is"),
    ],
)
def test_a_file_that_is_cut_short_while_it_is_hashed_is_an_error_not_a_signal(
    when: str, message: str, is_cold: bool, file: SafetensorsFile
) -> None:
    if is_cold:
        make_cold(file.path)
    child = processes.call(check_while_cut, file.path, when, stdout=subprocess.PIPE)
    said, _ = child.communicate()
    assert child.returncode == 0, f"ended by {child.returncode}"
    assert message in said
