"""`hfshard`: look at a checkpoint, and verify it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final

from hfshard import __version__
from hfshard.cli.output import print_message, printable, use_any_encoding
from hfshard.errors import HfshardError

EXIT_DONE: Final = 0
EXIT_FAILED: Final = 1
"""The checkpoint is damaged, or can't be read."""
EXIT_USAGE: Final = 2
"""The arguments make no sense; argparse uses the same number."""
_EXIT_SIGNAL: Final = 128
"""Added to a signal's number, as shells do."""
_SIGINT: Final = 2
_SIGPIPE: Final = 13


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The arguments without the program's name; None takes those of the process.

    Returns:
        The exit code: 0 done and whole, 1 damaged or failed, 2 bad usage.
    """
    use_any_encoding()
    parser = _parser()
    arguments = parser.parse_args(argv)
    if not os.path.isdir(arguments.directory):
        parser.error(_no_directory(arguments.directory))
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except HfshardError as error:
        print_message(str(error))
        return EXIT_FAILED
    except BrokenPipeError:  # `hfshard inspect DIR | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
        return _EXIT_SIGNAL + _SIGPIPE
    except OSError as error:
        print_message(f"{error}")
        return EXIT_FAILED
    except KeyboardInterrupt:
        return _EXIT_SIGNAL + _SIGINT
    return code


def _run(arguments: argparse.Namespace) -> int:
    # Only now: `hfshard --help` does not wait for torch.
    from hfshard.cli import commands

    run = {"inspect": commands.inspect, "verify": commands.verify}[arguments.command]
    return run(arguments)


def _no_directory(path: str) -> str:
    hint = "not there"
    if os.path.exists(path):
        hint = f"it is a file; did you mean '{os.path.dirname(path) or '.'}'?"
    return printable(f"'{path}' is no directory: {hint}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hfshard", description="Look at sharded checkpoints, and verify them.")
    parser.add_argument("--version", action="version", version=f"hfshard {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    inspect = commands.add_parser(
        "inspect",
        help="show shards, dtypes, the largest tensors, aliases and metadata",
        description="Show what a checkpoint consists of, from its index and headers: no tensor is read.",
    )
    _add_common(inspect)
    inspect.add_argument("--tensors", action="store_true", help="list every tensor, not the largest ones alone")

    verify = commands.add_parser(
        "verify",
        help="check every file of a checkpoint; exit 0: whole, 1: damaged",
        description="Check every file of a checkpoint. Exit 0: it is whole, 1: it is damaged, 2: bad usage.",
    )
    _add_common(verify)
    verify.add_argument(
        "--level",
        choices=("full", "structure"),
        default="full",
        help="full: every byte against its checksum (default); structure: all that costs no reading",
    )
    verify.add_argument("--no-progress", action="store_true", help="show no progress bar on the terminal")
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the checkpoint's directory")
    parser.add_argument("--variant", help='the variant of the weights, for example "fp16"')
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: one document on stdout")
