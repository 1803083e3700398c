"""File systems that lack a system call: a save goes on, one step weaker and with a warning; and modes of files."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest
import torch

import hfshard
from tests.helpers import forkserver

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")

CHILD = """
import logging, sys, torch, hfshard
from hfshard.saving.save_request import SaveOptions
from hfshard.saving.save_request import SaveRequest
from hfshard.saving.pipeline import save_request
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
torch.set_num_threads(1)
folder, generation, limit = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
tensors = {name: torch.full((8,), generation) for name in ("a", "b", "c")}
options = SaveOptions(max_shard_size=limit)
save_request(SaveRequest(tensors=tensors, options=options, config=b'{"n": %d}\\n' % generation), folder)
"""
SHARDED, SINGLE = 4130, 10**6
"""Limits: a header of 4,096 bytes and one tensor of 32; everything."""


def save_without(
    call: str, folder: Path, environment: dict[str, str], *, generation: int = 2, limit: int = SHARDED
) -> str:
    """Save in a child to which the system says that it lacks a call ("rename:error=ENOSYS"); returns its stderr."""
    calls = call.split(":")[0]
    strace = ["-o", "/dev/null", "-e", f"trace={calls}", "-e", f"inject={call}"]
    run = forkserver.run(["-c", CHILD, folder, generation, limit], env=environment, strace=strace)
    assert run.returncode == 0, run.stderr
    return run.stderr


def assert_holds(folder: Path, generation: int) -> None:
    loaded = hfshard.load_state_dict(folder, verify="full")
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == dict.fromkeys("abc", [float(generation)] * 8)
    assert (folder / "config.json").read_bytes() == b'{"n": %d}\n' % generation
    expected = {"config.json", *(name for name in os.listdir(folder) if name.startswith("model"))}
    assert set(os.listdir(folder)) == expected
    assert not [name for name in expected if "hfshard" in name]


def old_save(folder: Path, limit: int) -> None:
    (folder / "config.json").write_bytes(b'{"n": 1}\n')
    hfshard.save_state_dict({name: torch.ones(8) for name in "abc"}, folder, max_shard_size=limit)
    assert len(list(folder.glob("*.safetensors"))) == (3 if limit == SHARDED else 1)


@needs_strace
@pytest.mark.parametrize(
    ("old", "new"), [(None, SHARDED), (SINGLE, SINGLE), (SINGLE, SHARDED), (SHARDED, SINGLE), (SHARDED, SHARDED)]
)
def test_a_file_system_without_rename_gets_copies(
    old: int | None, new: int, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    if old is not None:
        old_save(tmp_path, old)
    said = save_without("rename,renameat,renameat2:error=ENOSYS", tmp_path, child_environment, limit=new)
    assert "has no rename" in said
    assert_holds(tmp_path, 2)


@needs_strace
@pytest.mark.parametrize("error", ["EOPNOTSUPP", "ENOLCK"])
def test_a_file_system_without_locks_is_saved_to_with_a_warning(
    error: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    said = save_without(f"flock:error={error}", tmp_path, child_environment)
    assert "can't be locked" in said
    assert_holds(tmp_path, 2)


@needs_strace
@pytest.mark.parametrize("error", ["EINVAL"])
def test_a_file_system_that_can_not_flush_is_saved_to_with_a_warning(
    error: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    old_save(tmp_path, SHARDED)
    said = save_without(f"fsync,fdatasync:error={error}", tmp_path, child_environment)
    assert "can't be flushed" in said
    assert_holds(tmp_path, 2)


@needs_strace
@pytest.mark.parametrize(("old", "error"), [(SINGLE, "EPERM"), (SHARDED, "EOPNOTSUPP")])
def test_without_hard_links_a_single_file_over_another_config_becomes_shards(
    old: int, error: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    old_save(tmp_path, old)
    said = save_without(f"link,linkat:error={error}", tmp_path, child_environment, limit=SINGLE)
    assert "hard link" in said
    assert_holds(tmp_path, 2)
    assert (tmp_path / "model.safetensors.index.json").exists()


def modes_in(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600), (0o000, 0o666)])
@pytest.mark.parametrize("limit", [SHARDED, SINGLE])
def test_files_get_the_mode_that_the_umask_gives(umask: int, mode: int, limit: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        old_save(tmp_path, limit)
    finally:
        os.umask(before)
    assert modes_in(tmp_path) == {mode}


@pytest.mark.parametrize("old", [SINGLE, SHARDED])
@pytest.mark.parametrize("new", [SINGLE, SHARDED])
def test_a_save_over_another_keeps_its_mode_and_group(old: int, new: int, tmp_path: Path) -> None:
    old_save(tmp_path, old)
    group = next((group for group in os.getgroups() if group != os.getegid()), 12345 if os.geteuid() == 0 else None)
    for path in tmp_path.iterdir():
        path.chmod(0o640)
        if group is not None:
            os.chown(path, -1, group)
    hfshard.save_state_dict({name: torch.zeros(8) for name in "abc"}, tmp_path, max_shard_size=new)
    assert modes_in(tmp_path) == {0o640}
    if group is not None:
        assert {path.stat().st_gid for path in tmp_path.iterdir()} == {group}


@needs_strace
def test_a_copy_in_place_of_a_rename_keeps_the_mode_too(tmp_path: Path, child_environment: dict[str, str]) -> None:
    old_save(tmp_path, SHARDED)
    for path in tmp_path.iterdir():
        path.chmod(0o640)
    save_without("rename,renameat,renameat2:error=ENOSYS", tmp_path, child_environment)
    assert modes_in(tmp_path) == {0o640}
