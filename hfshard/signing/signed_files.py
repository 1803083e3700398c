"""The files that a signature lists, those that a load reads, and their sha256."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hfshard._util.progress import ProgressCallback
from hfshard._util.threads import cancellable, in_threads
from hfshard.constants import (
    BIN_SUFFIX,
    COPY_BYTES,
    FILES_AT_ONCE,
    SAFETENSORS_SUFFIX,
    SIGNATURE_NAME,
    WEIGHTS_SUFFIXES,
)
from hfshard.disk.safe_open import open_regular
from hfshard.errors import CheckpointChangedError, SignatureError
from hfshard.format.file_names import INDEX_FILE
from hfshard.format.index import FileDigest
from hfshard.shards.shard_file import SafetensorsFile

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


# Files of weights that are open: hashed, and looked at once more when all that is wanted of them was read.


class OpenWeights:
    """Which files were hashed, and as what they were found; to be used by several threads."""

    def __init__(self) -> None:
        self._seen: dict[SafetensorsFile, SeenFile] = {}

    def sha256(self, file: SafetensorsFile, progress_callback: ProgressCallback) -> str:
        """Hash a file, from its first byte to its last (raises as `checked_sha256`)."""
        with file.opened() as fd:
            before = seen_status(os.fstat(fd))
        self._seen[file] = before
        return file.checked_sha256(FileDigest(), progress_callback, keep_cached=True)

    def confirm(self) -> None:
        """Compare the files with what they were when they were hashed.

        A write changes a file's ctime, which nobody can set back: bytes that were written over, and put back with their
        old mtime, are noticed; and also another name of the file, as a save beside the load gives to shards that stay.
        Not every write through a shared mapping does: `SafetensorsFile.check_copied` notices those, in what is copied.

        Raises:
            CheckpointChangedError: One was touched, so that other bytes may have been read.
        """
        for file, before in self._seen.items():
            with file.opened() as fd:
                now = seen_status(os.fstat(fd))
            if now != before:
                raise CheckpointChangedError(
                    f"'{file.path}' was touched after its signature had been checked, so that what was loaded need not "
                    "be what was signed. Load it again when nothing changes it.",
                    path=file.path,
                )


# Which files a load may read beside the weights that it opens, and what a config says of code.


_OWN_STEMS: Final = ("model.", "model-", "pytorch_model.", "pytorch_model-", "optimizer.", "optimizer-")
"""How weights begin that nothing reads but a load that opens them, and looks at them then."""

_READ_WEIGHTS: Final = (SAFETENSORS_SUFFIX, BIN_SUFFIX, ".pt", ".pth", ".ckpt")
"""Weights that a class may read beside a checkpoint's own, such as an adapter; torch reads no others."""

_DOCUMENTS: Final = (".md", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".pdf")
"""Files for people: no load reads them."""

_FOR_PROGRAMS: Final = (".py", ".json", ".jinja", ".txt", ".model", *_READ_WEIGHTS)
"""Files that are refused, where they are not signed, though who signed left them out on purpose."""

_TRAINING: Final = frozenset({"checkpoint.json", "training_state.json"})
"""Files of a training checkpoint that no model needs, so that a pull of the model leaves them out."""

_CODE_KEY: Final = "auto_map"
"""Where a config names code."""

_OTHER_REPO: Final = "--"
"""What stands in a config between a repo and the name of code in it."""


def is_read(name: str, *, has_code: bool = False) -> bool:
    """Whether a load may read a file that is none of the checkpoint's own weights; its code may read any other."""
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
    """Whether such a file may not be missing: those of other weights may, and what training keeps."""
    last = os.path.basename(name)
    is_of_weights = last.endswith(WEIGHTS_SUFFIXES) or INDEX_FILE.fullmatch(last) is not None
    return is_read(name) and not is_of_weights and last not in _TRAINING


def may_be_left_out(name: str) -> bool:
    """Whether who signs may leave a file out on purpose, as no load takes it."""
    return _is_for_people(name) or not name.endswith(_FOR_PROGRAMS)


def references_elsewhere(config: bytes) -> list[str]:
    """The names of code of other repos in a config, and in those that it holds."""
    try:
        return [text for text in _texts_below(json.loads(config), is_code=False) if _OTHER_REPO in text]
    except (ValueError, RecursionError):
        return []  # whoever reads it says so


def _is_for_people(name: str) -> bool:
    parts = name.split("/")
    return any(part.startswith(".") or part in DEBRIS for part in parts) or name.lower().endswith(_DOCUMENTS)


def _texts_below(value: Any, *, is_code: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _texts_below(one, is_code=is_code or key == _CODE_KEY)
    elif isinstance(value, list):
        for one in value:
            yield from _texts_below(one, is_code=is_code)
    elif is_code and isinstance(value, str):
        yield value
