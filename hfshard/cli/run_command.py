"""`hfshard run`: replace this process with a program, with hfshard enabled in every Python process of it."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Final, NoReturn

from hfshard._util.lazy_imports import ANNOUNCED, announce_once
from hfshard._util.text import printable, without_url_secrets
from hfshard.cli.shared_arguments import CommandGroup, add_checksum, add_verify_level
from hfshard.errors import InvalidArgumentError, InvalidPathError, printable_message

_FOLDER: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")
_SETTINGS: Final = "HFSHARD_RUN"
"""The variable with the options, as JSON: `sitecustomize.py` reads it."""
_IGNORING: Final = "IES"
"""Letters of the options that make Python ignore PYTHONPATH, or run no sitecustomize."""
_FIRST_LINE_BYTES: Final = 256
"""Bytes that Linux reads of the line that names a script's interpreter."""
_FILE_ENDINGS: Final = (".py", ".pyc", ".pyw", ".pyz", ".zip")
"""Endings of files that Python runs: a word with one of them is a file, even if there is a command of that name."""


def add_run(commands: CommandGroup) -> None:
    """Add `run`."""
    parser = commands.add_parser(
        COMMAND,
        run,
        help="run a program unchanged, with hfshard enabled",
        usage="hfshard run [OPTIONS] SCRIPT | -m MODULE | -c CODE | COMMAND  [ARGUMENT ...]",
        description="Run a Python program, or a command such as torchrun, unchanged, with hfshard.install() in it and "
        "in the Python processes that it starts. What follows the options is passed to Python unchanged.",
        allow_abbrev=False,
    )
    add_verify_level(parser, "what from_pretrained checks")
    add_checksum(parser, "checksum of the files that save_pretrained writes")
    parser.add_argument("--quiet", action="store_true", help="do not report on stderr that hfshard is enabled")


def run(arguments: argparse.Namespace) -> NoReturn:
    """Replace the process with the program: process id, streams and directory stay, and the exit code is its own.

    Args:
        arguments: `program` has the words for Python, or a command of this environment with its words.

    Raises:
        InvalidArgumentError: There is no program, or Python is told to ignore its environment.
        InvalidPathError: hfshard is in a folder that can't be on PYTHONPATH; or the program is an address.
        OSError: The program can't be started.
    """
    given_options, target, letters = split_python_options(arguments.program)
    if not target:
        raise InvalidArgumentError("Nothing to run. Pass a script, -m MODULE, -c CODE, or a command such as torchrun.")
    if "://" in target[0] and not target[0].startswith("-") and not os.path.exists(target[0]):
        shown = without_url_secrets(target[0])
        raise InvalidPathError(f"'{shown}' is an address, not a program. Pass a path, or -m MODULE.", path=shown)
    path = None if given_options else _find_command(target[0])
    is_found = path is not None or _does_python_find(target)
    if path is None:
        own_options, _, own_letters = split_python_options(sys.orig_argv[1:])
        path = sys.executable
        command = [path, *own_options, *arguments.program]
        letters += own_letters
    else:
        command = target
        letters += _python_option_letters(path, target)
    _reject_ignoring(letters)
    _reject_folder()
    if is_found and not arguments.quiet:  # else the only line is the error
        name = " ".join(target[:2]) if target[0] == "-m" else target[0]
        announce_once(f" in {printable(name)} and the Python processes that it starts")
    environment = _environment(os.environ, arguments)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and what is ignored stays so in the program
        signal.signal(number, signal.SIG_DFL)
    os.execve(path, command, environment)


def _find_command(name: str) -> str | None:
    """Find the program of a name that is not one for Python: a command of the environment, or an executable file.

    As in a shell, a bare word is a command first: a file `torchrun` in a directory that another user filled is not run
    in its place. `./torchrun` is that file.
    """
    if name.startswith("-"):
        return None
    if not os.path.dirname(name) and not name.endswith(_FILE_ENDINGS):
        places = [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
        command = shutil.which(name, path=os.pathsep.join(places))
        if command is not None:
            return command
    if not os.path.isfile(name) or not os.access(name, os.X_OK):
        return None
    first_line = _first_line(name)
    is_other = first_line.startswith("\x7fELF") or (first_line.startswith("#!") and not _words_for_python(name))
    return os.path.abspath(name) if is_other else None


def _does_python_find(target: Sequence[str]) -> bool:
    """Return whether the file, directory or module of a program for Python exists."""
    if target[0].startswith("-m"):
        words = (target[0][2:], *target[1:])
        name = next(filter(None, words), "").partition(".")[0]  # looking for a submodule would import the package
        if not name or name in sys.modules:
            return bool(name)
        return (PathFinder.find_spec(name, [os.getcwd()]) or find_spec(name)) is not None
    return target[0].startswith("-") or os.path.exists(target[0])  # -c, or - for stdin


def _python_option_letters(path: str, command: Sequence[str]) -> str:
    """Return the letters of the options with which a command runs Python; "" if it does not run it directly."""
    is_python = re.fullmatch(r"python[\d.]*", os.path.basename(command[0]))
    return split_python_options(command[1:] if is_python else _words_for_python(path)[1:])[2]


def _words_for_python(path: str) -> list[str]:
    """Return Python and its options from the first line of a script; none if the line does not name Python."""
    line = _first_line(path)
    words = line.removeprefix("#!").split() if line.startswith("#!") else []
    is_python = [os.path.basename(word).startswith("python") for word in words]  # the second word of /usr/bin/env
    return words[is_python.index(True) :] if any(is_python) else []


def _first_line(path: str) -> str:
    if not os.access(path, os.R_OK):  # a program that may be run, not read
        return ""
    with open(path, "rb") as file:
        return file.read(_FIRST_LINE_BYTES).split(b"\n")[0].decode("latin-1")


def _reject_ignoring(letters: str) -> None:
    for letter in _IGNORING:
        if letter in letters:
            raise InvalidArgumentError(
                f"hfshard cannot be enabled in a Python that is started with -{letter}: it ignores PYTHONPATH or "
                f"sitecustomize. Remove -{letter}, or call hfshard.install() in the program."
            )


def _reject_folder() -> None:
    if os.pathsep in _FOLDER:
        raise InvalidPathError(
            f"hfshard is in {printable_message(_FOLDER)}, but PYTHONPATH cannot name a folder with '{os.pathsep}'. "
            "Install it into another, or call hfshard.install() in the program."
        )


def _environment(environment: Mapping[str, str], arguments: argparse.Namespace) -> dict[str, str]:
    """Build the environment of the program, whose Python processes find hfshard's `sitecustomize.py` first."""
    paths = environment.get("PYTHONPATH", "")  # an empty one means nothing, an empty part the working directory
    others = [path for path in paths.split(os.pathsep) if path != _FOLDER] if paths else []
    checksum = None if arguments.checksum == "none" else arguments.checksum
    settings = {"prefix": sys.prefix, "verify": arguments.verify, "checksum": checksum}
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join([_FOLDER, *others]),
        ANNOUNCED: "1",
        _SETTINGS: json.dumps(settings),
    }


# Words of `hfshard run`: hfshard's own, Python's options, and the program.


COMMAND: Final = "run"
OPTIONS_WITH_VALUE: Final = ("--verify", "--checksum")
"""hfshard's own; all others, such as `--quiet`, have no value."""
_PROGRAM_LETTERS: Final = "mc"
"""Options of Python that end its options: what follows is the program's."""
_LETTERS_WITH_VALUE: Final = "WX"


def split_command_line(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cut `run --quiet train.py --verify` after hfshard's own words; the program's words may look like them.

    Args:
        words: The arguments of `hfshard`.

    Returns:
        The words for hfshard, and the words for Python, which are none for any command but `run`.
    """
    if list(words[:1]) != [COMMAND]:
        return list(words), []
    end = 1
    while end < len(words) and (words[end].startswith("--") or words[end] == "-h"):
        if words[end] == "--":
            return list(words[:end]), list(words[end + 1 :])
        end += 2 if words[end] in OPTIONS_WITH_VALUE else 1
    return list(words[:end]), list(words[end:])


def split_python_options(words: Sequence[str]) -> tuple[list[str], list[str], str]:
    """Cut the words for Python after its options.

    Args:
        words: As Python accepts them: `-X dev -um MODULE`, `-W error SCRIPT`.

    Returns:
        The options alone; the program, beginning with `-m`, `-c`, `-` or a path; the letters of the options
        (`XuW`). A program's letter that follows others (`-um`) is cut from them.
    """
    options: list[str] = []
    letters = ""
    left = list(words)
    while left and left[0].startswith("-") and left[0] != "-":
        word = left.pop(0)
        if word == "--":
            break
        for position, letter in enumerate(word[1:], start=1):
            if letter in _PROGRAM_LETTERS:
                if position > 1:
                    options.append(word[:position])
                return options, ["-" + word[position:], *left], letters
            letters += letter
            if letter in _LETTERS_WITH_VALUE:
                value = [] if word[position + 1 :] else left[:1]
                options += [word, *value]
                left = left[len(value) :]
                break
        else:
            options.append(word)
    return options, left, letters
