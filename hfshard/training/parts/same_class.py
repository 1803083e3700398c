"""Checks that a state is restored into an object of the class that it was taken from, or of one with such states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from torch.optim import Optimizer

from hfshard._util.text import list_some
from hfshard.errors import StateDictMismatchError

_LATER: Final = frozenset({"foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"})
"""Options that torch's optimizers did not always have; torch adds them to a state that lacks them."""

_OF_SCHEDULERS: Final = frozenset(
    {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "max_beta1", "swa_lr", "param_names", "params"}
)
"""Options that schedulers put into groups."""

_OF_VERSIONS: Final = frozenset(
    ("_is_initial", "_get_lr_called_within_step", "_initial_step", "_step_count", "_last_lr", "verbose", "mode_worse")
    + ("_scale_fn_ref", "_scale_fn_custom", "scale_fn", "_anneal_func_type", "anneal_func", "default_min_lr")
)
"""Entries that torch's schedulers have in some versions, or at some times."""

_OF_OPTIMIZERS: Final = frozenset(
    ("amsgrad", "momentum", "dampening", "nesterov", "betas", "alpha", "centered", "rho", "etas", "step_sizes")
    + ("momentum_decay", "lr_decay", "initial_accumulator_value", "lambd", "t0", "ns_steps", "beta2_decay")
)
"""Options of torch's optimizers that others of them do not have."""

_SHOWN: Final = 5
"""How many names a message lists."""


def check_class(saved: str | None, part: object, kind: str, name: str, path: str) -> None:
    """Refuse an object of another class; its module may have moved since.

    Args:
        saved: The qualified name of the class that was saved; None where the program that saved it did not note it.
        part: What was built.
        kind: "optimizer" or "scheduler", for messages.
        name: Its name in the training state.
        path: The checkpoint's.

    Raises:
        StateDictMismatchError: The classes differ.
    """
    found = type(part).__qualname__
    if saved is not None and saved != found:
        raise StateDictMismatchError(
            f"'{name}' is {_a(found)}, and the checkpoint '{path}' has the state of {_a(saved)}. "
            f"Build the {kind} as in the run that was saved, or pass strict=False to let this one start afresh.",
            path=path,
            expected=saved,
            actual=found,
        )


def check_options(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], name: str, path: str) -> None:
    """Refuse the state of another class of optimizers, of which only the options of its groups tell.

    Args:
        optimizer: That was built.
        groups: The options of each group that was saved.
        name: Its name in the training state.
        path: The checkpoint's.

    Raises:
        StateDictMismatchError: Options of its class are missing; or it is one of torch's, and there are another one's.
    """
    own = set(optimizer.defaults)
    known = own.union(_OF_SCHEDULERS, _LATER, *optimizer.param_groups)
    for group in groups:
        missing = sorted(own - group.keys() - _LATER)
        others = _OF_OPTIMIZERS & (group.keys() - known) if type(optimizer).__module__.startswith("torch.optim") else ()
        if missing or others:
            raise _other_class(optimizer, "optimizer", missing, group.keys() - known, name, path)


def check_entries(scheduler: Any, saved: Mapping[str, Any], name: str, path: str) -> None:
    """Refuse the state of another class of schedulers, of which only its entries tell.

    Args:
        scheduler: That was built.
        saved: What the `state_dict()` of the other one returned.
        name: Its name in the training state.
        path: The checkpoint's.

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
    parts = [f"it lacks {list_some(missing, _SHOWN, quote=True)}"] if missing else []
    parts += [f"it has {list_some(others, _SHOWN, quote=True)}"] if others else []
    return StateDictMismatchError(
        f"'{name}' is {_a(type(part).__qualname__)}, and the state in '{path}' is another {kind}'s: "
        f"{', and '.join(parts)}. Build the {kind} of that run, or pass strict=False to let this one start afresh.",
        path=path,
        missing_keys=tuple(missing),
        unexpected_keys=tuple(others),
    )


def _a(name: str) -> str:
    return f"an {name}" if name[:1] in "AEIOU" else f"a {name}"
