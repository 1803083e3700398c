"""Check a checkpoint and report everything that is wrong with it, not only the first thing."""

from __future__ import annotations

import os
from typing import Literal

from hfshard._util.paths import absolute_path
from hfshard.storage.checkpoint.report import VerifyReport
from hfshard.storage.checkpoint.verifier import verify_directory
from hfshard.storage.format.names import WeightNames


def verify_checkpoint(
    path: str | os.PathLike[str],
    *,
    variant: str | None = None,
    subfolder: str = "",
    level: Literal["structure", "full"] = "full",
    progress: bool | None = None,
) -> VerifyReport:
    """Check a checkpoint in a directory and report everything that is wrong.

    Args:
        path: A directory.
        variant, subfolder: As in `from_pretrained`.
        level: "structure": names, sizes, headers and fingerprints; "full": the checksum of every file too. A checkpoint
            that hfshard did not write has none: that is a warning.
        progress: Whether to show a bar on stderr; None: only on a terminal.

    Returns:
        The report. Damage is reported there, not raised.

    Raises:
        CheckpointNotFoundError: There is no such directory, or it holds no weights.
        InvalidArgumentError: `level` has another value.

    Example:
        report = hfshard.verify_checkpoint("out")
        assert report.ok, report.problems
    """
    directory = absolute_path(path)
    if subfolder:
        directory = os.path.join(directory, subfolder)
    return verify_directory(directory, WeightNames(variant), level, progress)
