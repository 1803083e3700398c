"""Objects of the user's own, which load themselves and may refuse: then all that were loaded before get theirs back."""

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
    """One object, and the state that it is to load."""

    name: str
    part: Any
    state: Any
    directory: str
    """Of the checkpoint, for messages."""

    @property
    def nbytes(self) -> int:
        """Bytes of tensors in the state."""
        tensors: dict[str, torch.Tensor] = {}
        encode(self.state, self.name, tensors)
        return sum(tensor.nbytes for tensor in tensors.values())

    def load(self) -> None:
        """Load it.

        Raises:
            StateDictMismatchError: The object raised anything at all.
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
        """A copy of the state that the object has."""
        tensors: dict[str, torch.Tensor] = {}
        nested = encode(self.part.state_dict(), self.name, tensors)
        return decode(nested, {name: tensor.clone() for name, tensor in tensors.items()}, self.name)

    def put_back(self, before: Any) -> None:
        """Load what `now` returned; an object that refuses that, too, is left as it is, and it is logged."""
        try:
            self.part.load_state_dict(before)
        except Exception as error:  # noqa: BLE001 - what it refused before is being raised
            logger.error("'%s' (%s) can't be put back as it was: %s", self.name, type(self.part).__name__, error)


@dataclass(frozen=True, slots=True)
class PendingLoad:
    """What is checked already, but may still raise: a hook or a load_state_dict of the user's own."""

    name: str
    """Of the part."""
    load: Callable[[], None]
    undo: Callable[[], None] | None = None
    """Puts the part back as it was, whether it was loaded or not; None: it can't be, as of a model's weights."""


def load_all(objects: Sequence[StatefulLoad], pending_loads: Sequence[PendingLoad], directory: str) -> None:
    """Load everything, or nothing.

    What comes last is what nothing is kept of, as it is large: the largest of the objects, and the models' weights.

    Args:
        objects: Of the user's own.
        pending_loads: What was checked; of models those without an undo.
        directory: Of the checkpoint, for messages.

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
                _load(pending_load, directory)
        for one in in_order[-1:]:
            one.load()
    except BaseException:
        for put_back in reversed(undo):
            put_back()
        raise
    for pending_load in pending_loads:
        if pending_load.undo is None:
            _load(pending_load, directory)


def _load(pending_load: PendingLoad, directory: str) -> None:
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
