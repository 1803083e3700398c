"""Which files of an older checkpoint are linked in place of a new file, and which are written again."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from hfshard.commit.transaction import KnownFile, OwnShardWriter, link_if_same
from hfshard.errors import RankFailedError
from hfshard.shards.write_shards import WriteJob

VALUES = torch.arange(5000, dtype=torch.float32)
"""20,000 bytes: the fingerprint has the first 4,096."""


def job(path: Path, values: torch.Tensor = VALUES) -> WriteJob:
    return WriteJob(str(path), {"x": values}, {"format": "pt"})


@pytest.fixture
def old(tmp_path: Path) -> KnownFile:
    """A file with `VALUES`, as a save records it."""
    (digest,) = OwnShardWriter().write([job(tmp_path / "old.safetensors")], "sha256", None)
    return KnownFile(str(tmp_path / "old.safetensors"), replace(digest, tensor_digests=None))


def test_a_file_with_the_same_bytes_gets_a_second_name_and_keeps_its_digest(old: KnownFile, tmp_path: Path) -> None:
    new = tmp_path / "new.safetensors"

    digest = link_if_same(job(new), old, "sha256", Event())

    assert digest is not None and replace(digest, tensor_digests=None) == old.digest
    assert digest.tensor_digests is not None and len(digest.tensor_digests) == 16
    assert old.path is not None and os.path.samefile(old.path, new)


def test_only_files_that_are_known_and_equal_to_the_last_byte_are_linked(old: KnownFile, tmp_path: Path) -> None:
    changed = VALUES.clone()
    changed[-1] += 1  # outside of the fingerprint
    other = VALUES + 1
    jobs = [job(tmp_path / "a", changed), job(tmp_path / "b"), job(tmp_path / "c", other)]
    known = {str(old.digest.fingerprint): old}
    assert list(OwnShardWriter().fingerprints(jobs, "sha256"))[:2] == 2 * [old.digest.fingerprint]

    linked = OwnShardWriter().link(jobs, known, "sha256")

    assert [digest is not None for digest in linked] == [False, True, False]
    assert sorted(os.listdir(tmp_path)) == ["b", "old.safetensors"]


def test_a_file_that_was_damaged_on_disk_is_written_again(
    old: KnownFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "old.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")

    with caplog.at_level(logging.INFO, "hfshard.commit.transaction"):
        assert link_if_same(job(tmp_path / "new"), old, "sha256", Event()) is None

    assert f"'{path}' cannot be hard-linked (Shard '{path}' is not the file that was saved" in caplog.text
    assert not (tmp_path / "new").exists()


def test_a_link_and_a_file_that_is_gone_are_no_files_to_link(old: KnownFile, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("old.safetensors")

    for name in ("link", "gone"):
        found = link_if_same(job(tmp_path / "new"), replace(old, path=str(tmp_path / name)), "sha256", Event())
        assert found is None

    assert not (tmp_path / "new").exists()


def test_a_file_in_a_store_stays_where_it_is(old: KnownFile, tmp_path: Path) -> None:
    stored = replace(old, path=None)

    assert link_if_same(job(tmp_path / "new"), stored, "sha256", Event()) is not None
    assert link_if_same(job(tmp_path / "new", VALUES + 1), stored, "sha256", Event()) is None

    assert os.listdir(tmp_path) == ["old.safetensors"]


def test_a_comparison_stops_when_another_file_has_failed(old: KnownFile, tmp_path: Path) -> None:
    stop = Event()
    stop.set()

    with pytest.raises(InterruptedError):
        link_if_same(job(tmp_path / "new"), old, "sha256", stop)

    assert not (tmp_path / "new").exists()


def test_a_writer_reads_no_tensor_for_a_fingerprint_that_nobody_asks_for(tmp_path: Path) -> None:
    unreadable: Any = None
    jobs = [job(tmp_path / "a"), job(tmp_path / "b", unreadable)]

    fingerprints = iter(OwnShardWriter().fingerprints(jobs, "sha256"))

    assert len(next(fingerprints)) == 32


def test_a_save_that_must_not_be_committed_is_stopped_by_its_writer() -> None:
    def refuse() -> None:
        raise RankFailedError("rank 1 was killed", rank=1)

    OwnShardWriter().confirm()
    with pytest.raises(RankFailedError, match="rank 1 was killed"):
        OwnShardWriter(refuse).confirm()
