"""Track loaders of other libraries: when their iterators begin and end, and which RNG states a resume needs then.

`iter()` of torch's DataLoader, and of most others, draws a seed from the global RNG, and a shuffling sampler draws its
order from it. In the middle of an epoch, a straight run has already drawn them, and a resumed run still has to. So the
states at the time of the save must be restored after the first `iter()`, not before it; and to get the same order, that
`iter()` must begin with the states that the original one began with. Between two epochs there is nothing to do.
"""

from __future__ import annotations

import collections
import copy
import copyreg
import functools
import inspect
import itertools
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from torch.utils.data import DataLoader

from hfshard.errors import DamagedCheckpointError, InvalidArgumentError, StateDictMismatchError
from hfshard.training.data.dataloader import ResumableDataLoader
from hfshard.training.data.seeding import generator_state, is_generator, set_generator_state
from hfshard.training.state.reordering import is_same
from hfshard.training.state.rng import check_rng_state, rng_state, set_rng_state

_TORCHDATA: Final = "torchdata.stateful_dataloader"
_FINISHED: Final = "_iterator_finished"
"""The key of torchdata's state that says whether the epoch is over."""
_TRACKER: Final = "_hfshard_tracker"


def track(loader: Any) -> Any:
    """Return what a TrainingState keeps for a loader: a `LoaderTracker`, or the loader itself if it needs none.

    Raises:
        InvalidArgumentError: Accelerate prepared the loader, which therefore reads a batch ahead.
    """
    if isinstance(loader, (ResumableDataLoader, LoaderTracker)) or not hasattr(type(loader), "__iter__"):
        return loader
    if "base_dataloader" in vars(loader):
        raise InvalidArgumentError(
            f"The loader is Accelerate's {type(loader).__name__}, which fetches one batch ahead, so its state is never "
            "exact. Prepare hfshard.training.plain_loader(resumable_loader) instead, or leave the loader out of the "
            "TrainingState."
        )
    return getattr(type(loader), _TRACKER, None) or LoaderTracker(loader)


class _Pending(NamedTuple):
    """Work for the next `iter()`."""

    restore: Callable[[], None]
    """Lets all generators continue from their states at the save; called after `iter()`."""
    rng_at_iter: Mapping[str, Any] | None
    """The states to begin `iter()` with, from `rng_state`; None: the current ones."""
    held_at_iter: Mapping[str, Any] | None
    """The states to begin `iter()` with, of the generators that the loader has."""


class LoaderTracker:
    """Represents another library's loader in a checkpoint: its state, and how its current epoch began.

    The loader's class is replaced by a subclass that reports `iter()` and the end of iterators; nothing else changes.

    The generators that the loader, its samplers and its dataset have are stored with it. torchdata's StatefulDataLoader
    and the user's own loaders then resume exactly, with these exceptions. All but the last cause a warning when a
    checkpoint is saved:

    - A loader with worker processes, in the middle of an epoch: what its workers draw is not restored.
    - A loader whose `__iter__` is a generator function that draws in the main process while it fetches a batch, in the
      middle of an epoch: what the first batch after the resume draws is not restored.
    - torchdata's loader with a sampler that draws from its own generator in `__iter__` itself, and not at the first
      index, in the middle of an epoch: the order after the resume differs.
    - A generator without a state (random.SystemRandom).
    - A loader whose class cannot be replaced (that of an extension, or one with slots).
    - An iterator that was created before the TrainingState: its end is not noticed.

    Attributes:
        loader: The user's loader.
        pending: What the next `iter()` has to do, once.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.pending: _Pending | None = None
        self._rng_at_iter: dict[str, Any] | None = None
        self._held_at_iter: dict[str, Any] | None = None
        self._turn = 0
        """Counts the iterators."""
        self._is_running = False
        self._draws_late = False
        self._draws_early: list[str] = []
        """Generators from which a sampler draws in its `__iter__`."""
        self._loaded: Mapping[str, Any] | None = None
        self._warned: set[str] = set()
        self._can_follow = _replace_class(loader, self)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state, whether it is within an epoch, and the RNG states with which that epoch began."""
        if _is_torchdata(self.loader) and getattr(self.loader, "_iterator", None) is None:
            # Its state_dict() would create an iterator, which draws random numbers and is used by the next iter().
            if self._loaded is not None:
                return dict(self._loaded)
            return {"loader": None, "is_within": False, "generators": HeldGenerators(self.loader).states()}
        held_before = HeldGenerators(self.loader).states()
        state = self._own_state()
        is_within = self._is_running
        if _is_torchdata(self.loader) and isinstance(state, Mapping) and _FINISHED in state:
            is_within = not state[_FINISHED]
        self._warn(is_within, HeldGenerators(self.loader).stateless())
        return {
            "loader": state,
            "is_within": is_within,
            "rng_at_iter": self._rng_at_iter if is_within else None,
            "generators": held_before,
            "generators_at_iter": self._held_at_iter if is_within else None,
        }

    def _own_state(self) -> Any:
        """Return what the loader's `state_dict` does, without the draws that it may make."""
        held = HeldGenerators(self.loader)
        before, held_before = rng_state(), held.states()
        state = self.loader.state_dict()
        set_rng_state(before)
        held.set(held_before)
        return state

    def keep(self) -> Callable[[], None]:
        """Note the position of the loader and of its iterator, and return a function that restores both.

        The state that the loader would return is not enough: to load it ends an iterator in use, and continues an epoch
        that was left.
        """
        held = HeldGenerators(self.loader)
        held_before = held.states()
        # torchdata keeps its position in an iterator, but loads the states of these at once.
        parts = _stateful_parts(self.loader) if _is_torchdata(self.loader) else [self.loader]
        states = [copy.deepcopy(self._own_state() if one is self.loader else one.state_dict()) for one in parts]
        attributes = [kept_attributes(one) for one in (self, self.loader)]

        def put_back() -> None:
            for part, state in zip(parts, states, strict=True):
                part.load_state_dict(state)
            for put_back_attributes in attributes:
                put_back_attributes()
            held.set(held_before)

        return put_back

    def with_state(self, state: Any) -> dict[str, Any]:
        """Return what `state_dict` would, for a state that the loader itself returned in another program."""
        is_over = isinstance(state, Mapping) and bool(state.get(_FINISHED, False))
        return {"loader": state, "is_within": not is_over, "rng_at_iter": None}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Reject anything that is not the state of a tracker.

        Raises:
            StateDictMismatchError: It was saved with a ResumableDataLoader or another object.
            DamagedCheckpointError: The RNG states in it are not valid.
        """
        if not isinstance(state_dict, Mapping) or not {"loader", "is_within"} <= state_dict.keys():
            raise StateDictMismatchError(
                f"The data loader is a {type(self.loader).__name__}, but the checkpoint has the state of another kind "
                "of loader. Resume with the loader that it was saved with, or leave it out: restore(state, ..., "
                "without=['loader']).",
                actual=type(self.loader).__name__,
            )
        if state_dict.get("rng_at_iter") is not None:
            check_rng_state(state_dict["rng_at_iter"], "the data loader's state")
        for key in ("generators", "generators_at_iter"):
            HeldGenerators(self.loader).check(state_dict.get(key) or {})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the loader's state. The caller then restores the RNG states and calls `reset`."""
        self.check_state_dict(state_dict)
        self._loaded = state_dict
        self.pending = None
        # Keep the state from the time of the save until the next iter(), so that a save before that is the same.
        self._is_running = state_dict["is_within"]
        self._rng_at_iter = state_dict.get("rng_at_iter")
        self._held_at_iter = state_dict.get("generators_at_iter")
        self._load(state_dict)
        HeldGenerators(self.loader).set(state_dict.get("generators") or {})

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        state = state_dict["loader"]
        if state is None:
            return
        if _is_torchdata(self.loader) and not state_dict["is_within"]:
            # With the state of an ended epoch, iter() creates two iterators and draws twice; create the first one here.
            if self.loader.persistent_workers:
                self._end_epoch(state)
            else:
                self.loader.load_state_dict(state)
                self.loader._get_iterator()
            self._rng_at_iter = self._held_at_iter = None
        else:
            self.loader.load_state_dict(state)

    def _end_epoch(self, state: Mapping[str, Any]) -> None:
        """Let persistent workers, which continue in the next epoch, end the one of a state.

        Raises:
            StateDictMismatchError: They have begun the next one: torchdata would lose what they have loaded of it.
        """
        self.loader.load_state_dict({**state, _FINISHED: False})
        for _ in self.loader:
            raise StateDictMismatchError(
                f"The {type(self.loader).__name__} was at the end of an epoch when the checkpoint was saved, but "
                "now returns more batches. Build it and its dataset as in the saved run, or without "
                "persistent_workers."
            )

    def reset(self, restore_rng: Callable[[], None]) -> None:
        """After a restore, let the next `iter()` restore the RNG states once more, if the loader needs that.

        If `__iter__` is a generator function, which does nothing before its first batch is fetched, it happens after
        that.
        """
        loaded = self._loaded
        if loaded is None or not loaded["is_within"]:
            return

        def restore() -> None:
            restore_rng()
            HeldGenerators(self.loader).set(loaded.get("generators") or {})

        self.pending = _Pending(restore, loaded.get("rng_at_iter"), loaded.get("generators_at_iter"))

    def begin(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Create an iterator, for `iter(loader)`."""
        pending = self.pending
        self.pending = None
        if pending is not None and pending.rng_at_iter is not None:
            set_rng_state(dict(pending.rng_at_iter))
        held = HeldGenerators(self.loader)
        if pending is not None:
            held.set(pending.held_at_iter or {})
        self._turn += 1
        self._rng_at_iter, self._held_at_iter = rng_state(), held.states()
        self._is_running = True
        iterator = make()
        if _is_torchdata(self.loader) and pending is None:
            self._draws_early = held.drawn_since(self._held_at_iter)
        elif _is_torchdata(self.loader) and not self.loader.num_workers:
            _skip_used_indexes(iterator)
        is_late = inspect.isgenerator(iterator)
        if pending is not None and not is_late:
            pending.restore()
        return _TrackedIterator(
            iterator, self, self._turn, pending.restore if pending is not None and is_late else None, is_late
        )

    def end(self, turn: int) -> None:
        """Note that an iterator has ended; only the newest counts."""
        if turn == self._turn:
            self._is_running = False

    def note_late_draws(self) -> None:
        """Note that a generator function draws random numbers in this process while it fetches a batch."""
        self._draws_late = True

    def _warn(self, is_within: bool, stateless: list[str]) -> None:
        name = type(self.loader).__name__
        reasons: dict[str, str] = {}
        if stateless:
            reasons["stateless"] = f"holds '{stateless[0]}', which has no state to store, so the random numbers"
        if not self._can_follow:
            reasons["follow"] = "cannot be followed (its class has a custom layout), so the random numbers"
        elif is_within and isinstance(self.loader, DataLoader) and self.loader.num_workers:
            reasons["workers"] = "has worker processes, so the random numbers that they draw"
        elif is_within and self._draws_early:
            reasons["early"] = (
                f"calls iter() of its sampler several times when it resumes, which draws from '{self._draws_early[0]}' "
                "there and not at its first index, so the order and the random numbers"
            )
        elif is_within and self._draws_late:
            reasons["late"] = "draws random numbers while it fetches batches in a generator, so these numbers"
        for key, reason in reasons.items():
            if key not in self._warned:
                self._warned.add(key)
                warnings.warn(
                    f"The {name} {reason} after a resume in the middle of an epoch differ from those of an "
                    "uninterrupted run. Use hfshard.training.ResumableDataLoader, which has no such limit. Ignore "
                    "this if loading draws no random numbers.",
                    UserWarning,
                    stacklevel=3,
                )


class _TrackedIterator:
    """An iterator that reports its end to the tracker, and otherwise behaves like the one that it wraps."""

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
        """Batches until the second one, which is checked for draws."""

    def __iter__(self) -> _TrackedIterator:
        return self

    def __next__(self) -> Any:
        if self._look:
            self._look -= 1
            if not self._look:
                return self._fetch_and_compare()
        restore_rng = self._restore_rng
        self._restore_rng = None
        try:
            return next(self._iterator)
        except StopIteration:
            self._tracker.end(self._turn)
            raise
        finally:
            if restore_rng is not None:
                restore_rng()

    def _fetch_and_compare(self) -> Any:
        before = rng_state()
        batch = next(self)
        if not is_same(rng_state(), before):
            self._tracker.note_late_draws()
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def _replace_class(loader: Any, tracker: LoaderTracker) -> bool:
    """Give the loader a class of its own that reports `iter()`; return False if Python does not allow it."""
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


def _skip_used_indexes(iterator: Any) -> None:
    """Let a resumed iterator of torchdata draw now what the original one drew before the save.

    It skips the indexes of a plain batch sampler at its first batch, when the states of the save are restored already;
    and does not look for a sampler's end, where the original one did so to complete the last batch.

    Args:
        iterator: Without workers, which have indexes ahead.
    """
    if isinstance(iterator._sampler_iter, itertools.islice):
        iterator._sampler_iter = iter(iterator._index_sampler)
        collections.deque(itertools.islice(iterator._sampler_iter, iterator._sampler_iter_yielded), maxlen=0)
    used = iterator._sampler_iter
    if _is_torchdata(used) and hasattr(used, "sampler_iter") and used.samples_yielded % used.batch_size:
        next(used.sampler_iter, None)


def _stateful_parts(loader: Any) -> list[Any]:
    """Return the parts of torchdata's loader that have a state, in this process."""
    names = ["batch_sampler", "sampler", *([] if loader.num_workers else ["dataset"])]
    parts = {id(one): one for one in (getattr(loader, name, None) for name in names)}
    return [one for one in parts.values() if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")]


def kept_attributes(one: Any) -> Callable[[], None]:
    """Note the attributes of an object, and return a function that restores them; nothing is copied."""
    own = getattr(one, "__dict__", {})
    before = dict(own)

    def put_back() -> None:
        own.clear()
        own.update(before)

    return put_back


def _is_torchdata(loader: Any) -> bool:
    return any(one.__module__.startswith(_TORCHDATA) for one in type(loader).__mro__)


# The random number generators of a loader, its samplers and its dataset: found by name, stored and restored.


class HeldGenerators:
    """The generators that a loader has now.

    Args:
        loader: Its own attributes are inspected, and those of its samplers; those of its dataset only if it has no
            workers, which draw from copies.
    """

    def __init__(self, loader: Any) -> None:
        first: dict[int, tuple[str, Any]] = {}
        for name, value in _attributes(loader):
            first.setdefault(id(value), (name, value))
        self._found = dict(first.values())

    def states(self) -> dict[str, Any]:
        """Return name -> state, without the generators that have no state."""
        found = {}
        for name, generator in self._found.items():
            try:
                found[name] = generator_state(generator)
            except NotImplementedError:  # random.SystemRandom
                continue
        return found

    def drawn_since(self, states: Mapping[str, Any]) -> list[str]:
        """Name the samplers' generators, without the loader's own, whose state has changed."""
        now = self.states()
        names = [name for name in now if "sampler." in name]
        return [name for name in names if not is_same(now[name], states.get(name))]

    def stateless(self) -> list[str]:
        """Name the generators that have no state to store."""
        return sorted(self._found.keys() - self.states().keys())

    def check(self, states: Mapping[str, Any]) -> None:
        """Reject states that do not fit, and warn of missing generators; nothing is changed.

        Raises:
            DamagedCheckpointError: A state is not valid for its generator.
        """
        missing = sorted(states.keys() - self._found.keys())
        if missing:
            warnings.warn(
                f"The data loader no longer has the random number generator '{missing[0]}' that it had when the "
                "checkpoint was saved. Unless `__iter__` creates it, build the loader as in the saved run.",
                stacklevel=2,
            )
        before = self.states()
        try:
            for name, state in states.items():
                if name in self._found:
                    set_generator_state(self._found[name], state)
        except (LookupError, ValueError, TypeError, RuntimeError, AttributeError, OverflowError) as error:
            raise DamagedCheckpointError(
                f"The state of the data loader's random number generator '{name}' is not valid ({error!r:.200}), or is "
                "for another kind of generator. Build the loader as in the saved run, or restore another checkpoint."
            ) from error
        finally:
            self.set(before)

    def set(self, states: Mapping[str, Any]) -> None:
        """Let the generators continue from these states; a missing one is created, and seeded, in `__iter__`."""
        for name, state in states.items():
            if name in self._found:
                set_generator_state(self._found[name], state)


def _attributes(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield every generator in the attributes of a loader and its parts, or in a list or dict in them."""
    names = ["batch_sampler", "sampler", *([] if getattr(loader, "num_workers", 0) else ["dataset"])]
    waiting = [("", loader)]
    seen: set[int] = set()
    while waiting:
        place, part = waiting.pop(0)
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        for name, value in (vars(part) if hasattr(part, "__dict__") else {}).items():
            entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            yield from ((f"{place}{name}[{key!r}]", one) for key, one in entries if is_generator(one))
            if is_generator(value):
                yield f"{place}{name}", value
        waiting += [(f"{place}{name}.", getattr(part, name, None)) for name in names]
