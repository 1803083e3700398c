"""Copies that may share their blocks: the bytes are the same, whatever the file system can."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hfshard.disk.byte_source import clone_blocks, copy_file


def test_a_copy_has_the_bytes_and_the_mode_that_was_asked_for(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"weights" * 1000)
    like = tmp_path / "like"
    like.touch()
    like.chmod(0o640)

    copy_file(str(source), str(tmp_path / "target"), like.stat())

    assert (tmp_path / "target").read_bytes() == b"weights" * 1000
    assert stat.S_IMODE((tmp_path / "target").stat().st_mode) == 0o640


def test_nothing_that_exists_is_copied_over(tmp_path: Path) -> None:
    for name in ("source", "target"):
        (tmp_path / name).write_text(name)

    with pytest.raises(FileExistsError):
        copy_file(str(tmp_path / "source"), str(tmp_path / "target"), None)

    assert (tmp_path / "target").read_text() == "target"


def test_a_clone_has_all_bytes_and_where_there_is_none_the_file_stays_empty(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"x" * 8192)
    source_fd = os.open(tmp_path / "source", os.O_RDONLY)
    target_fd = os.open(tmp_path / "target", os.O_WRONLY | os.O_CREAT)
    try:
        is_cloned = clone_blocks(source_fd, target_fd)
    finally:
        os.close(source_fd)
        os.close(target_fd)

    assert (tmp_path / "target").read_bytes() == (b"x" * 8192 if is_cloned else b"")
