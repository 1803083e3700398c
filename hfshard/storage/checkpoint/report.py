"""The report of a check of a whole checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a checkpoint."""

    file: str
    """Path of the file."""
    tensor: str | None
    """FQN, if it is about one tensor."""
    message: str
    """What, where, and what to do."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify_checkpoint` found."""

    directory: str
    files: tuple[str, ...]
    """Names of the files that were checked."""
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    """What could not be checked, and files that belong to no checkpoint."""
    checked_bytes: int
    """Bytes whose checksum was compared."""
    signed_by: str | None = None
    """Who has signed all of it, where that was asked, every byte was compared, and nothing is wrong."""
    checkpoints: tuple[VerifyReport, ...] = ()
    """Of a run: the report of each checkpoint, in the order in which they were saved, then that of a model next to
    them. All that they say is in this report too, with paths in the run for files."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems
