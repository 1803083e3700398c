"""Tell a file whose contents are damaged from one that the disk fails to read."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Final, TypeVar

from hfshard.errors import HfshardError

_Contents = TypeVar("_Contents")

_NOTHING_THERE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""What `open` answers for a file that is missing, and for a link that leads nowhere."""


def unless_damaged(read: Callable[[], _Contents]) -> _Contents | None:
    """Read a file; None where it is damaged or missing, and so can't say which files belong to it.

    Raises:
        HfshardError, OSError: It could not be opened or read (permissions, an I/O error): what it says is unknown, and
            may be right.
    """
    try:
        return read()
    except HfshardError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno not in _NOTHING_THERE:
            raise
        return None
