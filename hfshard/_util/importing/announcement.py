"""The one line on stderr that says that hfshard is on."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Final

from hfshard.constants import VERSION

ANNOUNCED: Final = "HFSHARD_ANNOUNCED"
"""The environment variable by which a process tells those that it starts that the line has been shown."""
_RANKS: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
"""In which torchrun, Slurm and MPI tell a process its rank; the first that is there counts."""


def announce(where: str = "") -> None:
    """Say that it is on: once, in the first process, and where a launcher started ranks, on the first of them.

    Args:
        where: In what, where it is not just this process: " in train.py".
    """
    ranks = [os.environ[name] for name in _RANKS if name in os.environ]
    if os.environ.get(ANNOUNCED) or ranks[:1] not in ([], ["0"]) or sys.stderr is None:
        return
    os.environ[ANNOUNCED] = "1"
    with suppress(OSError, ValueError):  # a stream that is closed
        sys.stderr.write(
            f"hfshard {VERSION} is on{where}: save_pretrained, push_to_hub and from_pretrained of transformers "
            "models are crash-safe and checked (hfshard.uninstall() turns it off)\n"
        )
        sys.stderr.flush()
