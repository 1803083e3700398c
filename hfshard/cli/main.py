"""`hfshard`: run a command, and turn its outcome into an exit code."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Final

from hfshard._util.addresses import check_slashes, is_store_address
from hfshard.cli.arguments import make_parser
from hfshard.cli.output import discard_stdout, open_missing_streams, print_message, use_any_encoding
from hfshard.cli.run_command import COMMAND, split_command_line
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
    parser = make_parser()
    parser.set_defaults(exit_failed=EXIT_FAILED)  # `diff` sets another one: its 1 means that something differs
    own, program = split_command_line(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(own)
    arguments.program = program
    if arguments.needs_directory and not (arguments.takes_address and is_store_address(arguments.directory)):
        arguments.directory = os.path.expanduser(arguments.directory)  # not absolute: messages show it as it was typed
        is_there = os.path.exists if arguments.takes_file else os.path.isdir
        if not is_there(arguments.directory):
            parser.error(_no_directory(arguments.directory))
    try:
        code = _run_command(arguments)
        sys.stdout.flush()
    except _USAGE_ERRORS as error:
        print_message(str(error))
        return EXIT_USAGE
    except HfshardError as error:
        print_message(str(error))
        return int(arguments.exit_failed)
    except BrokenPipeError:  # `hfshard inspect DIR | head`
        discard_stdout()
        return _EXIT_SIGNAL + _SIGPIPE
    except OSError as error:  # `hfshard inspect DIR > /dev/full`
        print_message(f"{error}")
        discard_stdout()
        return int(arguments.exit_failed)
    except KeyboardInterrupt:
        return _EXIT_SIGNAL + _SIGINT
    except Exception:
        if arguments.exit_failed == EXIT_FAILED:  # Python's own exit code for an unexpected error
            raise
        traceback.print_exc()
        return int(arguments.exit_failed)
    return code


def _run_command(arguments: argparse.Namespace) -> int:
    # Only now: `hfshard --help` does not wait for torch.
    if arguments.command == COMMAND:
        from hfshard.cli.run_command import run as become

        become(arguments)
    from hfshard.cli import check_commands, hub_commands, rewrite_commands
    from hfshard.cli import diff_command as diff_command

    run = {
        "inspect": check_commands.inspect,
        "show": check_commands.show,
        "diff": diff_command.diff,
        "verify": check_commands.verify,
        "sign": check_commands.sign,
        "checkpoints": rewrite_commands.checkpoints,
        "remove": rewrite_commands.remove,
        "reshard": rewrite_commands.reshard,
        "convert": rewrite_commands.convert,
        "push": hub_commands.push,
        "pull": hub_commands.pull,
        "revisions": hub_commands.revisions,
    }[arguments.command]
    return run(arguments)


def _no_directory(path: str) -> str:
    try:
        check_slashes(path, "directory")
    except InvalidPathError as error:
        return error.message
    hint = "it does not exist"
    if _REPO_ID.fullmatch(path):
        hint = f"it does not exist. To use a repo of the Hub, pull it first: hfshard pull {path} NEW_DIR"
    if is_store_address(path):
        hint = "this command needs a directory on a file system, not a store"
    if os.path.exists(path):
        hint = f"it is a file; did you mean '{os.path.dirname(path) or '.'}'?"
    return f"'{path}' is not a directory: {hint}"
