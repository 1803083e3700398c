"""Levels of shades for relative norms: from the least to the largest that occurs, by their logarithm."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_DECADES: Final = 6
"""That the levels may span; what changed by less has the lowest."""

LEAST: Final = sys.float_info.min
"""Stands for a change that has no norm; it has the lowest level and moves no other."""


@dataclass(frozen=True, slots=True)
class NormScale:
    """Which level a relative norm has."""

    low: float
    """What has the lowest level, as all below it."""
    high: float
    """What has the highest one, as all above it, infinity included."""

    def level(self, norm: float, levels: int) -> int:
        """The level of a norm, from 1 to `levels`."""
        if norm >= self.high:
            return levels
        if norm <= self.low:
            return 1
        share = math.log(norm / self.low) / math.log(self.high / self.low)
        return 1 + round(share * (levels - 1))

    def norm_of(self, level: int, levels: int) -> float:
        """A norm in the middle of a level."""
        return self.low * math.pow(self.high / self.low, (level - 1) / (levels - 1))


def norm_scale(norms: Iterable[float]) -> NormScale:
    """Fit a scale to norms: a decade at least, so that small differences look small.

    Args:
        norms: Any number of them, at least 0; zeros and infinities move nothing.

    Example:
        >>> norm_scale([1e-5, 1e-3]).level(1e-4, 9)
        5
    """
    positive = [norm for norm in norms if LEAST < norm < math.inf]
    high = max(positive, default=1.0)
    low = max(min(positive, default=0.0), high / 10**_DECADES)
    return NormScale(min(low, high / 10), high)
