"""Norms have levels by their logarithm, whatever their size."""

from __future__ import annotations

from math import inf

import pytest

from hfshard.viewing.results import norm_scale


@pytest.mark.parametrize(
    ("norms", "levels"),
    [
        ([], []),
        ([0.0, inf], [1, 5]),
        ([0.3], [5]),
        ([0.3, 0.29], [5, 5]),  # a decade at least
        ([1e-9, 1e-7, 1e-5], [1, 3, 5]),
        ([1e-12, 1e-6, 1.0], [1, 1, 5]),  # six decades at most
        ([1e-300, 1e300], [1, 5]),
        ([5e-324, 1.0], [1, 5]),
    ],
)
def test_levels_of(norms: list[float], levels: list[int]) -> None:
    scale = norm_scale(norms)

    assert [scale.level(norm, 5) for norm in norms] == levels


@pytest.mark.parametrize(
    ("norms", "ends", "sides"),
    [
        ([], (0.1, 1.0), []),
        ([1e-3] * 8 + [0.02, 0.0, inf], (1e-4, 1e-3), [0] * 8 + [1, 0, 1]),  # beyond a decade from the rest
        ([1e-3] * 8 + [9e-3], (9e-4, 9e-3), [0] * 9),  # within it
        ([1e-3] * 8 + [5e-5], (1e-4, 1e-3), [0] * 8 + [-1]),
        ([1e-9, 1e-7, 1e-5, 1e-3, 10.0], (1e-5, 10.0), [-1, -1, 0, 0, 0]),  # spread out: no outliers, but six decades
    ],
)
def test_outliers_are_beyond_the_scale(norms: list[float], ends: tuple[float, float], sides: list[int]) -> None:
    scale = norm_scale(norms)

    assert (scale.low, scale.high) == pytest.approx(ends)
    assert [scale.side(norm) for norm in norms] == sides


def test_a_level_stands_for_a_norm() -> None:
    assert [norm_scale([1e-6, 1e-2]).norm_of(level, 5) for level in range(1, 6)] == pytest.approx(
        [1e-6, 1e-5, 1e-4, 1e-3, 1e-2]
    )
