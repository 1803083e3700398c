"""Files of weights that are open: hashed, and looked at once more when all that is wanted of them was read."""

from __future__ import annotations

import os

from hfshard._util.progress import ProgressCallback
from hfshard.errors import CheckpointChangedError
from hfshard.signing.files import SeenFile, seen_status
from hfshard.storage.format.index import FileDigest
from hfshard.storage.weights.safetensors_file import SafetensorsFile


class OpenWeights:
    """Which files were hashed, and as what they were found; to be used by several threads."""

    def __init__(self) -> None:
        self._hashed: dict[SafetensorsFile, tuple[SeenFile, str]] = {}

    def sha256(self, file: SafetensorsFile, progress_callback: ProgressCallback) -> str:
        """Hash a file, from its first byte to its last (raises as `checked_sha256`)."""
        with file.opened() as fd:
            before = seen_status(os.fstat(fd))
        found = _sha256(file, progress_callback)
        self._hashed[file] = before, found
        return found

    def confirm(self) -> None:
        """Compare the files with what they were when they were hashed.

        A file that got another name, or lost one, is hashed again: a save beside the load links and removes files.

        Raises:
            CheckpointChangedError: The bytes of one were written over, so that others may have been read.
        """
        for file, (before, found) in self._hashed.items():
            with file.opened() as fd:
                now = seen_status(os.fstat(fd))
            is_same = now == before or (now[:-1] == before[:-1] and _sha256(file, lambda count: None) == found)
            if not is_same:
                raise CheckpointChangedError(
                    f"'{file.path}' was written over after its signature had been checked, so that what was loaded "
                    "need not be what was signed. Load it again when nothing changes it.",
                    path=file.path,
                )


def _sha256(file: SafetensorsFile, progress_callback: ProgressCallback) -> str:
    return file.checked_sha256(FileDigest(), progress_callback, keep_cached=True)
