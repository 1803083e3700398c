"""Objects of the user's own, which load themselves and may refuse: then all that were loaded before get theirs back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hfshard.errors import HfshardError, StateDictMismatchError
from hfshard.training.parts.tree import pack, unpack

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StatefulUpdate:
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
        pack(self.state, self.name, tensors)
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
        tree = pack(self.part.state_dict(), self.name, tensors)
        return unpack(tree, {name: tensor.clone() for name, tensor in tensors.items()}, self.name)

    def put_back(self, before: Any) -> None:
        """Load what `now` returned; an object that refuses that, too, is left as it is, and it is logged."""
        try:
            self.part.load_state_dict(before)
        except Exception as error:  # noqa: BLE001 - what it refused before is being raised
            logger.error("'%s' (%s) can't be put back as it was: %s", self.name, type(self.part).__name__, error)


def load_objects(updates: Sequence[StatefulUpdate]) -> None:
    """Load all of them, or none: of all but the last the state before is kept, and the last one is the largest.

    Raises:
        StateDictMismatchError: One refused.
    """
    done: list[tuple[StatefulUpdate, Any]] = []
    in_order = sorted(updates, key=lambda one: one.nbytes)
    try:
        for number, one in enumerate(in_order, start=1):
            if number < len(in_order):
                done.append((one, one.now()))
            one.load()
    except BaseException:
        for one, before in reversed(done):
            one.put_back(before)
        raise
