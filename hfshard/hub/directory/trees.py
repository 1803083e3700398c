"""Moves the folders of snapshots, also where a file system has no rename of folders, and counts what they take."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable
from typing import Final

from hfshard.disk.fsops import UNSUPPORTED, rename, sync_directory

logger = logging.getLogger(__name__)

_BLOCK_BYTES: Final = 512
"""The unit of st_blocks, whatever the file system's own blocks are."""


def move_tree(source: str, target: str) -> None:
    """Move a folder; where folders have no rename, file by file, durably."""
    try:
        os.rename(source, target)
        return
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        logger.warning("'%s' has no rename (%s): a snapshot is copied.", os.path.dirname(target), error)
    for base, _, files in os.walk(source):
        into = os.path.normpath(os.path.join(target, os.path.relpath(base, source)))
        os.mkdir(into)
        for name in files:
            rename(os.path.join(base, name), os.path.join(into, name))
        sync_directory(into)


def merge_tree(source: str, target: str) -> None:
    """Move what the target lacks: all, or, where a directory has no rename, the files that were not moved yet."""
    if not os.path.lexists(target):
        move_tree(source, target)
        sync_directory(os.path.dirname(target))
        return
    for base, _, files in os.walk(source):
        into = os.path.normpath(os.path.join(target, os.path.relpath(base, source)))
        os.makedirs(into, exist_ok=True)
        for name in files:
            if not os.path.lexists(os.path.join(into, name)):
                rename(os.path.join(base, name), os.path.join(into, name))
        sync_directory(into)


def bytes_only_in(folders: Iterable[str]) -> int:
    """Bytes on disk of the files that have no names outside these directories."""
    seen: dict[tuple[int, int], tuple[int, os.stat_result]] = {}
    for folder in folders:
        for base, _, names in os.walk(folder):
            for name in names:
                status = os.lstat(os.path.join(base, name))
                if stat.S_ISREG(status.st_mode):
                    key = (status.st_dev, status.st_ino)
                    seen[key] = (seen.get(key, (0, status))[0] + 1, status)
    return sum(status.st_blocks * _BLOCK_BYTES for count, status in seen.values() if count == status.st_nlink)
