"""Checks of public functions' arguments: unknown keywords and paths; and system errors that name their file."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterable, MutableMapping
from typing import Any, Final, ParamSpec, TypeVar

from hfshard._util.addresses import check_slashes, is_store_address, parse_address
from hfshard._util.text import did_you_mean
from hfshard.errors import (
    AccessDeniedError,
    FileError,
    HfshardError,
    InvalidArgumentError,
    InvalidPathError,
    UnknownArgumentError,
)


def reject_unknown_arguments(names: Iterable[str], known: Collection[str], function: str) -> None:
    """Reject unknown keyword arguments.

    Args:
        names: The passed ones.
        known: The function's own ones.
        function: Its name, for the message.

    Raises:
        UnknownArgumentError: There is one; the message names the nearest known one.
    """
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or f" It accepts: {', '.join(sorted(known))}."
            raise UnknownArgumentError(f"{function}() got an unexpected keyword argument '{name}'.{hint}")


def reject_pickle_request(kwargs: MutableMapping[str, Any]) -> None:
    """Remove `safe_serialization` of older code from keyword arguments; reject False, which asks for a pickle.

    Raises:
        InvalidArgumentError: It is False.
    """
    if kwargs.pop("safe_serialization", True) is False:
        raise InvalidArgumentError("hfshard does not write pickles: leave out safe_serialization=False.")


def check_text_arguments(**values: object) -> None:
    """Reject arguments that are neither None nor text that can be sent and can be part of a path.

    Raises:
        InvalidArgumentError: There is one; the message names it.
    """
    for name, value in values.items():
        if value is not None and not (isinstance(value, str) and "\0" not in value and _is_unicode(value)):
            raise InvalidArgumentError(f"{name} must be text without NUL characters, got {value!r:.200}.")


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


# Users' paths: checked, with "~" as the home directory, and made absolute at the beginning of a call.


_FILE_SCHEME: Final = "file://"


def absolute_path(path: str | os.PathLike[str], argument: str = "path") -> str:
    """Make a path absolute, so that a later `os.chdir`, by any thread, does not change where it leads.

    "~" is the home directory. The path is not normalized, because ".." after a symbolic link does not lead to the part
    before it. Only relative paths need the working directory, so that others work if it was removed.

    Args:
        path: It need not exist.
        argument: Its name, for the message.

    Raises:
        InvalidPathError: It is not a path, or it is relative and the working directory is gone; or it is an address of
            an unknown kind, without a bucket, or that has lost a slash.

    Example:
        >>> absolute_path("/srv//models/./bert/")
        '/srv/models/bert'
    """
    text = checked_path_text(path, argument)
    if is_store_address(text):
        return str(parse_address(text, argument))
    if text.lower().startswith(_FILE_SCHEME):
        raise InvalidPathError(
            f"{argument}={text!r} is a file URL. Write the path alone: {text[len(_FILE_SCHEME) :]!r}.", path=text
        )
    text = os.path.expanduser(text)
    if not os.path.isabs(text):
        try:
            text = os.path.join(os.getcwd(), text)
        except FileNotFoundError as error:
            raise InvalidPathError(
                f"{argument}={text!r} is a relative path, but the working directory no longer exists. "
                "Pass an absolute path, or change to another directory.",
                path=text,
            ) from error
    parts = [part for part in text.split(os.sep) if part not in ("", os.curdir)]
    return os.sep + os.sep.join(parts)


def absolute_directory(path: str | os.PathLike[str], argument: str) -> str:
    """Make a directory's path absolute. Raise `InvalidPathError` for an address too: it cannot be in a store.

    Example:
        >>> absolute_directory("/srv/cache/", "cache_dir")
        '/srv/cache'
    """
    text = absolute_path(path, argument)
    if is_store_address(text):
        raise InvalidPathError(f"{argument}={text!r} is a store address. Pass a directory on a local disk.", path=text)
    return text


def checked_path_text(path: str | os.PathLike[str], argument: str = "path") -> str:
    """Check a path, or a name that may be one, and return it as text.

    Raises:
        InvalidPathError: It is empty, bytes or not a path, or no file can have such a name; or it is an address that
            has lost a slash.
    """
    try:
        text = os.fspath(path)
    except TypeError as error:
        raise _refused(path, argument) from error
    if not isinstance(text, str) or not text:
        raise _refused(path, argument)
    try:
        raw = os.fsencode(text)
    except UnicodeEncodeError as error:
        raise _refused(path, argument) from error
    if b"\0" in raw:
        raise _refused(path, argument)
    check_slashes(text, argument)
    return text


def _refused(path: object, argument: str) -> InvalidPathError:
    return InvalidPathError(
        f"{argument} must be a str or os.PathLike path without NUL characters, got {path!r:.200}. "
        f"For the working directory, pass '{os.curdir}'."
    )


# Errors of the operating system, converted to hfshard's own, which name the file and keep the errno.


_P = ParamSpec("_P")
_R = TypeVar("_R")

_TODO = {
    PermissionError: "Check the permissions of the file and of the directories above it.",
    FileNotFoundError: "It should exist: check the path, and whether another process deletes files.",
}


def wraps_os_errors(argument: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a public function raise a `FileError` if the operating system refuses a file.

    Args:
        argument: The parameter whose path, or place, is named if the system names none; or an attribute of `self`.
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
                raise as_file_error(error, getattr(place, "address", place)) from error

        return wrapped

    return decorate


def as_file_error(error: OSError, place: Any) -> FileError:
    """Create the error that names the file of a system error, or else `place`."""
    named = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    path = named[0] if named else os.fsdecode(os.fspath(place)) if isinstance(place, str | os.PathLike) else None
    kind = AccessDeniedError if isinstance(error, PermissionError) else FileError
    todo = next((text for known, text in _TODO.items() if isinstance(error, known)), "")
    what = " -> ".join(f"'{name}'" for name in named) or f"'{path}'"
    made = kind(f"{what}: {error.strerror or error}. {todo}".rstrip(), path=path)
    made.errno = error.errno
    made.strerror = error.strerror
    return made
