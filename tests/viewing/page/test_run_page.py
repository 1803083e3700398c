"""Charts of runs: percentages across, pixels up."""

from __future__ import annotations

import math

from hfshard.viewing.page.run_page import Bar, bars_of, labels_of_bars, line_of


def test_bars_stand_on_each_other() -> None:
    assert bars_of([(100, 0), (25, 75)]) == [
        Bar(left=22.0, width=6.0, written_top=18.0, written_height=150.0, linked_top=18.0, linked_height=0.0),
        Bar(left=72.0, width=6.0, written_top=130.5, written_height=37.5, linked_top=18.0, linked_height=112.5),
    ]
    assert bars_of([]) == []
    assert bars_of([(0, 0)])[0].written_height == 0.0


def test_few_steps_are_labelled() -> None:
    assert [label.text for label in labels_of_bars(range(1000, 31_000, 1000))] == [
        "1,000", "6,000", "11,000", "16,000", "21,000", "26,000",
    ]  # fmt: skip
    assert labels_of_bars([]) == []


def test_a_line_leaves_out_what_is_no_number() -> None:
    line = line_of("loss", [(10, 2.0), (20, math.nan), (30, -1.0), (20, 0.5)])

    assert line is not None
    assert [(point.x, point.y, point.number) for point in line.points] == [
        (2.0, 26.0, 0),
        (50.0, 93.0, 3),
        (98.0, 160.0, 2),
    ]
    assert (line.least, line.greatest, [label.text for label in line.labels]) == (-1.0, 2.0, ["10", "30"])
    assert line_of("loss", [(10, math.inf)]) is None


def test_values_as_far_apart_as_can_be() -> None:
    line = line_of("loss", [(1, -1.7e308), (2, 1.7e308)])

    assert line is not None
    assert [point.y for point in line.points] == [160.0, 26.0]
