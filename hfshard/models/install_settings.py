"""Settings of the installed hfshard in this process. This file imports neither torch nor transformers.

Each `install()` has an entry, and the last one applies. A call keeps the settings that it began with, and so does
everything that it calls in its thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Self

from hfshard._util.threads import ForkSafeLock, bound
from hfshard.format.index import Checksum, Verify, check_checksum, check_verify_level


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings with which an installed hfshard loads and saves.

    Raises:
        InvalidArgumentError: A value is not allowed.
    """

    verify: Verify = "structure"
    """The checks made before any tensor is used."""
    checksum: Checksum | None = "sha256"
    """The checksum of saved files."""

    def __post_init__(self) -> None:
        """Check every value."""
        check_verify_level(self.verify)
        check_checksum(self.checksum)


class Installation:
    """Result of `install`; as a context manager, it undoes that call at the end of the block."""

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
"""Active installations; the last one applies: open blocks, the last call of `install`, and the one before it."""
_is_forgotten = False
"""Whether `forget_installations` was ever called in this process."""
_changing: Final = ForkSafeLock()
_began_with: Final[ContextVar[Settings | None]] = ContextVar("hfshard_installed", default=None)
"""The settings of the call in progress in this thread."""


def add_installation(settings: Settings) -> Installation:
    """Apply these settings from now on."""
    installation = Installation(settings)
    with _changing.held():
        blocks = [one for one in _installations[:-1] if one.is_block]
        _installations[:] = [*blocks, *_installations[-1:], installation]
    return installation


def add_default_installation(settings: Settings) -> None:
    """Apply these settings as if from the start of the process: any change made since takes precedence."""
    with _changing.held():
        if not _is_forgotten:
            _installations.insert(0, Installation(settings))


def forget_installations() -> None:
    """Drop all settings, including those of blocks that are still open."""
    global _is_forgotten
    with _changing.held():
        _installations.clear()
        _is_forgotten = True


def current_settings() -> Settings | None:
    """Return the settings that apply in this thread, or None if hfshard is not installed."""
    began_with = _began_with.get()
    if began_with is not None:
        return began_with
    with _changing.held():
        return _installations[-1].settings if _installations else None


@contextmanager
def use_settings(settings: Settings) -> Iterator[None]:
    """Apply these settings in this thread until the block ends, whatever other threads do."""
    with bound(_began_with, settings):
        yield
