"""Which optimizers an object holds, and a digest of the orders that positions in its state may refer to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Final

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

Names = Mapping[int, str]
"""id of a parameter -> its name."""

_MOST_ENTRIES: Final = 1000
"""Lists that are longer than this hold no optimizers, but data (a replay buffer), and are not looked through."""

_DIGEST_CHARACTERS: Final = 32
"""128 bits of an order's sha256."""


def held_optimizers(part: object) -> list[Optimizer]:
    """The optimizers that an object holds, in its attributes, in lists and dicts, or in schedulers that it holds.

    Those that Accelerate has wrapped are returned unwrapped.
    """
    found: dict[int, Optimizer] = {}
    seen: set[int] = set()

    def look(value: object) -> None:
        if isinstance(value, Optimizer):
            inner = vars(value).get("optimizer")
            one = inner if isinstance(inner, Optimizer) else value
            found[id(one)] = one
        elif id(value) not in seen:
            seen.add(id(value))
            for item in _held(value, part):
                look(item)

    look(part)
    return list(found.values())


def _held(value: object, part: object) -> Iterable[object]:
    if isinstance(value, list | tuple | dict):
        items = list(value.values()) if isinstance(value, dict) else value
        return items if len(items) <= _MOST_ENTRIES else ()
    is_looked_into = value is part or isinstance(value, LRScheduler | ReduceLROnPlateau)
    return list(vars(value).values()) if is_looked_into and hasattr(value, "__dict__") else ()


def order_digest(part: object, names: Names, modules: Mapping[str, nn.Module] | None = None) -> str | None:
    """Digest the orders that positions in an object's state may refer to.

    Args:
        part: The object: the groups of the optimizers that it holds count.
        names: The names of parameters.
        modules: Their parameters count, too. Without them it is the state of a scheduler, for which the order within a
            group makes no difference.

    Returns:
        Hexadecimal digits; None if there are neither optimizers nor modules.
    """
    groups = [
        [[names.get(id(one), str(list(one.shape))) for one in group["params"]] for group in optimizer.param_groups]
        for optimizer in held_optimizers(part)
    ]
    if modules is None:
        groups = [[sorted(group) for group in one] for one in groups]
    orders = [[names[id(one)] for one in modules[name].parameters()] for name in sorted(modules)] if modules else []
    if not groups and not orders:
        return None
    return hashlib.sha256(json.dumps([groups, orders]).encode()).hexdigest()[:_DIGEST_CHARACTERS]
