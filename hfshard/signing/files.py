"""The files of a directory as a signature lists them, and their sha256."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from hfshard._util.progress import ProgressCallback
from hfshard._util.threads import cancellable, in_threads
from hfshard.constants import COPY_BYTES, FILES_AT_ONCE, SIGNATURE_NAME
from hfshard.disk.safe_open import open_regular
from hfshard.errors import SignatureError

NEVER_SIGNED: Final = (SIGNATURE_NAME, ".cache", ".git", ".gitattributes", ".github", ".gitignore")
"""At the top of the directory: the signature, git's files, which model-signing leaves out too, and what huggingface_hub
and hfshard keep there."""

DEBRIS: Final = frozenset({"__pycache__", ".DS_Store"})
"""What is made by looking at a directory, wherever it is; a push leaves it out."""

_MAX_SIGNATURE_BYTES: Final = 256 * 1024 * 1024
"""The largest signature that is read: a million files of 200 bytes an entry. What checks it takes 8 times its bytes."""
SMALL_SIGNATURE_BYTES: Final = 8 * 1024 * 1024
"""A signature that is read whatever it belongs to: of 20,000 files or parts of them, which may be missing."""
_FILE_BYTES: Final = 4096
"""What a file that is there adds: paths on Linux have no more, and most have a hundred."""
_PARTS: Final = 1024
"""One byte for so many bytes of the files, which may be signed in parts: 300 bytes tell one, of 1 MB, say."""

SeenFile = tuple[int, int, int, int, int]
"""Device, inode, size, and the times (ns) of the last change of the bytes, and of anything about the file."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies below a directory."""

    names: tuple[str, ...]
    """Paths of files, links included, in order."""
    left_out: tuple[str, ...]
    """Paths that no signature covers."""


def may_be_signed(name: str) -> bool:
    """Whether a signature covers a path, as `list_files` lists it."""
    parts = name.split("/")
    return parts[0] not in NEVER_SIGNED and DEBRIS.isdisjoint(parts)


def list_files(directory: str, *, takes_debris: bool = False) -> Listing:
    """List the files below a directory that a signature covers.

    Args:
        directory: Where to look.
        takes_debris: List what was made by looking at the directory, too.

    Raises:
        SignatureError: One is neither a file nor a link to one, or its name is not UTF-8; or a folder can't be listed.
    """
    names: list[str] = []
    left_out = set(NEVER_SIGNED)
    debris = frozenset() if takes_debris else DEBRIS
    for above, folders, files in os.walk(directory, onerror=_refuse_unlisted):
        below = os.path.relpath(above, directory)
        place = "" if below == os.curdir else f"{below}/"
        left_out |= {place + name for name in (*folders, *files) if name in debris}
        names += [place + name for name in files if place + name not in left_out]
        names += [place + name for name in folders if os.path.islink(os.path.join(above, name))]
        folders[:] = [name for name in folders if place + name not in left_out]
    for name in names:
        path = os.path.join(directory, name)
        if not os.path.isfile(path):
            raise SignatureError(
                f"'{path}' is a broken link, a link to a folder, a pipe or a device, which no signature can cover. "
                "Remove it, or put a file in its place.",
                path=path,
            )
        if not name.isprintable():
            raise SignatureError(f"The name of {path!r} can't be printed. Rename the file.", path=path)
    return Listing(tuple(sorted(names)), tuple(sorted(left_out)))


def _refuse_unlisted(error: OSError) -> None:
    raise SignatureError(
        f"'{error.filename}' can't be listed: {error.strerror}. Make it readable, or remove it.", path=error.filename
    ) from error


def most_signature_bytes(files: int, total_bytes: int) -> int:
    """The largest signature that is read where so many files lie, of so many bytes together."""
    return min(_MAX_SIGNATURE_BYTES, SMALL_SIGNATURE_BYTES + files * _FILE_BYTES + total_bytes // _PARTS)


def hash_files(
    directory: str, names: Collection[str], progress_callback: ProgressCallback | None = None
) -> dict[str, tuple[str, SeenFile]]:
    """Compute the sha256 of files, several at once.

    Args:
        directory: Theirs.
        names: Paths in it.
        progress_callback: Called with the number of bytes of each block.

    Returns:
        Path -> sha256 in hex, and what tells the file from another that takes its place.

    Raises:
        MissingShardError, UnsafePathError, DamagedCheckpointError: One is not there, or is no file of the directory.
    """
    hashed = in_threads(
        lambda name, cancelled: _hash_file(directory, name, cancellable(progress_callback, cancelled)),
        names,
        FILES_AT_ONCE,
    )
    return dict(zip(names, hashed, strict=True))


def seen_file(path: str) -> SeenFile | None:
    """What tells a file from another that takes its place; None where there is none."""
    try:
        return seen_status(os.stat(path))
    except OSError:
        return None


def seen_status(status: os.stat_result) -> SeenFile:
    """What tells a file from another, and from itself with other bytes."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _hash_file(directory: str, name: str, progress_callback: ProgressCallback) -> tuple[str, SeenFile]:
    fd = open_regular(os.path.join(directory, name), directory)
    try:
        hasher = hashlib.sha256()
        seen = seen_status(os.fstat(fd))
        while block := os.read(fd, COPY_BYTES):
            hasher.update(block)
            progress_callback(len(block))
        return hasher.hexdigest(), seen
    finally:
        os.close(fd)
