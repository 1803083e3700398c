"""Files that are closed when others need their descriptors, and opened again when they are used."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard._util.threads import run_in_threads
from hfshard.errors import CheckpointChangedError
from hfshard.shards.shard_file import FilePool, PooledFile, SafetensorsFile, evict_idle_files


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
