"""Errors that hfshard raises on purpose. A message says what happened, where, and what to do.

HfshardError
├── InvalidSizeError (ValueError)              a size that `parse_size` cannot parse
├── InvalidSizeTypeError (TypeError)           a size that is neither an int nor a str
├── InvalidArgumentError (ValueError)          an argument with a value that is not allowed
│   ├── AmbiguousWeightsError                  a file of torch.save with several sets of weights: `key` selects one
│   └── InvalidPathError (OSError)             "", bytes, a path with NUL, or a relative one that leads nowhere
├── UnknownArgumentError (TypeError)           an unknown keyword; suggests the nearest one
├── SaveDirectoryError (NotADirectoryError)    the place to save to is a file
├── RunRemovedError (FileNotFoundError)        a run's directory was removed during a save
├── UnstorableTensorError (ValueError)         a value that the format cannot store
├── NotEnoughSpaceError (OSError)              the disk is too full: nothing was written, or a pull can be continued
├── CommitUndoneError (OSError)                a step of the commit failed; the directory is unchanged
├── FileError (OSError)                        the operating system refused a file, or failed
│   └── AccessDeniedError (PermissionError)    the system does not let this user read or write there
├── CommitUnfinishedError (OSError)            committed, but not cleaned up; or neither done nor undone
├── DirectoryLockedError (BlockingIOError)     another process is saving there
├── CheckpointNotFoundError (FileNotFoundError)  no weights in that place
├── HubError (OSError)                         a hub refused, or failed
│   ├── HubAccessError (PermissionError)       the token is wrong, missing, or lacks the permission
│   ├── HubNotFoundError (FileNotFoundError)   no such repo, revision or file for this token
│   ├── HubConnectionError (ConnectionError)   the hub cannot be reached, or stopped responding
│   └── RemoteChangedError                     another process pushed, or saved, there first
├── StoreError (OSError)                       an object store or bucket refused, or failed
│   ├── StoreAccessError (PermissionError)     no credentials, or they do not permit it
│   ├── StoreNotFoundError (FileNotFoundError)  no such bucket
│   ├── StoreConnectionError (ConnectionError)  the store cannot be reached, or stopped responding
│   ├── MissingObjectError                     no such object
│   └── ChangedObjectError                     an object is locked, or was replaced
├── BrowserError (RuntimeError)                the browser for screenshots is missing, or failed
├── CheckpointChangedError (RuntimeError)      the checkpoint was replaced while it was in use
├── DamagedCheckpointError (ValueError)        a file is not valid
│   ├── MissingShardError (FileNotFoundError)  a file that the index names is missing
│   └── IntegrityError                         the bytes are not those that were saved
├── SignatureError (ValueError)                not signed by the required signer, or changed since
├── UnsafePathError (ValueError)               a name that leaves the checkpoint's directory
├── UnsafePickleError (ValueError)             a pickle that asks for more than tensors
├── RankFailedError (RuntimeError)             another rank failed, died, hangs or cannot be reached
│   └── RankMissingError                       a rank that is needed has not called
├── StateDictMismatchError (RuntimeError)      names, shapes or dtypes do not fit the model
└── StaleIteratorError (RuntimeError)          a loader's iterator that was replaced by a newer one
"""

from __future__ import annotations

import errno
import os
import re
from typing import Any, Final

_LONG_WORD: Final = re.compile(r"\S{1200,}")
"""A name longer than any in a sane checkpoint, which would flood a terminal."""
_LONGEST_MESSAGE: Final = 4000
"""Characters."""


class HfshardError(Exception):
    """Base class of all of hfshard's errors.

    Attributes:
        path: The file or directory in question, or None.
        fqn: The tensor's dotted name, or None.
        expected: The value that was expected, or None.
        actual: The value that was found, or None.
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
        message = printable_message(message)
        super().__init__(message)
        self.message = message
        self.path = None if path is None else os.fspath(path)
        self.fqn = fqn
        self.expected = expected
        self.actual = actual

    def __str__(self) -> str:
        return self.message


def printable_message(message: str) -> str:
    """Make a message printable, even if it contains names from a hostile file.

    Unprintable characters (escape codes of a terminal, lone surrogates) are escaped, and extremely long names are cut
    in the middle.
    """
    message = _LONG_WORD.sub(lambda word: f"{word.group()[:200]}…{word.group()[-100:]}", message)
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[: _LONGEST_MESSAGE - 1000]} … {message[-900:]}"
    return escaped(message, keep="\n")


def escaped(text: str, *, keep: str) -> str:
    """Escape every unprintable character, except those to keep."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else character.encode("unicode_escape").decode()
        for character in text
    )


class InvalidSizeError(HfshardError, ValueError):
    """A size that `parse_size` cannot parse."""


class InvalidSizeTypeError(HfshardError, TypeError):
    """A size that is neither an int nor a str."""


class InvalidArgumentError(HfshardError, ValueError):
    """An argument with a value that is not allowed."""


class AmbiguousWeightsError(InvalidArgumentError):
    """A file of torch.save has several sets of weights, such as a model's and their moving average.

    Attributes:
        keys: Their keys in the file, for the argument `key`.
    """

    def __init__(self, message: str, *, keys: tuple[str, ...] = (), **data: Any) -> None:
        super().__init__(message, **data)
        self.keys = keys


class InvalidPathError(InvalidArgumentError, OSError):
    """A value that is not a path, or a relative path in a working directory that is gone."""


class UnknownArgumentError(HfshardError, TypeError):
    """An unknown keyword argument; the message suggests the nearest one."""


class SaveDirectoryError(HfshardError, NotADirectoryError):
    """The place to save to is a file, or cannot be a directory."""


class RunRemovedError(HfshardError, FileNotFoundError):
    """The directory of a training run was removed, or renamed, while the run was saving into it."""


class UnstorableTensorError(HfshardError, ValueError):
    """A value in a state dict that the format cannot store."""


class NotEnoughSpaceError(HfshardError, OSError):
    """The disk is too full, and nothing was written; a pull keeps what has arrived. `errno` is ENOSPC."""

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message, **data)
        self.errno = errno.ENOSPC


class CommitUndoneError(HfshardError, OSError):
    """A step of the commit failed, and hfshard rolled back: the directory is unchanged. `errno` is the system's."""

    def __init__(self, message: str, *, error_number: int | None = None, **data: Any) -> None:
        super().__init__(message, **data)
        self.errno = error_number


class FileError(HfshardError, OSError):
    """The operating system refused a file, or failed; `errno` is that of the OSError that is the cause."""


class AccessDeniedError(FileError, PermissionError):
    """The system does not let this user read or write there. `errno` is EACCES or the cause's, such as EPERM."""

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message, **data)
        self.errno = errno.EACCES


class CommitUnfinishedError(HfshardError, OSError):
    """Every reader loads the new checkpoint, but a step of the cleanup failed.

    Or, if one step moves some readers to the new checkpoint and the next one moves the others: the first step could be
    neither completed nor rolled back. Then the message says which readers load which checkpoint.
    """


class DirectoryLockedError(HfshardError, BlockingIOError):
    """Another process is saving into the directory."""


class CheckpointNotFoundError(HfshardError, FileNotFoundError):
    """The given place has no weights."""


class HubError(HfshardError, OSError):
    """A hub, on the network or in a directory, refused a request or failed."""


class HubAccessError(HubError, PermissionError):
    """The token is wrong or missing, or its user lacks the permission."""


class HubNotFoundError(HubError, FileNotFoundError):
    """No such repo, revision or file; the Hub reports the same for a private repo that the user may not see."""


class HubConnectionError(HubError, ConnectionError):
    """The hub cannot be reached, or stopped responding."""


class RemoteChangedError(HubError):
    """Another process pushed to, or saved into, the same files first; nothing was changed."""


class StoreError(HfshardError, OSError):
    """An object store or a bucket refused a request or failed.

    Attributes:
        may_be_done: Whether the requested change may still have been made, or may be made later, because no response
            arrived.
    """

    may_be_done = False


class StoreAccessError(StoreError, PermissionError):
    """There are no credentials for the store, or they do not permit the request."""


class StoreNotFoundError(StoreError, FileNotFoundError):
    """The store has no such bucket, or does not show it to these credentials."""


class StoreConnectionError(StoreError, ConnectionError):
    """The store cannot be reached, or stopped responding."""


class MissingObjectError(StoreError):
    """The bucket has no such object."""


class ChangedObjectError(StoreError):
    """An object is locked, for example by a lease, or was replaced."""


class BrowserError(HfshardError, RuntimeError):
    """The browser for screenshots is missing, failed, or took too long."""


class CheckpointChangedError(HfshardError, RuntimeError):
    """The checkpoint was replaced while it was in use, or on every attempt to open it."""

    is_final = False
    """True after the last attempt: nothing starts again because of it."""


class DamagedCheckpointError(HfshardError, ValueError):
    """A file of the checkpoint is not valid."""


class MissingShardError(DamagedCheckpointError, FileNotFoundError):
    """A file that the index names is missing."""


class IntegrityError(DamagedCheckpointError):
    """The bytes of a file are not those that were saved."""


class SignatureError(HfshardError, ValueError):
    """A checkpoint lacks the required signer's signature, a file has changed since it was signed, or signing failed."""


class UnsafePathError(HfshardError, ValueError):
    """A name in an index that would leave the checkpoint's directory."""


class UnsafePickleError(HfshardError, ValueError):
    """A pickle that asks for more than tensors and plain containers."""


class RankFailedError(HfshardError, RuntimeError):
    """Another rank failed, was killed, hangs or cannot be reached, so this one gave up too.

    Attributes:
        rank: Its rank in the default process group; None: none in particular, or not known.
    """

    def __init__(self, message: str, *, rank: int | None = None, **data: Any) -> None:
        super().__init__(message, **data)
        self.rank = rank


class RankMissingError(RankFailedError):
    """A rank whose part is needed has not made the call, though the others waited for it."""


class StaleIteratorError(HfshardError, RuntimeError):
    """A loader's iterator that was replaced by a newer iterator or a restore."""


class StateDictMismatchError(HfshardError, RuntimeError):
    """Names, shapes or dtypes of the checkpoint do not fit the model.

    Attributes:
        missing_keys: Names in the model, but not in the checkpoint.
        unexpected_keys: Names in the checkpoint, but not in the model.
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


def repair_hint(path: str) -> str:
    """Return what to do about a damaged file: the last sentence of an error."""
    folder = path.rsplit("/", 1)[0] if "/" in path else "."
    return f"Download or save it again, or run 'hfshard verify {folder}'."


def not_as_saved(
    path: str,
    what: str,
    actual: object,
    expected: object,
    *,
    shard: bool = False,
    damage: str = "",
    hint: str = "",
    fqn: str | None = None,
) -> IntegrityError:
    """Build the error for a file whose bytes differ from those that were saved.

    Args:
        path: The file.
        what: What differs, such as "sha256" or "size".
        actual, expected: What it is, and what was recorded.
        shard: Whether it is a shard.
        damage: A sentence on the damage, if more is known.
        hint: What to do; "": `repair_hint`.
        fqn: A damaged tensor, if one is known.
    """
    sentences = [damage, hint or repair_hint(path)]
    return IntegrityError(
        f"{'Shard ' if shard else ''}'{path}' is not the file that was saved: its {what} is {actual}, but was "
        f"{expected}. {' '.join(filter(None, sentences))}",
        path=path,
        fqn=fqn,
        expected=expected,
        actual=actual,
    )
