"""Arguments of `hfshard run`."""

from __future__ import annotations

from hfshard.cli.arguments.groups import CommandGroup
from hfshard.cli.run.words import COMMAND


def add_run(commands: CommandGroup) -> None:
    """Add `run`."""
    run = commands.add_parser(
        COMMAND,
        help="a program as it is, with hfshard on in it",
        usage="hfshard run [OPTIONS] SCRIPT | -m MODULE | -c CODE | COMMAND  [ARGUMENT ...]",
        description="Run a Python program, or a command such as torchrun, as it is, with hfshard.install() in it and "
        "in the Python processes that it starts. What follows the options is given to Python as it stands.",
        allow_abbrev=False,
    )
    run.set_defaults(needs_directory=False)
    run.add_argument(
        "--verify",
        choices=("none", "structure", "full"),
        default="structure",
        help="what from_pretrained checks (default: %(default)s)",
    )
    run.add_argument(
        "--checksum",
        choices=("sha256", "xxh3", "none"),
        default="sha256",
        help="checksum of the files that save_pretrained writes (default: %(default)s)",
    )
    run.add_argument("--quiet", action="store_true", help="do not say on stderr that hfshard is on")
