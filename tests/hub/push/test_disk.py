"""A push writes no copy to disk and reads each byte once: measured by the kernel's own counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hub.models import contents, saved
from tests.hub.push.push_hub import PushHub, differences

SHARDED, SINGLE = "5MB", "100MB"
OTHER_READS = 1_000_000
"""Bytes: Python's own files, config and index, and the samples of 4 KiB of each of the 23 tensors (94 kB)."""
SMALL_WRITES = 64 * 1024
"""Bytes: what no file may grow beyond (RLIMIT_FSIZE: whatever call writes it), and all writes together stay below."""


def weights_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_counters_and_the_limit_see_what_a_save_writes(hub: PushHub, repo: str, tmp_path: Path) -> None:
    outcome = hub.call("save_and_push", 1, tmp_path / "save", repo_id=repo)
    assert weights_of(tmp_path / "save") == 55_296
    assert outcome.written >= 55_296
    limited = hub.start("save_and_push", 1, tmp_path / "other", repo_id=repo, largest_file=50_000).outcome()
    assert limited.error is not None and "File too large" in limited.message


@pytest.mark.compat
def test_sharded_directory_is_read_once_and_nothing_is_written(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1, SHARDED, size="large")
    weights = weights_of(folder)
    assert weights > 15_800_000
    before = contents(folder)
    outcome = hub.push(folder, repo, largest_file=SMALL_WRITES)
    assert weights <= outcome.read <= weights + OTHER_READS
    assert outcome.written <= SMALL_WRITES
    assert contents(folder) == before
    assert differences(hub, repo, before) == {}


@pytest.mark.compat
def test_single_file_is_read_twice_and_nothing_is_written(hub: PushHub, repo: str, tmp_path: Path) -> None:
    # Its own checksum, which it holds, is not the sha256 that the Hub wants: it is hashed, and then sent.
    folder = saved(tmp_path / "save", 1, SINGLE, size="large")
    outcome = hub.push(folder, repo, largest_file=SMALL_WRITES)
    assert outcome.read <= 2 * weights_of(folder) + OTHER_READS
    assert outcome.written <= SMALL_WRITES


def test_unchanged_sharded_directory_is_not_read(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1, SHARDED, size="large")
    hub.push(folder, repo)
    assert hub.push(folder, repo, largest_file=SMALL_WRITES).read <= OTHER_READS


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        pytest.param("bert", SHARDED, marks=pytest.mark.compat),
        ("bert", SINGLE),
        ("transposed", SHARDED),
        ("tied", SINGLE),
    ],
)
def test_model_is_pushed_from_memory_as_the_files_that_a_save_writes(
    hub: PushHub, repo: str, tmp_path: Path, kind: str, limit: str
) -> None:
    model = {"kind": kind, "size": "large"}
    outcome = hub.call("push_model", 1, repo, model=model, max_shard_size=limit, largest_file=SMALL_WRITES)
    assert outcome.written <= SMALL_WRITES
    assert outcome.read <= OTHER_READS
    expected = contents(saved(tmp_path / "save", 1, limit, **model))
    assert differences(hub, repo, expected | {"README.md": hub.view(repo).read("README.md")}) == {}
    assert len(expected) == (2 if limit == SINGLE else 7)


def test_model_in_small_files_is_pushed_as_the_files_that_a_save_writes(
    hub: PushHub, repo: str, tmp_path: Path
) -> None:
    for number, kind in enumerate(("bert", "transposed", "tied")):
        for limit in ("10MB", "20KB", "9KB"):
            name = f"{repo}-{number}-{limit}"
            hub.call("push_model", 1, name, model={"kind": kind}, max_shard_size=limit, variant="fp16")
            expected = contents(saved(tmp_path / name, 1, limit, variant="fp16", kind=kind))
            assert differences(hub, name, expected | {"README.md": hub.view(name).read("README.md")}) == {}
