"""Paths as users give them: checked, with "~" as the home directory, and absolute from the first line of a call on."""

from __future__ import annotations

import os
from typing import Final

from hfshard._util.address_hints import check_slashes
from hfshard._util.addresses import is_address, parse_address
from hfshard.errors import InvalidPathError

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
