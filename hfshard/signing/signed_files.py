"""The files that a signature lists, those that a load reads, and their sha256."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hfshard._util.progress import ProgressCallback
from hfshard._util.threads import cancellable, run_in_threads
from hfshard.checkpoint.folder import LocalFolder
from hfshard.constants import (
    BIN_SUFFIX,
    FILES_AT_ONCE,
    SAFETENSORS_SUFFIX,
    SIGNATURE_NAME,
    TRAINING_FILES,
    WEIGHTS_SUFFIXES,
)
from hfshard.disk.byte_source import sha256_of_reader
from hfshard.errors import CheckpointChangedError, SignatureError
from hfshard.format.file_names import INDEX_FILE
from hfshard.format.index import FileDigest
from hfshard.shards.shard_file import SafetensorsFile

NEVER_SIGNED: Final = (SIGNATURE_NAME, ".cache", ".git", ".gitattributes", ".github", ".gitignore")
"""Names at the top of the directory: the signature, git's files, which model-signing leaves out too, and files of
huggingface_hub and hfshard."""

TEMPORARY_NAMES: Final = frozenset({"__pycache__", ".DS_Store"})
"""Names, at any depth, of files that tools create when they read a directory; a push leaves them out."""

_MAX_SIGNATURE_BYTES: Final = 256 * 1024 * 1024
"""Size of the largest signature that is read: a million entries of 200 bytes. Checking takes 8 times its bytes."""
SMALL_SIGNATURE_BYTES: Final = 8 * 1024 * 1024
"""Size up to which a signature is always read: 20,000 files or parts of files, which may be missing."""
_FILE_BYTES: Final = 4096
"""Bytes allowed for each existing file: a path on Linux has no more, and most have a hundred."""
_PARTS: Final = 1024
"""Bytes of the files per allowed byte of signature: they may be signed in parts, such as 300 bytes for each MB."""

FileIdentity = tuple[int, int, int, int, int]
"""Device, inode, size, and the times (ns) of the last change of the bytes, and of anything about the file."""


@dataclass(frozen=True, slots=True)
class SignableFiles:
    """The files below a directory."""

    names: tuple[str, ...]
    """Paths of files, links included, in order."""
    left_out: tuple[str, ...]
    """Paths that no signature covers."""


def is_signable(name: str) -> bool:
    """Return whether a signature covers a path of `list_files`."""
    parts = name.split("/")
    return parts[0] not in NEVER_SIGNED and TEMPORARY_NAMES.isdisjoint(parts)


def list_files(directory: str, *, takes_debris: bool = False) -> SignableFiles:
    """List the files below a directory that a signature covers; and those of `TEMPORARY_NAMES`, if it takes debris.

    Raises:
        SignatureError: An entry is neither a file nor a link to one, or its name is not printable; or a folder can't be
            listed.
    """
    names: list[str] = []
    left_out = set(NEVER_SIGNED)
    debris = frozenset() if takes_debris else TEMPORARY_NAMES
    for above, folders, files in os.walk(directory, onerror=_reject_unlisted):
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
                "Remove it, or replace it with a file.",
                path=path,
            )
        if not name.isprintable():
            raise SignatureError(f"The name of {path!r} is not printable. Rename the file.", path=path)
    return SignableFiles(tuple(sorted(names)), tuple(sorted(left_out)))


def _reject_unlisted(error: OSError) -> None:
    raise SignatureError(
        f"Cannot list '{error.filename}': {error.strerror}. Make it readable, or remove it.", path=error.filename
    ) from error


def max_signature_bytes(files: int, total_bytes: int) -> int:
    """Return the limit for reading a signature over a number of files with a total size."""
    return min(_MAX_SIGNATURE_BYTES, SMALL_SIGNATURE_BYTES + files * _FILE_BYTES + total_bytes // _PARTS)


def hash_files(
    directory: str, names: Collection[str], progress_callback: ProgressCallback | None = None
) -> dict[str, tuple[str, FileIdentity]]:
    """Compute the sha256 of files of a directory, several at once; the callback gets the number of bytes of each block.

    Returns:
        Path -> sha256 in hex, and the identity that tells the file from a replacement.

    Raises:
        MissingShardError, UnsafePathError, DamagedCheckpointError: One is missing, or is not a file of the directory.
    """
    hashed = run_in_threads(
        lambda name, cancelled: _hash_file(directory, name, cancellable(progress_callback, cancelled)),
        names,
        FILES_AT_ONCE,
    )
    return dict(zip(names, hashed, strict=True))


def file_identity(path: str) -> FileIdentity | None:
    """Return the identity that tells a file from a replacement; None if there is no file."""
    try:
        return status_identity(os.stat(path))
    except OSError:
        return None


def status_identity(status: os.stat_result) -> FileIdentity:
    """Return the values that tell a file from another, and from itself with other bytes."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _hash_file(directory: str, name: str, progress_callback: ProgressCallback) -> tuple[str, FileIdentity]:
    with LocalFolder(directory).open(name) as file:
        seen = status_identity(os.fstat(file.fileno()))
        return sha256_of_reader(file, progress_callback), seen


# Open files of weights: hashed, and checked once more when everything needed has been read from them.


class OpenWeights:
    """The hashed files and their state at that time; may be used by several threads."""

    def __init__(self) -> None:
        self._seen: dict[SafetensorsFile, FileIdentity] = {}

    def sha256(self, file: SafetensorsFile, progress_callback: ProgressCallback) -> str:
        """Hash a file, from its first byte to its last, with the errors of `checked_sha256`."""
        with file.opened() as fd:
            before = status_identity(os.fstat(fd))
        self._seen[file] = before
        return file.checked_sha256(FileDigest(), progress_callback, keep_cached=True)

    def confirm(self) -> None:
        """Compare the files with their state when they were hashed.

        A write changes a file's ctime, which cannot be set back. So overwritten bytes are noticed, even with their old
        mtime restored, and also a second name of the file, as a concurrent save gives to shards that stay. Not every
        write through a shared mapping changes it; `SafetensorsFile.check_copied` notices those, in copied bytes.

        Raises:
            CheckpointChangedError: A file was touched, so that other bytes may have been read.
        """
        for file, before in self._seen.items():
            with file.opened() as fd:
                now = status_identity(os.fstat(fd))
            if now != before:
                raise CheckpointChangedError(
                    f"'{file.path}' was changed after its signature was checked, so what was loaded may not be what "
                    "was signed. Retry when nothing changes it.",
                    path=file.path,
                )


# Files that a load may read along with the weights that it opens, and code named in a config.


_OWN_STEMS: Final = ("model.", "model-", "pytorch_model.", "pytorch_model-", "optimizer.", "optimizer-")
"""Beginnings of the names of weights that are read only by a load that opens, and then checks, them."""

_READ_WEIGHTS: Final = (SAFETENSORS_SUFFIX, BIN_SUFFIX, ".pt", ".pth", ".ckpt")
"""Suffixes of weights that a class may read along with a checkpoint's own, as an adapter; torch reads no others."""

_DOCUMENTS: Final = (".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".pdf")
"""Suffixes of files for people, which no load reads."""

_FOR_PROGRAMS: Final = (".py", ".json", ".jinja", ".txt", ".model", *_READ_WEIGHTS)
"""Suffixes of files that are rejected if not signed, even if the signer left them out on purpose."""

_CODE_KEY: Final = "auto_map"
"""Key of a config that names code."""

_OTHER_REPO: Final = "--"
"""Separator, in a config, between a repo and the name of code in it."""


def may_be_read(name: str, *, has_code: bool = False) -> bool:
    """Return whether a load may read a file besides the checkpoint's own weights; its code may read other weights."""
    *folders, last = name.split("/")
    if _is_for_people(name):
        return False
    if not folders and last == SIGNATURE_NAME:
        return False
    if last.endswith(WEIGHTS_SUFFIXES):
        is_own = not folders and last.startswith(_OWN_STEMS)
        return not is_own and (has_code or (not folders and last.endswith(_READ_WEIGHTS)))
    return True


def is_needed(name: str) -> bool:
    """Return whether a file that a load may read must exist; files of other weights and of training may be missing."""
    last = os.path.basename(name)
    is_of_weights = last.endswith(WEIGHTS_SUFFIXES) or INDEX_FILE.fullmatch(last) is not None
    return may_be_read(name) and not is_of_weights and last not in TRAINING_FILES


def is_optional(name: str) -> bool:
    """Return whether a signer may leave a file out on purpose, because no load uses it."""
    return _is_for_people(name) or not name.endswith(_FOR_PROGRAMS)


def remote_code_references(config: bytes) -> list[str]:
    """List the references to code of other repos in a config, and in the configs nested in it."""
    try:
        return [text for text in _texts_below(json.loads(config), is_code=False) if _OTHER_REPO in text]
    except (ValueError, RecursionError):
        return []  # the reader of the config reports the error


def _is_for_people(name: str) -> bool:
    parts = name.split("/")
    return any(part.startswith(".") or part in TEMPORARY_NAMES for part in parts) or name.lower().endswith(_DOCUMENTS)


def _texts_below(value: Any, *, is_code: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _texts_below(one, is_code=is_code or key == _CODE_KEY)
    elif isinstance(value, list):
        for one in value:
            yield from _texts_below(one, is_code=is_code)
    elif is_code and isinstance(value, str):
        yield value
