"""Turns errors of the operating system into hfshard's own, which name the file and are what they were, too."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from hfshard.errors import AccessDeniedError, FileError, HfshardError

_P = ParamSpec("_P")
_R = TypeVar("_R")

_TODO = {
    PermissionError: "Check the rights of the file and of the folders above it.",
    FileNotFoundError: "It was there, or should be: check the path, and whether somebody else removes files.",
}


def names_files(argument: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let a public function raise a `FileError` where the operating system refuses a file.

    Args:
        argument: The parameter with the path that is named where the system names none; or an attribute of `self`.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        names = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return function(*args, **kwargs)
            except OSError as error:
                if isinstance(error, HfshardError):
                    raise
                given = dict(zip(names, args), **kwargs)
                place = given[argument] if argument in given else getattr(given.get("self"), argument, None)
                raise file_error(error, place) from error

        return wrapped

    return decorate


def file_error(error: OSError, place: Any) -> FileError:
    """Make the error that names the file which an error of the system is about, or else `place`."""
    named = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    path = named[0] if named else os.fsdecode(os.fspath(place)) if isinstance(place, str | os.PathLike) else None
    kind = AccessDeniedError if isinstance(error, PermissionError) else FileError
    todo = next((text for known, text in _TODO.items() if isinstance(error, known)), "")
    what = " -> ".join(f"'{name}'" for name in named) or f"'{path}'"
    made = kind(f"{what}: {error.strerror or error}. {todo}".rstrip(), path=path)
    made.errno = error.errno
    made.strerror = error.strerror
    return made
