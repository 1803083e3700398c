"""Histograms of tensors on the page of a checkpoint: they are drawn when a tensor is chosen."""

from __future__ import annotations

from typing import Any, Final

from hfshard.viewing.page.name_tree import NameTree
from hfshard.viewing.page.page import Fact
from hfshard.viewing.values.measuring import MeasuredValues
from hfshard.viewing.values.running import ValueSummary

_DIGITS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""Heights of bins in 61 steps, a character each: what has any is at least 1."""


def values_fact(measured: MeasuredValues) -> Fact:
    """Tell at the top of a page whether any number is none."""
    nan = sum(one.nan for one in measured.tensors.values())
    inf = sum(one.inf for one in measured.tensors.values())
    odd = sum(bool(one.nan or one.inf) for one in measured.tensors.values())
    note = f"in {odd:,} tensor{'s' if odd > 1 else ''}" if odd else ""
    return Fact("NaN, inf", f"{nan:,}, {inf:,}" if odd else "none", note)


def values_data(measured: MeasuredValues, tree: NameTree) -> dict[str, Any]:
    """Lay out what the numbers of tensors are like, by the tensors' nodes: two names may look alike when shown."""
    return {
        "rows": [_row(tree.node_of[name], one) for name, one in measured.tensors.items() if name in tree.node_of],
        "leftOut": measured.left_out,
        "unknown": measured.unknown,
    }


def _row(node: int, one: ValueSummary) -> list[Any]:
    most = max(one.bins, default=1)
    heights = "".join(_DIGITS[-(-count * (len(_DIGITS) - 1) // most)] for count in one.bins)
    numbers = [_short(number) for number in (one.minimum, one.maximum, one.mean, one.std, one.low, one.high)]
    return [node, one.elements, one.nan, one.inf, *numbers, heights, most]


def _short(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.5g}")
