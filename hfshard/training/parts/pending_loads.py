"""Loads that were planned and may still fail, and what puts back the state of a part that was loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hfshard.errors import DamagedCheckpointError, HfshardError, StateDictMismatchError, UnstorableTensorError
from hfshard.training.parts.nested import decode, encode

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StatefulLoad:
    """An object of the user's own, and the state that it is to load."""

    name: str
    part: Any
    state: Any
    directory: str
    """The checkpoint's, for messages."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in the state.

        Raises:
            DamagedCheckpointError: The state is not one that a save writes.
        """
        tensors: dict[str, torch.Tensor] = {}
        try:
            encode(self.state, self.name, tensors)
        except UnstorableTensorError as error:
            raise DamagedCheckpointError(
                f"The state of '{self.name}' in the checkpoint '{self.directory}' is not what hfshard writes: "
                f"{error.message} Restore another checkpoint, or download it again.",
                path=self.directory,
            ) from error
        return sum(tensor.nbytes for tensor in tensors.values())

    def load(self) -> None:
        """Load the state.

        Raises:
            StateDictMismatchError: The object raised an error, whatever it was.
        """
        try:
            self.part.load_state_dict(self.state)
        except HfshardError:
            raise
        except Exception as error:
            raise StateDictMismatchError(
                f"'{self.name}' ({type(self.part).__name__}) refused its state in the checkpoint '{self.directory}': "
                f"{error}. Nothing else was restored. Build it as in the run that was saved.",
                path=self.directory,
            ) from error

    def now(self) -> Any:
        """Copy the state that the object has now."""
        tensors: dict[str, torch.Tensor] = {}
        nested = encode(self.part.state_dict(), self.name, tensors)
        return decode(nested, {name: tensor.clone() for name, tensor in tensors.items()}, self.name)

    def put_back(self, before: Any) -> None:
        """Load what `now` returned; if the object refuses that too, it stays as it is, which is logged."""
        try:
            self.part.load_state_dict(before)
        except Exception as error:  # noqa: BLE001 - the first refusal is being raised
            logger.error("'%s' (%s) can't be put back as it was: %s", self.name, type(self.part).__name__, error)


@dataclass(frozen=True, slots=True)
class PendingLoad:
    """A load that was checked but may still raise, in a hook or a load_state_dict of the user's own."""

    name: str
    """The part's."""
    load: Callable[[], None]
    undo: Callable[[], None] | None = None
    """Puts the part back as it was, whether it was loaded or not; None for weights, of which that needs a copy."""
    keep: Callable[[], Callable[[], None]] | None = None
    """For weights: copies them, and returns what puts them back."""
    may_refuse: bool = False
    """For weights: whether a hook or a method of the user's own may refuse them."""

    def run(self, directory: str, outcome: str = "Nothing was restored") -> None:
        """Load.

        Args:
            directory: The checkpoint's, for messages.
            outcome: What an error leaves behind, in words.

        Raises:
            StateDictMismatchError: The part raised an error, whatever it was.
        """
        try:
            self.load()
        except HfshardError:
            raise
        except Exception as error:
            raise StateDictMismatchError(
                f"'{self.name}' refused its state in the checkpoint '{directory}': {error}. {outcome}. "
                "Build it as in the run that was saved.",
                path=directory,
            ) from error
