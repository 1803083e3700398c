"""Reports of a check and of a removal, as plain data that is imported without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a checkpoint."""

    file: str
    """Path of the file."""
    tensor: str | None
    """FQN, if the problem is about one tensor."""
    message: str
    """Description of the problem, its location, and the remedy."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Findings of `verify_checkpoint`."""

    directory: str
    files: tuple[str, ...]
    """Names of the files that were checked."""
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    """Checks that were not possible, and files that belong to no checkpoint."""
    checked_bytes: int
    """Bytes whose checksum was compared."""
    signed_by: str | None = None
    """Signer of all files, if a signature was required, every byte was compared, and nothing is wrong."""
    checkpoints: tuple[VerifyReport, ...] = ()
    """For a run: the report of each checkpoint, in the order in which they were saved, then that of a model next to
    them. This report includes all their findings, with the files' paths in the run."""

    @property
    def ok(self) -> bool:
        """True if nothing is wrong."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class RemovalReport:
    """Report of a removal that was done, or would be."""

    place: str
    """The directory or address."""
    removed: Mapping[str, int]
    """Path in the place -> bytes."""
    kept: Mapping[str, str]
    """Path of a file or folder that stays in the place -> why; a folder's ends in "/"."""
    unfinished_uploads: tuple[str, ...] = ()
    """Names of objects with unfinished uploads; services do not report the sizes of those."""
    is_done: bool = False
    """Whether it was removed; False for a dry run."""

    @property
    def size(self) -> int:
        """Bytes of all files that were removed, or would be."""
        return sum(self.removed.values())

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to remove."""
        return not self.removed and not self.unfinished_uploads
