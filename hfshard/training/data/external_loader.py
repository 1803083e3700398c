"""Loaders that are not ours: when their iterators begin and end, and the RNG states that a resume needs around that.

`iter()` of torch's DataLoader, and so of most others, draws a seed from the global RNG, and a shuffling sampler draws
its order there. In the middle of an epoch a straight run has that behind it, and a resumed one has it before it: so the
states at the time of the save have to be put back after the first `iter()`, and not before it; and for the same order,
that `iter()` has to begin with the states that the first one began with. Between two epochs, nothing is to be done.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from torch.utils.data import DataLoader

from hfshard.errors import InvalidArgumentError, StateDictMismatchError
from hfshard.training.data.dataloader import ResumableDataLoader
from hfshard.training.parts.rng import check_rng_state, rng_state, set_rng_state

_TORCHDATA: Final = "torchdata.stateful_dataloader"
_FINISHED: Final = "_iterator_finished"
"""What torchdata's state calls it that the epoch is over."""
_TRACKER: Final = "_hfshard_tracker"


def track(loader: Any) -> Any:
    """What a TrainingState keeps for a loader: a `LoaderTracker` that stands for it, or itself if it needs none.

    Raises:
        InvalidArgumentError: It was prepared by Accelerate, and so reads a batch ahead of what it hands out.
    """
    if isinstance(loader, (ResumableDataLoader, LoaderTracker)) or not hasattr(type(loader), "__iter__"):
        return loader
    if "base_dataloader" in vars(loader):
        raise InvalidArgumentError(
            f"The loader is a {type(loader).__name__} of Accelerate, which fetches a batch more than it hands out, so"
            " that no state of it is exact. Prepare hfshard.training.plain_loader(resumable_loader)"
            " instead, or leave the loader out of the TrainingState."
        )
    return getattr(type(loader), _TRACKER, None) or LoaderTracker(loader)


def reset_after_iter(
    loader: Any, restore_rng: Callable[[], None], rng_at_iter: Mapping[str, Any] | None = None
) -> None:
    """Put the RNG states back once more, after the next `iter(loader)`; later ones are left alone.

    Where `__iter__` is a generator function, which does nothing before its first batch is asked for, it is after that.

    Args:
        loader: Any but a `ResumableDataLoader`, which draws from no RNG, and for which nothing is done.
        restore_rng: Puts them back.
        rng_at_iter: What to begin that `iter()` with, of `rng_state`; None: whatever is there.
    """
    tracker = track(loader)
    if isinstance(tracker, LoaderTracker):
        tracker.pending = (restore_rng, rng_at_iter)


class LoaderTracker:
    """Stands for a foreign loader in a checkpoint: its state, and whether and how an epoch of it has begun.

    The loader's class is replaced by a subclass that reports `iter()` and the end of iterators; all else is as it was.

    Exact are then torchdata's StatefulDataLoader and loaders of the user's own, with these exceptions, of which all
    but the last are a warning when a checkpoint is saved:

    - A loader with worker processes, in the middle of an epoch: what its workers draw is not restored.
    - A loader whose `__iter__` is a generator function, in the middle of an epoch, where fetching a batch draws in the
      main process: what the first batch after the resume draws is not restored.
    - One whose class can't be replaced (of an extension, with slots of its own).
    - An iterator that was made before the TrainingState: whether it has ended is not seen.

    Attributes:
        loader: The user's.
        pending: What the next `iter()` has to do, once.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.pending: tuple[Callable[[], None], Mapping[str, Any] | None] | None = None
        self._rng_at_iter: dict[str, Any] | None = None
        self._turn = 0
        """Counts the iterators."""
        self._is_running = False
        self._draws_late = False
        self._loaded: Mapping[str, Any] | None = None
        self._warned: set[str] = set()
        self._can_follow = _replace_class(loader, self)

    def state_dict(self) -> dict[str, Any]:
        """The loader's state, whether it is within an epoch, and the RNG states with which that epoch began."""
        if _is_torchdata(self.loader) and getattr(self.loader, "_iterator", None) is None:
            # Its state_dict() would make an iterator, which draws, and which the next iter() would use.
            return {"loader": None, "is_within": False} if self._loaded is None else dict(self._loaded)
        before = rng_state()
        state = self.loader.state_dict()
        set_rng_state(before)
        is_within = self._is_running
        if _is_torchdata(self.loader) and isinstance(state, Mapping) and _FINISHED in state:
            is_within = not state[_FINISHED]
        self._warn(is_within)
        return {"loader": state, "is_within": is_within, "rng_at_iter": self._rng_at_iter if is_within else None}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse what is no state of a tracker.

        Raises:
            StateDictMismatchError: It was saved with a loader of ours, or with something else.
            DamagedCheckpointError: The RNG states in it are none.
        """
        if not isinstance(state_dict, Mapping) or not {"loader", "is_within"} <= state_dict.keys():
            raise StateDictMismatchError(
                f"The data loader is a {type(self.loader).__name__}, and the checkpoint has the state of another kind"
                " of loader. Resume with the loader that it was saved with, or leave it out of the restore.",
                actual=type(self.loader).__name__,
            )
        if state_dict.get("rng_at_iter") is not None:
            check_rng_state(state_dict["rng_at_iter"], "the data loader's state")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the loader's state; the RNG states are to be restored after this, and then `reset` called."""
        self.check_state_dict(state_dict)
        self._loaded, self.pending = state_dict, None
        # As before the save, until the next iter(): a save before that is to be the same.
        self._is_running, self._rng_at_iter = state_dict["is_within"], state_dict.get("rng_at_iter")
        state = state_dict["loader"]
        if state is None:
            return
        if _is_torchdata(self.loader) and not state_dict["is_within"]:
            # Of a state that has ended, its iter() makes two iterators and draws twice; one that ends here does not.
            self.loader.load_state_dict({**state, _FINISHED: False})
            for _ in self.loader:
                raise StateDictMismatchError(
                    f"The {type(self.loader).__name__} was at the end of an epoch when the checkpoint was saved, and"
                    " now gives more. Build it and its dataset as they were then."
                )
            self._rng_at_iter = None
        else:
            self.loader.load_state_dict(state)

    def reset(self, restore_rng: Callable[[], None]) -> None:
        """After a restore: see to it that the states are put back after the next `iter()`, where that is needed."""
        if self._loaded is not None and self._loaded["is_within"]:
            self.pending = (restore_rng, self._loaded.get("rng_at_iter"))

    def begin(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Called for `iter(loader)`."""
        pending, self.pending = self.pending, None
        if pending is not None and pending[1] is not None:
            set_rng_state(dict(pending[1]))
        self._turn += 1
        self._rng_at_iter, self._is_running = rng_state(), True
        iterator = make()
        is_late = inspect.isgenerator(iterator)
        if pending is not None and not is_late:
            pending[0]()
        return _TrackedIterator(
            iterator, self, self._turn, pending[0] if pending is not None and is_late else None, is_late
        )

    def end(self, turn: int) -> None:
        """Called when an iterator has ended; only the newest counts."""
        if turn == self._turn:
            self._is_running = False

    def note_late_draws(self) -> None:
        """Called when fetching a batch has drawn from the RNGs here, in a generator that can't be resumed before it."""
        self._draws_late = True

    def _warn(self, is_within: bool) -> None:
        name, reasons = type(self.loader).__name__, {}
        if not self._can_follow:
            reasons["follow"] = (
                "can't be followed (its class has a layout of its own), so that the random numbers after"
            )
        elif is_within and isinstance(self.loader, DataLoader) and self.loader.num_workers:
            reasons["workers"] = "has worker processes, so that the random numbers that they draw after"
        elif is_within and self._draws_late:
            reasons["late"] = "draws random numbers while it fetches batches in a generator, so that those after"
        for key, reason in reasons.items():
            if key not in self._warned:
                self._warned.add(key)
                warnings.warn(
                    f"The {name} {reason} a resume in the middle of an epoch are not those of a run that was never"
                    " stopped. hfshard.training.ResumableDataLoader has no such limit; nothing is to be done where"
                    " loading draws none.",
                    UserWarning,
                    stacklevel=3,
                )


class _TrackedIterator:
    """An iterator that tells when it ends, and has all else of the one within."""

    def __init__(
        self,
        iterator: Iterator[Any],
        tracker: LoaderTracker,
        turn: int,
        restore_rng: Callable[[], None] | None,
        is_late: bool,
    ) -> None:
        self._iterator = iterator
        self._tracker = tracker
        self._turn = turn
        self._restore_rng = restore_rng
        self._look = 2 if is_late else 0
        """Batches until the second, whose fetching is looked at."""

    def __iter__(self) -> _TrackedIterator:
        return self

    def __next__(self) -> Any:
        if self._look:
            self._look -= 1
            if not self._look:
                return self._fetch_and_compare()
        restore_rng, self._restore_rng = self._restore_rng, None
        try:
            return next(self._iterator)
        except StopIteration:
            self._tracker.end(self._turn)
            raise
        finally:
            if restore_rng is not None:
                restore_rng()

    def _fetch_and_compare(self) -> Any:
        before = _comparable(rng_state())
        batch = next(self)
        if _comparable(rng_state()) != before:
            self._tracker.note_late_draws()
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def _comparable(state: Any) -> Any:
    """A state of RNGs as something that can be compared."""
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else repr(state)


def _replace_class(loader: Any, tracker: LoaderTracker) -> bool:
    """Give the loader a class of its own that reports `iter()`; False where Python does not allow it."""
    base: Any = type(loader)

    def __iter__(self: Any) -> Iterator[Any]:
        make = functools.partial(base.__iter__, self)
        return tracker.begin(make) if self is tracker.loader else make()  # a copy has the class, too

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        function, arguments, *rest = base.__reduce_ex__(self, protocol)
        arguments = tuple(base if one is tracked_class else one for one in arguments)
        return (_rebuilt if function is copyreg.__newobj__ else function, arguments, *rest)  # type: ignore[attr-defined]

    body = {
        "__iter__": __iter__,
        "__reduce_ex__": __reduce_ex__,
        "__slots__": (),
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        _TRACKER: tracker,
    }
    tracked_class = types.new_class(base.__name__, (base,), {}, lambda namespace: namespace.update(body))
    try:
        loader.__class__ = tracked_class
    except TypeError:
        return False
    return True


def _rebuilt(base: type, *arguments: Any) -> Any:
    return base.__new__(base, *arguments)


def _is_torchdata(loader: Any) -> bool:
    return any(one.__module__.startswith(_TORCHDATA) for one in type(loader).__mro__)
