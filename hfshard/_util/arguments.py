"""Arguments of public functions, checked: unknown keywords, paths, and errors of the system that name their file."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterable, MutableMapping
from typing import Any, Final, ParamSpec, TypeVar

from hfshard._util.addresses import check_slashes, is_address, parse_address
from hfshard.errors import (
    AccessDeniedError,
    FileError,
    HfshardError,
    InvalidArgumentError,
    InvalidPathError,
    UnknownArgumentError,
)


def refuse_unknown(names: Iterable[str], known: Collection[str], function: str) -> None:
    """Refuse unknown keyword arguments.

    Args:
        names: Those that were passed.
        known: Those that the function takes.
        function: Its name, for the message.

    Raises:
        UnknownArgumentError: The message names the nearest one that is known.
    """
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean '{nearest[0]}'?" if nearest else f" It takes: {', '.join(sorted(known))}."
            raise UnknownArgumentError(f"{function}() got an unexpected keyword argument '{name}'.{hint}")


def refuse_pickles(kwargs: MutableMapping[str, Any]) -> None:
    """Take `safe_serialization` of older code out of keyword arguments; False asks for a pickle, and is refused.

    Raises:
        InvalidArgumentError: It is False.
    """
    if kwargs.pop("safe_serialization", True) is False:
        raise InvalidArgumentError("hfshard does not write pickles: leave out safe_serialization=False.")


def check_texts(**values: object) -> None:
    """Refuse arguments that are neither None nor text that can be sent and can be part of a path.

    Raises:
        InvalidArgumentError: It names the argument.
    """
    for name, value in values.items():
        if value is not None and not (isinstance(value, str) and "\0" not in value and _is_unicode(value)):
            raise InvalidArgumentError(f"{name} must be text without NUL characters, got {value!r:.200}.")


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


# Paths as users give them: checked, with "~" as the home directory, and absolute from the first line of a call on.


_FILE_SCHEME: Final = "file://"


def absolute_path(path: str | os.PathLike[str], argument: str = "path") -> str:
    """Make a path absolute, once and for all: a later `os.chdir`, by any thread, leads nowhere else.

    "~" is the home directory. The path is not normalized, because ".." after a symbolic link does not lead to the part
    before it. The working directory is asked for relative paths only, so that others work where it was removed.

    Args:
        path: Need not exist.
        argument: Its name, for the message.

    Raises:
        InvalidPathError: It is no path, or it is relative and the working directory is gone; or it is an address of an
            unknown kind, without a bucket, or that has lost a slash.

    Example:
        >>> absolute_path("/srv//models/./bert/")
        '/srv/models/bert'
    """
    text = path_text(path, argument)
    if is_address(text):
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
                f"{argument}={text!r} is a relative path, and the working directory does not exist any more. "
                "Give an absolute path, or change to another directory.",
                path=text,
            ) from error
    parts = [part for part in text.split(os.sep) if part not in ("", os.curdir)]
    return os.sep + os.sep.join(parts)


def absolute_directory(path: str | os.PathLike[str], argument: str) -> str:
    """Make the path of a directory absolute that can't be in a store; raises as `absolute_path`, and for an address.

    Example:
        >>> absolute_directory("/srv/cache/", "cache_dir")
        '/srv/cache'
    """
    text = absolute_path(path, argument)
    if is_address(text):
        raise InvalidPathError(
            f"{argument}={text!r} is the address of a store: give a directory on a disk of this machine.", path=text
        )
    return text


def path_text(path: str | os.PathLike[str], argument: str = "path") -> str:
    """Check a path, or a name that may be one, and return it as text.

    Raises:
        InvalidPathError: It is empty, bytes or no path at all, or no file can have such a name; or it was an address
            that lost a slash.
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
        f"{argument} must be a path, as str or os.PathLike and without NUL characters, got {path!r}. "
        f"The working directory itself is '{os.curdir}'."
    )


# Turns errors of the operating system into hfshard's own, which name the file and are what they were, too.


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
