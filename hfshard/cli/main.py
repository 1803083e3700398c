"""`hfshard`: run a command, and turn its outcome into an exit code."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Final, NoReturn

from hfshard._util.arguments import check_slashes, is_store_address
from hfshard._util.text import did_you_mean, printable, without_url_secrets
from hfshard.cli import check_commands, diff_command, hub_commands, rewrite_commands, run_command
from hfshard.cli.output import (
    discard_stdout,
    library_messages,
    open_missing_streams,
    print_message,
    use_any_encoding,
)
from hfshard.cli.shared_arguments import Commands
from hfshard.constants import VERSION
from hfshard.errors import HfshardError, InvalidArgumentError, InvalidPathError, InvalidSizeError, InvalidSizeTypeError

EXIT_DONE: Final = 0
EXIT_FAILED: Final = 1
"""The checkpoint is damaged or cannot be read."""
EXIT_USAGE: Final = 2
"""The arguments are wrong; argparse uses the same number."""
_USAGE_ERRORS: Final = (InvalidArgumentError, InvalidSizeError, InvalidSizeTypeError, InvalidPathError)
"""Errors about arguments that only the work itself can reject, such as a target inside the source."""
_REPO_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
"""A possible name of a repo, in the place of a directory."""
_OPTION: Final = re.compile(r"--[a-z][a-z-]*")
"""An option in the help of a command."""
_EXIT_SIGNAL: Final = 128
"""Added to a signal's number, as shells do."""
_SIGINT: Final = 2
_SIGPIPE: Final = 13


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The arguments without the program's name. None: those of the process.

    Returns:
        The exit code: 0 done and intact, 1 damaged or failed, 2 bad usage; from `diff`, 1 different, 2 also failed.
        `run` does not return: the program replaces the process.
    """
    open_missing_streams()
    use_any_encoding()
    exit_failed = EXIT_FAILED
    try:
        arguments = _parse(sys.argv[1:] if argv is None else argv)
        exit_failed = arguments.exit_failed
        with library_messages():
            code: int = arguments.run(arguments)
        sys.stdout.flush()
    except _USAGE_ERRORS as error:
        print_message(str(error))
        return EXIT_USAGE
    except HfshardError as error:
        print_message(str(error))
        return exit_failed
    except BrokenPipeError:  # `hfshard inspect DIR | head`
        discard_stdout()
        return _EXIT_SIGNAL + _SIGPIPE
    except OSError as error:  # `hfshard inspect DIR > /dev/full`
        print_message(f"{error}")
        discard_stdout()
        return exit_failed
    except KeyboardInterrupt:
        return _EXIT_SIGNAL + _SIGINT
    except Exception:
        if exit_failed == EXIT_FAILED:  # Python's own exit code for an unexpected error
            raise
        traceback.print_exc()
        return exit_failed
    return code


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; an argument that a command does not know is that command's error, with its usage."""
    own, program = run_command.split_command_line(words)
    try:
        arguments, unknown = make_parser().parse_known_args(own)
    finally:
        sys.stdout.flush()  # `hfshard --help > /dev/full`
    command: argparse.ArgumentParser = arguments.parser
    if unknown:
        option = next((word.partition("=")[0] for word in unknown if word.startswith("--")), "")
        hint = did_you_mean(option, _OPTION.findall(command.format_help()))
        command.error(f"unrecognized arguments: {' '.join(unknown)}{hint and f'.{hint}'}")
    arguments.program = program
    if arguments.needs_directory and not (arguments.takes_address and is_store_address(arguments.directory)):
        is_there = os.path.exists if arguments.takes_file else os.path.isdir
        if not is_there(arguments.directory):
            command.error(_no_directory(arguments.directory))
    return arguments


def _no_directory(path: str) -> str:
    try:
        check_slashes(path, "directory")
    except InvalidPathError as error:
        return error.message
    hint = "it does not exist"
    name = os.path.basename(path.rstrip("/"))
    folder = os.path.dirname(path.rstrip("/")) or "."
    if os.path.isdir(folder) and os.access(folder, os.R_OK):
        question = did_you_mean(name, os.listdir(folder))
        hint += question and f".{question}"
    elif _REPO_ID.fullmatch(path):
        hint = f"it does not exist. To use a repo of the Hub, pull it first: hfshard pull {path} NEW_DIR"
    if is_store_address(path):
        hint = "this command needs a directory on a file system, not a store"
    if os.path.exists(path):
        hint = f"it is a file; did you mean '{os.path.dirname(path) or '.'}'?"
    return f"'{path}' is not a directory: {hint}"


# The parser.


class _Parser(argparse.ArgumentParser):
    """Parser, also of each command, that shows a rejected argument without its passwords and control characters."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(without_url_secrets(message)))


def make_parser() -> argparse.ArgumentParser:
    """Build the parser; each command is in one group of its help."""
    parser = _Parser(
        prog="hfshard",
        usage="hfshard [-h] [--version] COMMAND ...",
        epilog="`hfshard COMMAND --help` shows the arguments of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hfshard {VERSION}")
    # `diff` sets another one: its 1 means that something differs.
    parser.set_defaults(needs_directory=False, exit_failed=EXIT_FAILED)
    commands = Commands(parser)
    look = commands.group("inspect")
    check_commands.add_inspect(look)
    check_commands.add_show(look)
    diff_command.add_diff(look)
    rewrite_commands.add_checkpoints(look)
    check = commands.group("check")
    check_commands.add_verify(check)
    check_commands.add_sign(check)
    move = commands.group("move")
    hub_commands.add_push(move)
    hub_commands.add_pull(move)
    hub_commands.add_revisions(move)
    rewrite = commands.group("rewrite")
    rewrite_commands.add_reshard(rewrite)
    rewrite_commands.add_convert(rewrite)
    rewrite_commands.add_remove(rewrite)
    run_command.add_run(commands.group("run"))
    parser.description = f"Inspect, check, move and rewrite sharded checkpoints.\n\n{commands.show()}"
    return parser
