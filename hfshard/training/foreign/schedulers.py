"""Brings the state of another program's scheduler into the form that ours has; its class is told by its entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hfshard._util.text import list_some
from hfshard.errors import StateDictMismatchError

_OF_VERSIONS: Final = frozenset(
    ("_is_initial", "_get_lr_called_within_step", "_initial_step", "_step_count", "_last_lr", "verbose", "mode_worse")
    + ("_scale_fn_ref", "_scale_fn_custom", "scale_fn", "_anneal_func_type", "anneal_func", "default_min_lr")
)
"""Entries that torch's schedulers have in some versions, or at some times."""

_SHOWN: Final = 5


def scheduler_entry(scheduler: Any, saved: Any, component: str, path: str) -> dict[str, Any]:
    """Bring the state of a scheduler into the form that `encode_scheduler` writes, decoded.

    Args:
        scheduler: The one that was built; it is not changed.
        saved: What the `state_dict()` of the other one returned.
        component: Its name in the training state, for messages.
        path: The file's, for messages.

    Raises:
        StateDictMismatchError: It is the state of another class: it lacks entries, or torch's own has no such ones.
    """
    if not isinstance(saved, Mapping):
        raise TypeError(f"a {type(saved).__name__} in place of a dict")
    fresh = scheduler.state_dict()
    missing = sorted(str(key) for key in fresh.keys() - saved.keys() - _OF_VERSIONS)
    unexpected = sorted(str(key) for key in saved.keys() - fresh.keys() - _OF_VERSIONS)
    is_of_torch = type(scheduler).__module__.startswith("torch.optim.")
    if missing or (unexpected and is_of_torch):
        parts = [f"it lacks {list_some(missing, _SHOWN, quote=True)}"] if missing else []
        parts += [f"it has {list_some(unexpected, _SHOWN, quote=True)}"] if unexpected else []
        raise StateDictMismatchError(
            f"'{component}' is a {type(scheduler).__qualname__}, and the state in '{path}' is another scheduler's: "
            f"{', and '.join(parts)}. Build the scheduler of that run, or pass strict=False to let this one start "
            "afresh.",
            path=path,
            missing_keys=tuple(missing),
            unexpected_keys=tuple(unexpected),
        )
    return {"class": type(scheduler).__qualname__, "state": dict(saved)}
