"""Loads that were planned and may still fail: then every part that was loaded before gets its old state back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hfshard.errors import HfshardError, StateDictMismatchError
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
        """Bytes of the tensors in the state."""
        tensors: dict[str, torch.Tensor] = {}
        encode(self.state, self.name, tensors)
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
    """Puts the part back as it was, whether it was loaded or not; None where that is impossible (a model's weights)."""


def load_all(objects: Sequence[StatefulLoad], pending_loads: Sequence[PendingLoad], directory: str) -> None:
    """Load everything, or nothing.

    Parts of which no copy is kept, because they are large, come last: the largest object, and the models' weights.

    Args:
        objects: The user's own objects.
        pending_loads: The checked loads; those of models have no undo.
        directory: The checkpoint's, for messages.

    Raises:
        StateDictMismatchError: One refused.
    """
    undo: list[Callable[[], None]] = []
    in_order = sorted(objects, key=lambda one: one.nbytes)
    try:
        for one in in_order[:-1]:
            undo.append(partial(one.put_back, one.now()))
            one.load()
        for pending_load in pending_loads:
            if pending_load.undo is not None:
                undo.append(pending_load.undo)
                _apply(pending_load, directory)
        for one in in_order[-1:]:
            one.load()
    except BaseException:
        for put_back in reversed(undo):
            put_back()
        raise
    for pending_load in pending_loads:
        if pending_load.undo is None:
            _apply(pending_load, directory)


def _apply(pending_load: PendingLoad, directory: str) -> None:
    try:
        pending_load.load()
    except HfshardError:
        raise
    except Exception as error:
        what = (
            "Nothing was restored"
            if pending_load.undo is not None
            else "It may be half restored, and others are restored"
        )
        raise StateDictMismatchError(
            f"'{pending_load.name}' refused its state in the checkpoint '{directory}': {error}. {what}. "
            "Build it as in the run that was saved.",
            path=directory,
        ) from error
