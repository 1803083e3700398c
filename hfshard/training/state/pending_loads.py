"""Planned loads that can still fail, with their undo, and checks that an object is of the class that was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch.optim import Optimizer

from hfshard._util.text import shorten_list
from hfshard.errors import StateDictMismatchError


@dataclass(frozen=True, slots=True)
class PendingLoad:
    """A load that was checked but may still raise, in the user's own hook or load_state_dict."""

    name: str
    """The part's name."""
    load: Callable[[], None]
    undo: Callable[[], None] | None = None
    """Restores the part's old state, whether or not it was loaded; None for weights, which need a copy for that."""
    keep: Callable[[], Callable[[], None]] | None = None
    """For weights: copies them, and returns a function that restores them."""
    may_refuse: bool = False
    """For weights: whether the user's own hook or method may refuse them."""


# Checks that a state is restored into an object of the class that it was taken from, or of one with such states.


_LATER: Final = frozenset({"foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"})
"""Options that torch's optimizers did not always have; torch adds them to a state that lacks them."""

_OF_SCHEDULERS: Final = frozenset(
    {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "max_beta1", "swa_lr", "param_names", "params"}
)
"""Options that schedulers add to groups."""

_OF_VERSIONS: Final = frozenset(
    ("_is_initial", "_get_lr_called_within_step", "_initial_step", "_step_count", "_last_lr", "verbose", "mode_worse")
    + ("_scale_fn_ref", "_scale_fn_custom", "scale_fn", "_anneal_func_type", "anneal_func", "default_min_lr")
)
"""Entries that torch's schedulers have only in some versions, or at some times."""

_OF_OPTIMIZERS: Final = frozenset(
    ("amsgrad", "momentum", "dampening", "nesterov", "betas", "alpha", "centered", "rho", "etas", "step_sizes")
    + ("momentum_decay", "lr_decay", "initial_accumulator_value", "lambd", "t0", "ns_steps", "beta2_decay")
)
"""Options that some of torch's optimizers have and others do not."""

_SHOWN: Final = 5
"""The number of names that a message lists."""


def class_mismatch(saved: str, part: object, kind: str, name: str, path: str) -> StateDictMismatchError:
    """Build the error for an object of another class than the one whose state was saved.

    Args:
        saved: The qualified name of that class, whose module may have moved since.
        part: The object that was built.
        kind: "optimizer" or "scheduler".
        name: Its name in the training state.
        path: The checkpoint's path.
    """
    found = type(part).__qualname__
    return StateDictMismatchError(
        f"'{name}' is {_a(found)}, but the checkpoint '{path}' has the state of {_a(saved)}. Build the {kind} as "
        "in the saved run, or pass strict=False to leave this one as built.",
        path=path,
        expected=saved,
        actual=found,
    )


def check_options(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], name: str, path: str) -> None:
    """Reject the state of another class of optimizers, which only the options of its groups reveal.

    Args:
        optimizer: The one that was built.
        groups: The options of each group that was saved.
        name: Its name in the training state.
        path: The checkpoint's path.

    Raises:
        StateDictMismatchError: Options of its class are missing; or it is one of torch's, and has another one's.
    """
    own = set(optimizer.defaults)
    known = own.union(_OF_SCHEDULERS, _LATER, *optimizer.param_groups)
    for group in groups:
        missing = sorted(own - group.keys() - _LATER)
        others = _OF_OPTIMIZERS & (group.keys() - known) if type(optimizer).__module__.startswith("torch.optim") else ()
        if missing or others:
            raise _other_class(optimizer, "optimizer", missing, group.keys() - known, name, path)


def check_entries(scheduler: Any, saved: Mapping[str, Any], name: str, path: str) -> None:
    """Reject the state of another class of schedulers, which only its entries reveal.

    Args:
        scheduler: The one that was built.
        saved: What the other one's `state_dict()` returned.
        name: Its name in the training state.
        path: The checkpoint's path.

    Raises:
        StateDictMismatchError: Entries are missing; or it is one of torch's, and there are others.
    """
    fresh = scheduler.state_dict()
    missing = sorted(str(key) for key in fresh.keys() - saved.keys() - _OF_VERSIONS)
    unexpected = saved.keys() - fresh.keys() - _OF_VERSIONS
    if missing or (unexpected and type(scheduler).__module__.startswith("torch.optim.")):
        raise _other_class(scheduler, "scheduler", missing, unexpected, name, path)
    for part, its_own in zip(getattr(scheduler, "_schedulers", ()), saved.get("_schedulers", ())):
        check_entries(part, its_own, name, path)


def _other_class(
    part: object, kind: str, missing: Sequence[str], unexpected: Iterable[object], name: str, path: str
) -> StateDictMismatchError:
    others = sorted(str(key) for key in unexpected)
    parts = [f"it lacks {shorten_list(missing, _SHOWN, quote=True)}"] if missing else []
    parts += [f"it has {shorten_list(others, _SHOWN, quote=True)}"] if others else []
    return StateDictMismatchError(
        f"'{name}' is {_a(type(part).__qualname__)}, but the state in '{path}' is another {kind}'s: "
        f"{', and '.join(parts)}. Build the {kind} as in the saved run, or pass strict=False to leave this one as "
        "built.",
        path=path,
        missing_keys=tuple(missing),
        unexpected_keys=tuple(others),
    )


def _a(name: str) -> str:
    return f"an {name}" if name[:1] in "AEIOU" else f"a {name}"
