"""What a re-shard refuses before it writes anything."""

from __future__ import annotations

import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import hfshard
from hfshard.disk.fsops import locked_directory
from hfshard.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    InvalidSizeError,
    NotEnoughSpaceError,
)
from tests.saving.helpers import files_in, flip, floats, weights_in

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def test_bad_arguments_touch_nothing(tmp_path: Path) -> None:
    hfshard.save_state_dict(floats(), tmp_path / "m")
    before = files_in(tmp_path / "m")
    for error, match, arguments in (
        (InvalidArgumentError, "is in the checkpoint to re-shard", {"dst": tmp_path / "m" / "sub"}),
        (InvalidArgumentError, "is in the checkpoint to re-shard", {"dst": f"{tmp_path}/m/../m/sub"}),
        (InvalidArgumentError, "low_disk .* in place", {"low_disk": True}),
        (InvalidArgumentError, "low_disk .* no dtype", {"low_disk": True, "dst": tmp_path / "m", "dtype": "float16"}),
        (InvalidArgumentError, "dtype must be one of", {"dtype": "int8"}),
        (InvalidArgumentError, "dtype must be one of", {"dtype": torch.complex64}),
        (InvalidArgumentError, "packing must be", {"packing": "tight"}),
        (InvalidArgumentError, "checksum must be", {"checksum": "md5"}),
        (InvalidArgumentError, "variant", {"variant": "../x"}),
        (InvalidSizeError, "Invalid size", {"max_shard_size": "0GB"}),
        (CheckpointNotFoundError, "no directory", {"src": tmp_path / "nowhere"}),
        (CheckpointNotFoundError, "no checkpoint", {"use_safetensors": False}),
    ):
        values: dict[str, Any] = {"src": tmp_path / "m", "dst": tmp_path / "new", **arguments}
        with pytest.raises(error, match=match):
            hfshard.reshard_checkpoint(**values)
        assert files_in(tmp_path / "m") == before
        assert os.listdir(tmp_path) == ["m"]


def test_a_folder_of_the_target_is_not_resharded_over_what_stands_above_it(tmp_path: Path) -> None:
    hfshard.save_state_dict({"w": torch.zeros(3)}, tmp_path / "m")
    hfshard.save_state_dict(floats(), tmp_path / "m" / "sub")
    before = files_in(tmp_path / "m")
    with pytest.raises(InvalidArgumentError, match=r"To re-shard that in place, pass '.*/m/sub' twice"):
        hfshard.reshard_checkpoint(tmp_path / "m", tmp_path / "m", "9KB", subfolder="sub")
    assert files_in(tmp_path / "m") == before
    hfshard.reshard_checkpoint(tmp_path / "m", tmp_path / "m" / "sub", "9KB", subfolder="sub")
    assert len(weights_in(tmp_path / "m" / "sub")) == 3


def test_in_place_by_another_path_is_in_place(tmp_path: Path) -> None:
    hfshard.save_state_dict(floats(), tmp_path / "m")
    (tmp_path / "link").symlink_to("m")
    hfshard.reshard_checkpoint(tmp_path / "m", tmp_path / "link", "9KB")
    assert len(weights_in(tmp_path / "m")) == 3
    assert hfshard.verify_checkpoint(tmp_path / "m").ok


def test_a_full_disk_is_told_before_the_first_byte(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    free_bytes = shutil.disk_usage(tmp_path).free
    entry = {"dtype": "U8", "shape": [free_bytes], "data_offsets": [0, free_bytes]}
    raw = json.dumps({"w": entry}).encode()
    with open(tmp_path / "old" / "model.safetensors", "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        try:
            file.truncate(8 + len(raw) + free_bytes)  # a hole: no bytes on the disk
        except OSError:
            pytest.skip("A FILE OF THIS SIZE CAN'T BE MADE HERE.")
    with pytest.raises(NotEnoughSpaceError, match=r"needs .* bytes, .* are free"):
        hfshard.reshard_checkpoint(tmp_path / "old", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def times_open(directory: Path) -> int:
    """How often this process has a directory open."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{fd}") == str(directory)
    return count


@pytest.mark.parametrize("what", ["another save", "a shard in place", "a shard removed"])
def test_a_source_that_changes_meanwhile_is_an_error(what: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    hfshard.save_state_dict(floats(), source, max_shard_size="9KB")
    target.mkdir()
    with ThreadPoolExecutor(1) as pool:
        with locked_directory(str(target), wait_seconds=10):
            running = pool.submit(hfshard.reshard_checkpoint, source, target)
            while times_open(target) < 2 and not running.done():
                time.sleep(0.001)  # until it has opened the source, and waits for the target
            if what == "another save":
                hfshard.save_state_dict({"w": torch.ones(2)}, source)
            elif what == "a shard in place":
                flip(source / "model-00002-of-00003.safetensors", -1)
            else:
                (source / "model-00002-of-00003.safetensors").unlink()
        with pytest.raises(CheckpointChangedError, match=r"was replaced or changed while it was being re-sharded"):
            running.result()
    assert os.listdir(target) == []
