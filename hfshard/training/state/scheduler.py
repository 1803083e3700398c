"""A learning rate scheduler's state: its numbers, but not its functions, optimizers and modules."""

from __future__ import annotations

import enum
import functools
import types
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hfshard.errors import StateDictMismatchError, UnstorableTensorError
from hfshard.pickles.plain_values import NOT_STORED, NotStored
from hfshard.training.state.nested import ObjectState, encode
from hfshard.training.state.pending_loads import PendingLoad, check_entries, class_mismatch
from hfshard.training.state.reordering import Reordering

_NEVER_STORED: Final = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    functools.partial,
    type,
    weakref.ReferenceType,
    Optimizer,
    nn.Module,
    LRScheduler,
    ReduceLROnPlateau,
)
"""Types that a scheduler gets from its constructor and keeps in a restore: torch's own rule for LambdaLR."""

_BUILTIN_VALUES: Final = (enum.Enum, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, BaseException)
"""Types whose subclasses' instances have a value besides their attributes."""

_MISSING: Final = object()


def is_scheduler(value: object) -> bool:
    """Return whether an object is one of torch's schedulers, or derived from one."""
    return isinstance(value, LRScheduler | ReduceLROnPlateau)


def encode_scheduler(scheduler: Any, path: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Encode the state of a scheduler with `nested.encode`.

    Functions, lambdas, bound methods, optimizers and modules in it are marked as not stored. For any other object, such
    as a callable with its own state or another scheduler, the attributes are stored.

    Raises:
        UnstorableTensorError: It contains an object that is more than its attributes.
    """
    held = scheduler.state_dict()
    if not isinstance(held, dict):
        raise UnstorableTensorError(f"The state_dict of '{path}' must return a dict, got a {type(held).__name__}.")
    stored = {id(scheduler)}

    def stand_in(value: Any) -> NotStored | ObjectState | None:
        if not is_scheduler(value) or id(value) in stored:
            return _stand_in(value)
        stored.add(id(value))
        return ObjectState(type(value).__qualname__, dict(vars(value)))

    state = encode(held, path, tensors, on_object=stand_in)
    return {"class": type(scheduler).__qualname__, "parts": _part_classes(scheduler), "state": state}


def plan_scheduler(
    scheduler: Any, saved: dict[str, Any], name: str, path: str, reorderings: Sequence[Reordering] = ()
) -> PendingLoad:
    """Check a state against a freshly built scheduler, and return the load that applies it.

    Args:
        scheduler: Built as for the run that was saved; it is not changed before the load.
        saved: What `encode_scheduler` returned, decoded.
        name: The scheduler's name in the training state, for messages.
        path: The checkpoint's path, for messages.
        reorderings: The current order of its optimizers' groups, if it is another one than when it was saved.

    Raises:
        StateDictMismatchError: It has another class, or schedulers of other classes, or lacks an object that was marked
            as not stored; or groups are reordered, and it is unknown whether a list has a value of each.
    """
    if not isinstance(saved["state"], dict):
        raise TypeError("the state of a scheduler is not a dict")
    if saved["class"] is None:
        check_entries(scheduler, saved["state"], name, path)
    elif saved["class"] != type(scheduler).__qualname__:
        raise class_mismatch(saved["class"], scheduler, "scheduler", name, path)
    parts = _part_classes(scheduler)
    if saved.get("parts", parts) != parts:
        raise _differs("_schedulers", name, path, str(saved["parts"]), str(parts))
    fresh = scheduler.state_dict()
    state = saved["state"]
    for reordering in reorderings:
        state = reordering.apply(state, fresh)
    held: list[tuple[Any, dict[str, Any]]] = []
    merged = _Merging(name, path, held).merge(state, fresh, "")
    owners: dict[int, Any] = {}
    _collect_owners([scheduler, *(one for one, _ in held)], owners)
    before = [(one, dict(vars(one))) for one in owners.values()]

    def load() -> None:
        for one, attributes in held:
            vars(one).update(attributes)
        scheduler.load_state_dict(merged)

    def undo() -> None:
        if not before:  # the scheduler has no attributes
            scheduler.load_state_dict(fresh)
        for one, attributes in before:
            vars(one).clear()
            vars(one).update(attributes)

    return PendingLoad(name, load, undo)


def _part_classes(scheduler: Any) -> list[Any]:
    """Return the classes of the schedulers in a chained or sequential one, each before the list of its own."""
    parts: list[Any] = []
    for part in getattr(scheduler, "_schedulers", ()):
        parts += [type(part).__qualname__, _part_classes(part)]
    return parts


def _stand_in(value: Any) -> NotStored | ObjectState | None:
    if isinstance(value, _NEVER_STORED):
        return NOT_STORED
    return ObjectState(type(value).__qualname__, dict(vars(value))) if _is_its_attributes(value) else None


def _collect_owners(value: Any, owners: dict[int, Any]) -> None:
    """Collect all objects whose attributes a load changes: the scheduler, those in it, and the objects they contain."""
    if isinstance(value, list | tuple):
        for item in value:
            _collect_owners(item, owners)
    elif isinstance(value, dict):
        _collect_owners(list(value.values()), owners)
    elif id(value) not in owners and (is_scheduler(value) or _stand_in(value) not in (NOT_STORED, None)):
        owners[id(value)] = value
        _collect_owners(list(vars(value).values()), owners)


def _is_its_attributes(value: Any) -> bool:
    """Return whether an object is only its attributes, unlike an enum, a random.Random or a subclass of dict."""
    kind = type(value)
    has_own_state = any(
        getattr(kind, method, default) is not default
        for method, default in (
            ("__reduce__", object.__reduce__),
            ("__reduce_ex__", object.__reduce_ex__),
            ("__getstate__", object.__getstate__),
        )
    )
    has_slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    return hasattr(value, "__dict__") and not (has_own_state or has_slots or isinstance(value, _BUILTIN_VALUES))


@dataclass
class _Merging:
    """Uses the built scheduler's own objects for what was not stored, and moves tensors to its devices."""

    name: str
    path: str
    held: list[tuple[Any, dict[str, Any]]]

    def merge(self, saved: Any, fresh: Any, at: str) -> Any:
        if isinstance(saved, NotStored):
            if fresh is _MISSING:
                raise self._differs(at, "an object that is not stored (a function, an optimizer)", "nothing")
            return fresh
        if isinstance(saved, torch.Tensor) and isinstance(fresh, torch.Tensor):
            return saved.to(fresh.device)
        if isinstance(saved, ObjectState):
            return self._object(saved, fresh, at)
        if isinstance(saved, dict):
            inner = fresh if isinstance(fresh, dict) else {}
            for key in saved:
                saved[key] = self.merge(saved[key], inner.get(key, _MISSING), f"{at}.{key}" if at else str(key))
            return saved
        if isinstance(saved, list | tuple):
            others = list(fresh) if isinstance(fresh, list | tuple) else []
            if at.endswith("_schedulers") and len(others) != len(saved):
                raise self._differs(at, f"{len(saved)} schedulers", f"{len(others)}")
            if at.endswith("lr_lambdas"):  # torch has None for a function, and the attributes of another callable
                self._check_callables(saved, others, at)
            others += [_MISSING] * (len(saved) - len(others))
            items = [self.merge(item, other, f"{at}[{i}]") for i, (item, other) in enumerate(zip(saved, others))]
            return items if isinstance(saved, list) else type(saved)(items)
        return saved

    def _check_callables(self, saved: list[Any] | tuple[Any, ...], fresh: list[Any], at: str) -> None:
        for number, (before, now) in enumerate(zip(saved, fresh)):
            if (before is None) != (now is None):
                words = ("a function", "another callable")
                expected, actual = words if before is None else words[::-1]
                raise self._differs(f"{at}[{number}]", expected, actual)

    def _object(self, saved: ObjectState, fresh: Any, at: str) -> Any:
        if fresh is _MISSING or type(fresh).__qualname__ != saved.class_name:
            found = "nothing" if fresh is _MISSING else f"a {type(fresh).__qualname__}"
            raise self._differs(at, f"a {saved.class_name}", found)
        attributes = self.merge(saved.attributes, dict(vars(fresh)), at)
        self.held.append((fresh, attributes))
        return fresh

    def _differs(self, at: str, expected: str, actual: str) -> StateDictMismatchError:
        return _differs(at, self.name, self.path, expected, actual)


def _differs(at: str, name: str, path: str, expected: str, actual: str) -> StateDictMismatchError:
    return StateDictMismatchError(
        f"'{at}' of '{name}' was {expected} when the checkpoint '{path}' was saved, but is {actual} in the scheduler "
        "that was built. Build it as in the saved run.",
        path=path,
        expected=expected,
        actual=actual,
    )
