"""Charts of runs: percentages across, pixels up; and columns that say the same in every row."""

from __future__ import annotations

import math

from hfshard.viewing.page.run_page import (
    Bar,
    Cell,
    Column,
    Reading,
    aligned,
    bars_of,
    labels_of_bars,
    line_of,
    linear_ticks,
    log_ticks,
    make_run_page,
)
from hfshard.viewing.run_listing import ListedCheckpoint


def listed(*values: tuple[int, float], best: int | None = None, latest: int | None = None) -> list[ListedCheckpoint]:
    """Checkpoints by step and loss."""
    return [
        ListedCheckpoint(
            f"/run/{step}",
            step,
            (),
            is_verified=True,
            metrics={"loss": value},
            is_best=step == best,
            is_latest=step == latest,
        )
        for step, value in values
    ]


def test_bars_stand_on_each_other() -> None:
    assert bars_of([(100, 0), (25, 75)]) == [
        Bar(left=22.0, width=6.0, written_top=18.0, written_height=80.0, linked_top=18.0, linked_height=0.0),
        Bar(left=72.0, width=6.0, written_top=78.0, written_height=20.0, linked_top=18.0, linked_height=60.0),
    ]
    assert bars_of([]) == []
    assert bars_of([(0, 0)])[0].written_height == 0.0


def test_few_steps_are_labelled() -> None:
    assert [label.text for label in labels_of_bars(range(1000, 31_000, 1000))] == [
        "1,000", "6,000", "11,000", "16,000", "21,000", "26,000",
    ]  # fmt: skip
    assert labels_of_bars([]) == []


def test_a_line_is_interrupted_where_there_is_no_number() -> None:
    line = line_of("loss", listed((10, 2.0), (20, math.nan), (30, -1.0), (25, 0.5)))

    assert line is not None
    assert [(point.x, point.y, point.number) for point in line.linear.points] == [
        (1.0, 8.0, 0),
        (74.5, 75.0, 3),
        (99.0, 142.0, 2),
    ]
    assert line.linear.curves == ("74.5,75.0 99.0,142.0",)
    assert [(tick.y, tick.text) for tick in line.linear.ticks] == [
        (142.0, "-1"), (97.3, "0"), (52.7, "1"), (8.0, "2"),
    ]  # fmt: skip
    assert line.not_finite == (20,)
    assert line.log is None  # it has a value below zero
    assert line.readings == (Reading("lowest", "-1", 30), Reading("highest", "2", 10))
    assert line_of("loss", listed((10, math.inf))) is None
    assert line_of("accuracy", listed((10, 1.0))) is None


def test_a_line_names_the_best_and_the_latest_value() -> None:
    values = listed((100, 10.0), (200, 0.1), (300, 1.0), best=200, latest=300)

    line = line_of("loss", values, "loss")
    assert line is not None
    assert line.readings == (Reading("best", "0.1", 200, "best"), Reading("latest", "1", 300, "latest"))
    assert line.best_at == 50.0
    assert line.log is not None
    assert [point.y for point in line.log.points] == [8.0, 142.0, 75.0]
    assert [tick.text for tick in line.log.ticks] == ["0.1", "0.2", "0.5", "1", "2", "5", "10"]
    assert [(label.text, label.anchor) for label in line.labels] == [
        ("100", "start"), ("150", "middle"), ("200", "middle"), ("250", "middle"), ("300", "end"),
    ]  # fmt: skip
    other = line_of("loss", values, "accuracy")
    assert other is not None
    assert other.readings[0] == Reading("at the best", "0.1", 200, "best")


def test_a_metric_that_does_not_select_names_the_end_that_it_moved_to() -> None:
    def words(*values: float, best: int = 20) -> list[tuple[str, int]]:
        steps = zip((10, 20, 30, 40), values, strict=True)
        line = line_of("loss", listed(*steps, best=best, latest=40), "accuracy")
        assert line is not None
        return [(reading.word, reading.step) for reading in line.readings[1:-1]]

    assert words(0.5, 0.75, 1.0, 0.25) == [("highest", 30)]
    assert words(0.5, 0.25, 0.125, 1.0) == [("lowest", 30)]
    assert words(0.5, 1.0, 0.75, 0.25) == []  # the best one has it
    assert words(0.5, 0.25, 0.125, 1.0, best=10) == []  # it has not moved yet


def test_values_as_far_apart_or_as_close_as_can_be() -> None:
    line = line_of("loss", listed((1, -1.7e308), (2, 1.7e308)))

    assert line is not None
    assert [point.y for point in line.linear.points] == [142.0, 8.0]
    assert [text for _, text in linear_ticks(-1.7e308, 1.7e308)] == ["-1e+308", "0", "1e+308"]
    assert linear_ticks(0.0, 5e-324) == [(0.0, "0"), (5e-324, "4.941e-324")]
    assert linear_ticks(3.0, 3.0) == [(3.0, "3")]


def test_ticks_are_round() -> None:
    assert [text for _, text in linear_ticks(0.2045, 1.597)] == ["0.5", "1.0", "1.5"]
    assert [text for _, text in linear_ticks(12_000, 48_000)] == ["20,000", "30,000", "40,000"]
    assert [text for _, text in linear_ticks(0.91, 0.92)] == ["0.910", "0.915", "0.920"]
    assert [text for _, text in log_ticks(2e-5, 3.0)] == ["0.0001", "0.001", "0.01", "0.1", "1"]
    assert [text for _, text in log_ticks(0.2, 1.6)] == ["0.2", "0.5", "1"]


def test_a_column_that_says_the_same_in_every_row_is_constant() -> None:
    assert Column("size", (Cell("1 KB"), Cell(""), Cell("1 KB"))).constant == "1 KB"
    assert Column("size", (Cell("1 KB"), Cell("2 KB"))).constant is None
    assert Column("size", (Cell("1 KB"), Cell(""))).constant is None  # a single one says nothing about others


def test_a_sentence_says_which_step_is_the_best_and_by_what() -> None:
    values = ((100, 1.5), (200, 0.25), (300, math.nan), (400, 0.5))

    def sentences(best: int | None, metric: str | None = "loss", training: str = "") -> list[str]:
        page = make_run_page("/run", listed(*values, best=best, latest=400), {}, best=metric, training=training)
        return list(page.view["sentences"])

    assert sentences(200) == [
        "Step 200 is the best: loss 0.25 is the lowest of 3 checkpoints; "
        "the latest, step 400, has 0.5 (100.0 % higher).",
    ]
    assert sentences(100) == [
        "Step 100 is the best: loss 1.5 is the highest of 3 checkpoints; the latest, step 400, has 0.5 (66.7 % lower).",
    ]
    assert sentences(400) == ["Step 400 is the best: loss 0.5 is the highest of 3 checkpoints."]
    assert sentences(None) == []
    assert sentences(200, None, "From step 100 to step 400, layer 1 changed.") == [
        "From step 100 to step 400, layer 1 changed."
    ]


def test_the_latest_is_compared_by_a_percentage_where_that_says_something() -> None:
    def ending(best: float, latest: float) -> str:
        page = make_run_page("/run", listed((1, best), (2, latest), best=1, latest=2), {}, best="loss")
        return str(page.view["sentences"][0]).partition(", has ")[2]

    assert ending(0.44859, 0.52106) == "0.52106 (16.2 % higher)."
    assert ending(-2.0, -1.0) == "-1 (50.0 % higher)."
    assert ending(0.5, 0.50001) == "0.50001 (under 0.1 % higher)."
    assert ending(0.5, 0.5) == "the same."
    assert ending(0.0, 0.5) == "0.5."
    assert ending(-0.5, 0.5) == "0.5."
    assert ending(0.5, 5.0) == "5."
    assert ending(0.5, math.nan) == "nan."


def test_a_run_whose_saves_are_not_in_the_order_of_steps_is_not_said_to_be_sorted_by_them() -> None:
    def is_by_step(*steps: int) -> bool:
        return bool(make_run_page("/run", listed(*((step, 1.0) for step in steps)), {}).view["is_by_step"])

    assert is_by_step(10, 20, 30)
    assert not is_by_step(10, 30, 20)


def test_numbers_of_a_column_have_their_points_below_each_other() -> None:
    assert aligned([0.5, None, 1.03125, 12.0]) == ["0.50000", "", "1.03125", "12.00000"]
    assert aligned([3.0, 120.0]) == ["3", "120"]
    assert aligned([1e-9, 0.5]) == ["1e-09", "0.5"]
    assert aligned([math.nan, 0.5]) == ["nan", "0.5"]
    assert aligned([]) == []
