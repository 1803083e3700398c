"""With which settings hfshard is installed in this process, if it is. This file imports neither torch nor transformers.

Each `install()` has an entry, and the last one counts. A call has, with all that it calls in its thread, the settings
that it began with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Self

from hfshard._util.threads import ProcessLock
from hfshard.format.digests import Checksum, Verify, check_checksum, check_verify_level


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How an installed hfshard loads and saves.

    Raises:
        InvalidArgumentError: A value is not one of those that are allowed.
    """

    verify: Verify = "structure"
    """What is checked before any tensor is used."""
    checksum: Checksum | None = "sha256"
    """Of the files that are saved."""

    def __post_init__(self) -> None:
        """Check every value."""
        check_verify_level(self.verify)
        check_checksum(self.checksum)


class Installation:
    """What `install` returns: used as a context manager, it takes back at the block's end what that call did."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.is_block = False

    def __enter__(self) -> Self:
        with _changing.held():
            self.is_block = True
            if self not in _installations:
                _installations.append(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        with _changing.held():
            if self in _installations:
                _installations.remove(self)


_installations: Final[list[Installation]] = []
"""Those that count, the last one most: blocks, and beside them the last call of `install`, and the one before it."""
_is_forgotten = False
"""Whether they have ever been forgotten in this process."""
_changing: Final = ProcessLock()
_began_with: Final[ContextVar[Settings | None]] = ContextVar("hfshard_installed", default=None)
"""The settings of the call under way in this thread."""


def add_installation(settings: Settings) -> Installation:
    """Let these settings count from now on."""
    installation = Installation(settings)
    with _changing.held():
        blocks = [one for one in _installations[:-1] if one.is_block]
        _installations[:] = [*blocks, *_installations[-1:], installation]
    return installation


def add_first_installation(settings: Settings) -> None:
    """Let these settings count as if that had been said when the process began: what was said since counts more."""
    with _changing.held():
        if not _is_forgotten:
            _installations.insert(0, Installation(settings))


def forget_installations() -> None:
    """Let none count; those of blocks that are still open neither."""
    global _is_forgotten
    with _changing.held():
        _installations.clear()
        _is_forgotten = True


def current_settings() -> Settings | None:
    """The settings that count in this thread; None where hfshard is not installed."""
    began_with = _began_with.get()
    if began_with is not None:
        return began_with
    with _changing.held():
        return _installations[-1].settings if _installations else None


@contextmanager
def keeping(settings: Settings) -> Iterator[None]:
    """Let these settings count for this thread until the block ends, whatever others do."""
    token = _began_with.set(settings)
    try:
        yield
    finally:
        _began_with.reset(token)
