"""Every error that hfshard raises on purpose: what happened, where, and what to do next.

HfshardError
├── InvalidSizeError (ValueError)              a size that the grammar does not know
├── InvalidSizeTypeError (TypeError)           a size that is no int and no str
├── InvalidArgumentError (ValueError)          an argument that can't be served
├── UnknownArgumentError (TypeError)           a keyword that nobody takes; names the nearest
├── SaveDirectoryError (NotADirectoryError)    the place to save to is a file
├── UnstorableTensorError (ValueError)         a value that the format has no bytes for
├── NotEnoughSpaceError (OSError)              the disk can't hold the save; nothing was written
├── CommitUnfinishedError (OSError)            saved and committed, but tidying up failed
├── DirectoryLockedError (BlockingIOError)     another process is saving there
├── CheckpointNotFoundError (FileNotFoundError)  no weights where they were looked for
├── HubError (OSError)                         a hub did not do what it was asked for
│   ├── HubAccessError (PermissionError)       the token is wrong, missing, or may not do that
│   ├── HubNotFoundError (FileNotFoundError)   no such repo, revision or file; or not for this token
│   ├── HubConnectionError (ConnectionError)   it can't be reached, or stopped answering
│   └── RemoteChangedError                     somebody else pushed to the same files meanwhile
├── CheckpointChangedError (RuntimeError)      it kept changing while it was being read
├── DamagedCheckpointError (ValueError)        a file is not what a checkpoint needs
│   ├── MissingShardError (FileNotFoundError)  a file that the index names is not there
│   └── IntegrityError                         bytes differ from those that were saved
├── UnsafePathError (ValueError)               a name that leaves the checkpoint's directory
├── UnsafePickleError (ValueError)             a pickle that asks for more than tensors
├── StateDictMismatchError (RuntimeError)      names, shapes or dtypes do not fit the model
└── StaleIteratorError (RuntimeError)          an iterator of a loader that has gone elsewhere since
"""

from __future__ import annotations

import errno
import os
import re
from typing import Any, Final

_LONG_WORD: Final = re.compile(r"\S{1200,}")
"""A name that no tensor and no path of a sane checkpoint has: it would flood a terminal."""
_LONGEST_MESSAGE: Final = 4000
"""Characters."""


class HfshardError(Exception):
    """The base of all of hfshard's own errors.

    Attributes:
        path: The file or directory that it is about, or None.
        fqn: The tensor's dotted name, or None.
        expected: What had to be there, or None.
        actual: What was found, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        fqn: str | None = None,
        expected: Any = None,
        actual: Any = None,
    ) -> None:
        message = readable(message)
        super().__init__(message)
        self.message = message
        self.path = None if path is None else os.fspath(path)
        self.fqn = fqn
        self.expected = expected
        self.actual = actual

    def __str__(self) -> str:
        return self.message


def readable(message: str) -> str:
    """A message fit to be shown, whatever names a hostile file put into it.

    Control and other unprintable characters (a terminal's escape codes, lone surrogates) are escaped, and names of
    unheard-of length are cut in the middle.
    """
    message = _LONG_WORD.sub(lambda word: f"{word.group()[:200]}…{word.group()[-100:]}", message)
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[: _LONGEST_MESSAGE - 1000]} … {message[-900:]}"
    return escaped(message, keep="\n")


def escaped(text: str, *, keep: str) -> str:
    """Escape every character that does not print, but those to keep."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else character.encode("unicode_escape").decode()
        for character in text
    )


class InvalidSizeError(HfshardError, ValueError):
    """A size that the grammar of `parse_size` does not know."""


class InvalidSizeTypeError(HfshardError, TypeError):
    """A size that is neither an int nor a str."""


class InvalidArgumentError(HfshardError, ValueError):
    """An argument with a value that can't be served."""


class UnknownArgumentError(HfshardError, TypeError):
    """A keyword argument that nobody takes; the message names the nearest one."""


class SaveDirectoryError(HfshardError, NotADirectoryError):
    """The place to save to is a file, or can't be a directory."""


class UnstorableTensorError(HfshardError, ValueError):
    """A value in a state dict that the format has no bytes for."""


class NotEnoughSpaceError(HfshardError, OSError):
    """The disk has not the space for the save; nothing was written. `errno` is ENOSPC."""

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message, **data)
        self.errno = errno.ENOSPC


class CommitUnfinishedError(HfshardError, OSError):
    """The new checkpoint is committed and loads, but a step of tidying up failed."""


class DirectoryLockedError(HfshardError, BlockingIOError):
    """Another process is saving into the directory."""


class CheckpointNotFoundError(HfshardError, FileNotFoundError):
    """No weights in the place where they were looked for."""


class HubError(HfshardError, OSError):
    """A hub, on the network or in a directory, did not do what it was asked for."""


class HubAccessError(HubError, PermissionError):
    """The token is wrong or missing, or its user may not do that."""


class HubNotFoundError(HubError, FileNotFoundError):
    """No such repo, revision or file; for a private repo, the Hub says so to everybody who may not see it."""


class HubConnectionError(HubError, ConnectionError):
    """The hub can't be reached, or stopped answering."""


class RemoteChangedError(HubError):
    """Somebody else pushed to the same files meanwhile; nothing was pushed."""


class CheckpointChangedError(HfshardError, RuntimeError):
    """The checkpoint was replaced again and again while it was being opened."""


class DamagedCheckpointError(HfshardError, ValueError):
    """A file of the checkpoint is not what a checkpoint needs."""


class MissingShardError(DamagedCheckpointError, FileNotFoundError):
    """A file that the index names is not there."""


class IntegrityError(DamagedCheckpointError):
    """The bytes of a file differ from those that were saved."""


class UnsafePathError(HfshardError, ValueError):
    """A name in an index that would leave the checkpoint's directory."""


class UnsafePickleError(HfshardError, ValueError):
    """A pickle that asks for more than tensors and plain containers."""


class StaleIteratorError(HfshardError, RuntimeError):
    """An iterator of a loader that a newer iterator, or a restore, has taken elsewhere."""


class StateDictMismatchError(HfshardError, RuntimeError):
    """Names, shapes or dtypes of the checkpoint do not fit the model.

    Attributes:
        missing_keys: Names that the model has and the checkpoint has not.
        unexpected_keys: Names that the checkpoint has and the model has not.
        mismatched_keys: (name, shape in the checkpoint, shape in the model).
    """

    def __init__(
        self,
        message: str,
        *,
        missing_keys: tuple[str, ...] = (),
        unexpected_keys: tuple[str, ...] = (),
        mismatched_keys: tuple[tuple[str, Any, Any], ...] = (),
        **data: Any,
    ) -> None:
        super().__init__(message, **data)
        self.missing_keys = missing_keys
        self.unexpected_keys = unexpected_keys
        self.mismatched_keys = mismatched_keys


def remedy(path: str) -> str:
    """What to do about a damaged file: the last sentence of its error."""
    folder = path.rsplit("/", 1)[0] if "/" in path else "."
    return f"Download or save it again, or run 'hfshard verify {folder}'."
