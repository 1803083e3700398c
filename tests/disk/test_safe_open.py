"""Opening files: an error that is not the file's fault does not say that the file is damaged."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from hfshard.disk.safe_open import open_regular
from hfshard.errors import HfshardError


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
