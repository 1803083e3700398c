"""The system calls of a commit: what they promise to others on the machine."""

from __future__ import annotations

import os
from pathlib import Path

from hfshard.storage.disk.fsops import locked_directory


def test_lock_ends_with_its_block_though_a_forked_process_lives_on(tmp_path: Path) -> None:
    with locked_directory(str(tmp_path), wait_seconds=0) as fd:
        kept = os.dup(fd)  # as a DataLoader's worker has it that was forked meanwhile
    try:
        with locked_directory(str(tmp_path), wait_seconds=0):
            pass
    finally:
        os.close(kept)
