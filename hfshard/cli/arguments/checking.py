"""Arguments of the commands that say whether a checkpoint is whole and whose it is."""

from __future__ import annotations

from hfshard.cli.arguments.groups import CommandGroup
from hfshard.cli.arguments.shared import add_checkpoint, add_format, add_no_progress, add_variant


def add_verify(commands: CommandGroup) -> None:
    """Add `verify`."""
    verify = commands.add_parser(
        "verify",
        help="every file of a checkpoint or of a training run",
        description="Check every file of a checkpoint: of a training checkpoint also the optimizer's and all others; "
        "of a run all its checkpoints. Exit 0: it is whole, 1: it is damaged, 2: bad usage.",
    )
    add_checkpoint(verify)
    add_variant(verify)
    add_format(verify)
    verify.add_argument(
        "--level",
        choices=("full", "structure"),
        default="full",
        help="full: every byte against its checksum (default); structure: what can be checked without reading tensors",
    )
    add_no_progress(verify)
