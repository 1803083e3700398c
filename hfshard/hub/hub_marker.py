"""The file that marks a directory as a hub: a directory without it is never taken for one."""

from __future__ import annotations

import os
import shutil
from typing import Final

from hfshard.constants import FORMAT_VERSION, HUB_MARKER, MAX_CONFIG_BYTES
from hfshard.disk.fsops import (
    locked_directory,
    make_directories,
    remove_empty_directories,
    rename,
    sync_directory,
    write_file,
)
from hfshard.disk.safe_open import read_small
from hfshard.errors import HubError, HubNotFoundError
from hfshard.format.strict_json import dump_json, parse_json_object
from hfshard.storage.disk.hub_place import has_hub_marker

STAGING: Final = ".staging"
"""Where a hub keeps what is not yet whole."""


def check_hub_marker(root: str) -> None:
    """Check that a directory is a hub that this version of hfshard can read.

    Raises:
        HubNotFoundError: The directory is not a hub, or does not exist.
        HubError: It was made by a newer hfshard.
    """
    if not has_hub_marker(root):
        what = "is not a directory hub" if os.path.isdir(root) else "does not exist"
        raise HubNotFoundError(
            f"'{root}' {what}. A hub is made by the first push to it: hfshard push CHECKPOINT {root}. A plain "
            "checkpoint is loaded from its directory, without a revision.",
            path=root,
        )
    marker = os.path.join(root, HUB_MARKER)
    raw, _ = read_small(marker, root, MAX_CONFIG_BYTES)
    value = parse_json_object(raw, path=marker, what="File", remedy='Write {"format": 1} into it.')
    if value.get("format") != FORMAT_VERSION:
        raise HubError(
            f"'{root}' is a directory hub of format {value.get('format')!r}, and this version of hfshard reads format "
            f"{FORMAT_VERSION}. Install a newer hfshard.",
            path=marker,
            expected=FORMAT_VERSION,
            actual=value.get("format"),
        )


def write_hub_marker(root: str, *, wait_seconds: float) -> bool:
    """Turn a new or empty directory into a hub.

    Returns:
        False if another process made it a hub in the meantime.

    Raises:
        HubError: There is something else in it, or it is a file.
        DirectoryLockedError: Another process held the directory's lock for all of `wait_seconds`.
    """
    try:
        made = make_directories(root)
    except (NotADirectoryError, FileExistsError) as error:
        raise HubError(f"'{root}' can't be made a hub: it, or something above it, is a file.", path=root) from error
    try:
        with locked_directory(root, wait_seconds=wait_seconds):
            if has_hub_marker(root):
                return False
            _check_empty(root)
            _write_marker_file(root)
            return True
    except BaseException:
        remove_empty_directories(made)
        raise


def _check_empty(root: str) -> None:
    left = set(os.listdir(root))
    staging = os.path.join(root, STAGING)
    if left == {STAGING} and os.path.isdir(staging) and set(os.listdir(staging)) <= {HUB_MARKER}:
        return  # left by a process that was killed
    if left:
        raise HubError(
            f"'{root}' is neither empty nor a directory hub: it holds '{min(left)}'. A hub keeps its own files there: "
            "give a new or empty directory.",
            path=root,
        )


def _write_marker_file(root: str) -> None:
    staging = os.path.join(root, STAGING)
    try:
        os.makedirs(staging, exist_ok=True)
        staged = os.path.join(staging, HUB_MARKER)
        if os.path.lexists(staged):
            os.unlink(staged)
        write_file(staged, dump_json({"format": FORMAT_VERSION}))
        rename(staged, os.path.join(root, HUB_MARKER))
        sync_directory(root)
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # if this fails, the first push does it
