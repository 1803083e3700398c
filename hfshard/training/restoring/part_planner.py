"""What a restore will change, and how each part of a training state is compared with what was saved of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import nn

from hfshard._util.threads import deferred_interrupt
from hfshard.errors import StateDictMismatchError
from hfshard.training.data.external_loader import LoaderTracker
from hfshard.training.parts.optimizers.inner import refuse_parted, with_inner
from hfshard.training.parts.optimizers.optimizer import plan_optimizer
from hfshard.training.parts.pending_loads import PendingLoad, StatefulLoad
from hfshard.training.parts.scheduler import plan_scheduler
from hfshard.training.ranks import ALONE, Ranks
from hfshard.training.restoring.applying import all_or_nothing, load_all
from hfshard.training.restoring.components import check_object
from hfshard.training.restoring.modules import plan_module
from hfshard.training.restoring.reorderings import find_reorderings, reordered_state
from hfshard.training.state import PartKind, TrainingState

PART_ORDER: Final[Mapping[PartKind, int]] = {"module": 0, "optimizer": 1, "scheduler": 2, "stateful": 3, "loader": 3}
"""The order of comparison: if the model differs, its optimizer does too, and the model's error says more."""


@dataclass
class Restoration:
    """A checkpoint that was read and compared with a training state, and the changes that are still to be made."""

    pending_loads: list[PendingLoad] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    """What does not fit, in words. Always empty with strict."""
    objects: list[StatefulLoad] = field(default_factory=list)
    """The user's own objects, each of which may refuse its state."""
    extra: Any = None
    lacking: tuple[str, ...] = ()
    """What another program's checkpoint did not hold, see `RestoredStep.lacking`."""
    set_rng: Callable[[], None] = lambda: None
    directory: str = ""
    without_gradients: list[nn.Parameter] = field(default_factory=list)
    trackers: list[LoaderTracker] = field(default_factory=list)
    """Loaders of other libraries: their next `iter()` draws random numbers, after which the RNG is restored again."""

    def apply(self, ranks: Ranks = ALONE) -> None:
        """Load everything on all ranks; the random number generators last. Every rank must call.

        Raises:
            StateDictMismatchError: An object refused its state, and nothing was changed.
            RankFailedError: So did one on another rank.
            KeyboardInterrupt: Ctrl-C was pressed meanwhile, and everything is restored: all of it was in memory.
        """
        with deferred_interrupt():
            load_all(self.objects, self.pending_loads, self.directory, ranks)
            with all_or_nothing(ranks):
                for parameter in self.without_gradients:
                    parameter.grad = None  # gradients of another step than the one that is resumed
                self.set_rng()
                for tracker in self.trackers:
                    tracker.reset(self.set_rng)


class PartPlanner:
    """Compares the decoded states of parts with those that were built, and notes how they are loaded."""

    def __init__(
        self,
        state: TrainingState,
        saved: Mapping[str, dict[str, Any]],
        directory: str,
        restoration: Restoration,
        *,
        strict: bool,
    ) -> None:
        """Begin.

        Args:
            state: Built as for the run that was saved; it is not changed.
            saved: Name of a part -> its entry: `kind`, `state`, and maybe `order`.
            directory: The checkpoint's, for messages.
            restoration: Receives the loads, and without strict the differences.
            strict: Refuse any difference.
        """
        self.state = state
        self.saved = saved
        self.parameter_names = state.parameter_names()
        self.directory = directory
        self.restoration = restoration
        self.strict = strict

    def plan(self, name: str, value: Any) -> None:
        """Plan one part.

        Args:
            name: Of the part.
            value: Its state, decoded.

        Raises:
            StateDictMismatchError: strict, and it does not fit.
            KeyError, IndexError, TypeError, ValueError, AttributeError: It is not what such a part saves.
        """
        try:
            self._plan(name, self.state.components[name], value)
        except StateDictMismatchError as error:
            if self.strict:
                raise
            self.restoration.differences.append(error.message)

    def _plan(self, name: str, part: Any, value: Any) -> None:
        kind = self.state.kinds[name]
        restoration = self.restoration
        if kind in ("stateful", "loader"):
            check_object(name, part, value, self.directory)
            if kind == "stateful":
                value = reordered_state(name, self.state, self.saved, self.directory, value)
            restoration.objects.append(StatefulLoad(name, part, value, self.directory))
            return
        if kind == "module":
            load = plan_module(name, part, value, self.directory, restoration.differences, strict=self.strict)
        elif kind == "optimizer":
            refuse_parted(part, name)
            load = plan_optimizer(part, value, self.parameter_names, name, self.directory)
            load = with_inner(load, part, self.state.of_kind("optimizer").values())
        else:
            reorderings = find_reorderings(name, self.state, self.saved, self.directory)
            load = plan_scheduler(part, value, name, self.directory, reorderings)
        restoration.pending_loads.append(load)
