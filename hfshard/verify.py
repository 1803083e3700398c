"""Check a checkpoint and report everything that is wrong with it, not only the first thing."""

from __future__ import annotations

import os
from typing import Literal

from hfshard._util.progress import bytes_bar
from hfshard.constants import SAFETENSORS_SUFFIX
from hfshard.errors import InvalidArgumentError
from hfshard.storage.checkpoint.locate import weights_bytes
from hfshard.storage.checkpoint.report import VerifyReport
from hfshard.storage.checkpoint.verifier import Verifier
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
    if level not in ("structure", "full"):
        raise InvalidArgumentError(f"level must be 'structure' or 'full', got {level!r}.")
    directory = os.path.join(os.fspath(path), subfolder) if subfolder else os.fspath(path)
    verifier = Verifier(directory, WeightNames(variant), level)
    total = weights_bytes(directory, (SAFETENSORS_SUFFIX,)) if level == "full" else 0
    with bytes_bar("Verifying", total, progress if total else False) as progress_callback:
        verifier.run(progress_callback)
    return verifier.report()
