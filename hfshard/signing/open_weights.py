"""Files of weights that are open: hashed, and looked at once more when all that is wanted of them was read."""

from __future__ import annotations

import os

from hfshard._util.progress import ProgressCallback
from hfshard.errors import CheckpointChangedError
from hfshard.format.index import FileDigest
from hfshard.shards.shard_file import SafetensorsFile
from hfshard.signing.files import SeenFile, seen_status


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
