"""Opening files: an error that is not the file's fault does not say that the file is damaged."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from hfshard.disk.safe_open import open_regular
from hfshard.errors import HfshardError, UnsafePathError


def test_too_many_open_files_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(tmp_path, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        with pytest.raises(OSError, match="ulimit -n") as raised:
            open_regular(str(tmp_path / "file"), str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert raised.value.errno == errno.EMFILE
    assert not isinstance(raised.value, HfshardError)


def test_a_folder_whose_name_only_begins_like_the_root_is_outside(tmp_path: Path) -> None:
    for name in ("model", "model-secret"):
        (tmp_path / name).mkdir()
    (tmp_path / "model-secret" / "weights").write_bytes(b"x")
    (tmp_path / "model" / "shards").symlink_to("../model-secret")
    root = str(tmp_path / "model")
    with pytest.raises(UnsafePathError, match="outside the checkpoint's directory"):
        open_regular(f"{root}/shards/weights", root)
