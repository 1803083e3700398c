"""Contents on their way to a hub know their size and hash, and are read from the first byte each time."""

from __future__ import annotations

import io
import os
import stat
from functools import partial
from pathlib import Path

import pytest

from hfshard.disk.byte_source import (
    ByteSource,
    BytesSource,
    FileSource,
    StreamSource,
    clone_blocks,
    copy_file,
    file_source,
    hash_all,
    sha256_of_source,
)

RAW = b"hello\n"
# As `sha256sum` prints it.
SHA256 = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"
EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.fixture(params=["file", "bytes", "stream"])
def content(request: pytest.FixtureRequest, tmp_path: Path) -> ByteSource:
    (tmp_path / "file").write_bytes(RAW)
    made: dict[str, ByteSource] = {
        "file": file_source(str(tmp_path / "file")),
        "bytes": BytesSource(RAW),
        "stream": StreamSource(len(RAW), SHA256, partial(io.BytesIO, RAW)),
    }
    return made[request.param]


def test_every_content_has_size_and_hash_and_reads_anew(content: ByteSource) -> None:
    assert content.size == 6
    assert sha256_of_source(content) == SHA256
    for _ in range(2):
        with content.open() as reader:
            assert reader.read(2) == b"he"
            assert reader.seek(1) == 1
            assert reader.read() == b"ello\n"


def test_hash_that_is_known_costs_no_reading(tmp_path: Path) -> None:
    known = FileSource(str(tmp_path / "is not there"), 6, "ab" * 32)
    assert sha256_of_source(known) == "ab" * 32


def test_file_of_unknown_hash_is_read_in_blocks(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(9_000_000))
    content = file_source(str(path))
    assert (content.size, content.sha256) == (9_000_000, None)
    # head -c 9000000 /dev/zero | sha256sum
    assert sha256_of_source(content) == "177ffe9ef4bc54e6880afccabfbdb0273a15b89c0e663eabeeb8e9cda211f21f"


def test_empty_file_has_the_hash_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert sha256_of_source(file_source(str(tmp_path / "file"))) == EMPTY
    assert (BytesSource(b"").sha256, BytesSource(b"").size) == (EMPTY, 0)


def test_missing_file_is_an_error_when_it_is_looked_at(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        file_source(str(tmp_path / "nothing"))


def test_all_contents_are_hashed_and_a_known_hash_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(RAW)
    contents: dict[str, ByteSource] = {
        "empty": BytesSource(b""),
        "file": FileSource(str(tmp_path / "file"), len(RAW), "ab" * 32),
    }
    hashed: list[int] = []

    assert hash_all(contents, hashed.append) == {"empty": EMPTY, "file": SHA256}
    assert hashed == [len(RAW)]


# Copies that may share their blocks: the bytes are the same, whatever the file system can.


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
