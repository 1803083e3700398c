"""Every bit and every byte of small checkpoints, one at a time: damage is refused, or changes no weight."""

from __future__ import annotations

import os
import resource
import struct
from pathlib import Path

import pytest

import hfshard
from hfshard.format.index import Verify
from tests.attacks.files import bases, raw
from tests.attacks.target import same, truth

S = raw.SECOND


def _bit_of(position: int) -> int:
    return (position * 5 + 3) % 8


def _load(directory: Path, verify: Verify) -> bool:
    """Whether the true weights came back; False where the load was refused; anything else fails the test."""
    try:
        found = hfshard.load_state_dict(directory, verify=verify)
    except hfshard.HfshardError as error:
        assert str(directory) in str(error)
        return False
    assert same(found, truth()), "loaded, and wrong"
    return True


@pytest.mark.parametrize("file", [S, raw.SINGLE])
def test_flipped_bit_in_any_byte_of_a_header_is_refused(tmp_path: Path, file: str) -> None:
    files = bases.ours_sharded() if file == S else bases.ours_single()
    raw.write(tmp_path, files)
    content = files[file]
    end = 8 + struct.unpack("<Q", content[:8])[0]
    used = len(content[:end].rstrip(b" "))
    for position in [*range(used), *range(used, end, 211), end - 1]:
        (tmp_path / file).write_bytes(raw.flip(content, position, _bit_of(position)))
        # The digests in a single file are not part of what is hashed: a flip in one is found by it, or harmless.
        is_own = file == raw.SINGLE and position < content.index(b'"format":"pt"')
        assert not _load(tmp_path, "structure") or is_own, position
        assert not _load(tmp_path, "full") or is_own, position


@pytest.mark.parametrize("file", [S, raw.SINGLE])
def test_flipped_bit_in_any_byte_of_the_data_is_refused(tmp_path: Path, file: str) -> None:
    files = bases.ours_sharded() if file == S else bases.ours_single()
    raw.write(tmp_path, files)
    content = files[file]
    header, _ = raw.split(content)
    offsets = {name: info["data_offsets"] for name, info in header.items() if name != "__metadata__"}
    for position in range(4096, len(content)):
        (tmp_path / file).write_bytes(raw.flip(content, position, _bit_of(position)))
        assert not _load(tmp_path, "structure")
        report = hfshard.verify_checkpoint(tmp_path)
        damaged = next(name for name, (begin, end) in offsets.items() if begin <= position - 4096 < end)
        assert {(os.path.basename(problem.file), problem.tensor) for problem in report.problems} == {(file, damaged)}


def test_flipped_bit_in_any_byte_of_an_index_changes_no_weight(tmp_path: Path) -> None:
    files = bases.ours_sharded()
    raw.write(tmp_path, files)
    content = files[raw.INDEX]
    for position in range(len(content)):
        (tmp_path / raw.INDEX).write_bytes(raw.flip(content, position, _bit_of(position)))
        _load(tmp_path, "structure")
        if position % 3 == 0:  # it reads the same index, and all data
            _load(tmp_path, "full")


@pytest.mark.parametrize("file", [S, raw.INDEX])
def test_file_cut_at_any_byte_is_refused(tmp_path: Path, file: str) -> None:
    files = raw.stock_sharded()
    raw.write(tmp_path, files)
    for length in range(len(files[file].rstrip())):
        (tmp_path / file).write_bytes(files[file][:length])
        assert not _load(tmp_path, "structure"), length


@pytest.mark.parametrize("is_legacy", [False, True], ids=["zip", "legacy"])
def test_pickle_cut_at_any_byte_is_refused(tmp_path: Path, is_legacy: bool) -> None:
    content = bases.stock_bin(legacy=is_legacy)[raw.BIN]
    for length in range(0, len(content), 7):
        (tmp_path / raw.BIN).write_bytes(content[:length])
        assert not _load(tmp_path, "structure"), length


def test_failed_save_over_a_damaged_index_keeps_the_old_shards(tmp_path: Path) -> None:
    files = bases.ours_sharded()
    raw.write(tmp_path, files | {raw.INDEX: files[raw.INDEX][:-9]})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(OSError):
            hfshard.save_state_dict(truth(2), tmp_path, max_shard_size=4096 + 128)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (tmp_path / raw.INDEX).write_bytes(files[raw.INDEX])
    assert _load(tmp_path, "full")
