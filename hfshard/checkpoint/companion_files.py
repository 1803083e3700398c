"""Companion files, which go along with a checkpoint: tokenizer, README, code."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from functools import partial

from hfshard._util.progress import ProgressCallback
from hfshard.constants import ADAPTER_CONFIG_NAME, COPY_BYTES, MAX_COMPANION_BYTES, README, WEIGHTS_SUFFIXES
from hfshard.disk.byte_source import ByteSource, StreamSource, contents_equal
from hfshard.disk.fsops import copy_mode, sync
from hfshard.disk.safe_open import open_reader
from hfshard.errors import SaveDirectoryError
from hfshard.format.file_names import INDEX_FILE
from hfshard.format.stored_save import objects_of_saves

logger = logging.getLogger(__name__)


def copy_companion(
    file: ByteSource, target: str, like: os.stat_result | None, progress_callback: ProgressCallback | None
) -> None:
    """Copy a file from any place into a new file on disk, durably; mode and group are those of `like`."""
    with file.open() as reading, open(target, "xb") as writing:
        while block := reading.read(COPY_BYTES):
            writing.write(block)
            if progress_callback is not None:
                progress_callback(len(block))
        writing.flush()
        copy_mode(writing.fileno(), like)
        sync(writing.fileno(), target)


def list_companion_files(directory: str, but: Collection[str]) -> dict[str, ByteSource]:
    """List the files at the top level of a checkpoint's directory that are not weights.

    Left out are weights and indexes of any library, objects of a save into a store, files over 256 MiB (data sets),
    names that begin with a dot (git's files, secrets), folders, and the config of an adapter, whose weights do not go
    along. A link is followed.

    Args:
        directory: The checkpoint's directory.
        but: Names to leave out.

    Returns:
        Name -> file, sorted by name; one that is not a regular file when it is opened is an error, too.

    Raises:
        DamagedCheckpointError: A link is broken, or a file can't be opened.
    """
    found: dict[str, ByteSource] = {}
    names = os.listdir(directory)
    for name in sorted(set(names) - objects_of_saves(names)):
        path = os.path.join(directory, name)
        if not is_companion_name(name, but):
            continue
        if os.path.exists(path) and not os.path.isfile(path):
            if not os.path.isdir(path):
                logger.warning("'%s' is a pipe, a socket or a device: it is not copied.", path)
            continue
        open_reader(path, directory).close()
        size = os.stat(path).st_size
        if is_small_enough_to_copy(path, size):
            found[name] = StreamSource(size, None, partial(open_reader, path, directory))
    return found


def is_companion_name(name: str, but: Collection[str]) -> bool:
    """Return whether a file of this name, directly next to a checkpoint, is a companion file."""
    if "/" in name or name.startswith(".") or name == ADAPTER_CONFIG_NAME or name in but:
        return False
    return not (name.endswith(WEIGHTS_SUFFIXES) or INDEX_FILE.fullmatch(name))


def is_small_enough_to_copy(path: str, size: int) -> bool:
    """Return whether a file is small enough to go along with a checkpoint; warn if it is not."""
    if size > MAX_COMPANION_BYTES:
        logger.warning("'%s' has %d bytes, too many for a companion file: it is not copied.", path, size)
    return size <= MAX_COMPANION_BYTES


def reject_companion_conflicts(
    files: Mapping[str, ByteSource], directory: str, taken: Mapping[str, ByteSource]
) -> None:
    """Reject files that would replace a different file of a directory; a README there is kept, and is no conflict.

    Args:
        files: The files to copy, by name.
        directory: The target, for the message.
        taken: The existing files of these names.

    Raises:
        SaveDirectoryError: A name is taken.
    """
    for name, file in files.items():
        if name != README and name in taken and not contents_equal(file, taken[name]):
            raise SaveDirectoryError(
                f"'{directory}/{name}' already exists and differs from the checkpoint's '{name}', "
                "which would replace it. Move it away, or pass another directory.",
                path=f"{directory}/{name}",
            )
