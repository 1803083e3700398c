"""Histograms of tensors on the page of a checkpoint: they are drawn when a tensor is chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from hfshard.viewing.page.page import Fact, Page, shown
from hfshard.viewing.values.measuring import MeasuredValues
from hfshard.viewing.values.running import ValueSummary

_DIGITS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""Heights of bins in 61 steps, a character each: what has any is at least 1."""


def with_values(page: Page, measured: MeasuredValues) -> Page:
    """Add to the page of a checkpoint what its numbers are like."""
    nan = sum(one.nan for one in measured.tensors.values())
    inf = sum(one.inf for one in measured.tensors.values())
    odd = sum(bool(one.nan or one.inf) for one in measured.tensors.values())
    fact = Fact("NaN, inf", f"{nan:,}, {inf:,}" if odd else "none", f"in {odd:,} tensors" if odd else "")
    values = {
        "rows": [_row(name, one) for name, one in measured.tensors.items()],
        "leftOut": measured.left_out,
        "unknown": measured.unknown,
    }
    return replace(page, facts=(*page.facts, fact), data={**page.data, "values": values})


def _row(name: str, one: ValueSummary) -> list[Any]:
    most = max(one.bins, default=1)
    heights = "".join(_DIGITS[-(-count * (len(_DIGITS) - 1) // most)] for count in one.bins)
    numbers = [_short(number) for number in (one.minimum, one.maximum, one.mean, one.std, one.low, one.high)]
    return [shown(name), one.elements, one.nan, one.inf, *numbers, heights, most]


def _short(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.5g}")
