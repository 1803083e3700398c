"""Errors of a run's own directory, which is a file, was removed, or may not be written: one each, which names it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from hfshard.errors import AccessDeniedError, HfshardError, RunRemovedError, SaveDirectoryError

_DENIED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_NO_DIRECTORY: Final = frozenset({errno.ENOTDIR, errno.EEXIST})


@contextmanager
def saving_into(root: str, is_there: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Save into a run's directory.

    Args:
        root: The directory.
        is_there: Whether it is still the one that was locked, which is asked when something failed.

    Raises:
        SaveDirectoryError: It is a file, or below one.
        AccessDeniedError: It may not be written.
        RunRemovedError: It was removed meanwhile.
        OSError: The disk failed.
    """
    try:
        yield
    except HfshardError:
        raise
    except OSError as error:
        if error.errno in _DENIED:
            raise AccessDeniedError(
                f"'{root}' can't be saved into ({error}). Give the user the right to write there, or give the "
                "CheckpointManager another directory.",
                path=root,
            ) from error
        if not is_there():
            raise removed(root) from error
        if error.errno in _NO_DIRECTORY and not os.path.isdir(root):
            raise _no_directory(root) from error
        raise


def names_in(root: str) -> list[str]:
    """List a run's directory; nothing where there is none yet.

    Raises:
        SaveDirectoryError: It is a file, or below one, or a link that leads nowhere.
        AccessDeniedError: It may not be read.
    """
    try:
        return os.listdir(root)
    except FileNotFoundError as error:
        if os.path.islink(root):
            raise _no_directory(root) from error
        return []
    except NotADirectoryError as error:
        raise _no_directory(root) from error
    except PermissionError as error:
        raise AccessDeniedError(
            f"'{root}' can't be read ({error}), so nothing says whether it holds checkpoints. Give the user the right "
            "to read it.",
            path=root,
        ) from error


def removed(root: str) -> RunRemovedError:
    """The error of a run whose directory is not there any more, or is another one."""
    return RunRemovedError(
        f"The run's directory '{root}' was removed or renamed while this run was saving into it. Put it back, or save "
        "again, which makes a new one.",
        path=root,
    )


def _no_directory(root: str) -> SaveDirectoryError:
    return SaveDirectoryError(
        f"'{root}' can't be the directory of a run: it, or something above it, is a file or a link that leads nowhere. "
        "Remove or rename it, or give the CheckpointManager another directory.",
        path=root,
    )
