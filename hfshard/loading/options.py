"""How a checkpoint is loaded: what every function that loads takes, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from hfshard.storage.checkpoint.checkpoint import Verify, check_verify_level
from hfshard.storage.weights.tensor_reader import ReadMode, check_read_mode


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a checkpoint is loaded.

    Raises:
        InvalidArgumentError: A value is not one of those that are allowed, or two contradict each other.
    """

    strict: bool | None = None
    """Whether missing and unexpected names are refused; None: as the function that loads does by default."""
    verify: Verify = "structure"
    """What is checked before any tensor is returned."""
    read: ReadMode = "auto"
    """How the bytes come into memory; "pread" where `disable_mmap` asks for it."""
    disable_mmap: bool | None = None
    """As in transformers."""
    progress: bool | None = None
    """A bar on stderr; None: on a terminal."""

    def __post_init__(self) -> None:
        """Check every value."""
        check_verify_level(self.verify)
        object.__setattr__(self, "read", check_read_mode(self.read, disable_mmap=self.disable_mmap))
