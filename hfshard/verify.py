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
    """Check a checkpoint in a directory and report all that is wrong.

    Args:
        path: A directory.
        variant, subfolder: As in `from_pretrained`.
        level: "structure": names, sizes, headers, fingerprints; "full": the checksum of every file too. A checkpoint
            that hfshard did not write has none: that is a warning.
        progress: A bar on stderr: None: on a terminal.

    Returns:
        The report; it never raises for damage.

    Raises:
        CheckpointNotFoundError: There is no such directory, or no weights in it.
        InvalidArgumentError: Another level.
    """
    if level not in ("structure", "full"):
        raise InvalidArgumentError(f"level must be 'structure' or 'full', and is {level!r}.")
    directory = os.path.join(os.fspath(path), subfolder) if subfolder else os.fspath(path)
    checking = Verifier(directory, WeightNames(variant), level)
    total = weights_bytes(directory, (SAFETENSORS_SUFFIX,)) if level == "full" else 0
    with bytes_bar("Verifying", total, progress if total else False) as progress_callback:
        checking.run(progress_callback)
    return checking.report()
