"""Contents and differences as data: what pages, terminal and JSON all show."""

from __future__ import annotations

import math
from dataclasses import replace
from math import inf

import pytest

from hfshard.format.index import FileDigest
from hfshard.viewing.results import FileEntry, TensorDiff, TensorEntry, ValueDiff, norm_scale
from tests.viewing.page.checkpoints import small_checkpoint
from tests.viewing.reports import report_of, tensor_diff, values_of


def test_json_has_no_infinity() -> None:
    values = ValueDiff(2, 1, 0.5, float("inf"), None, 0, 1, 0, 0, norms=(0.0, 0.5))
    (shown,) = report_of([tensor_diff("changed", "a", values)]).as_json()["tensors"]
    assert shown["values"] == {
        "elements": 2, "changed": 1, "max_abs": 0.5, "relative_norm": None, "cosine": None,
        "nan_a": 0, "nan_b": 1, "inf_a": 0, "inf_b": 0,
    }  # fmt: skip


def test_a_tensor_is_told_by_its_shape_and_its_elements() -> None:
    matrix = TensorEntry("w", "F32", (3, 4), 48, "model.safetensors")
    scalar = TensorEntry("s", "F32", (), 4, "model.safetensors")

    assert (matrix.parameters, matrix.shape_text(), matrix.shape_text(" x ")) == (12, "3×4", "3 x 4")
    assert (scalar.parameters, scalar.shape_text()) == (1, "scalar")
    assert matrix.as_json() == {
        "name": "w", "dtype": "F32", "shape": [3, 4], "nbytes": 48, "file": "model.safetensors"
    }  # fmt: skip


def test_the_norms_of_tensors_add_up_to_that_of_all_of_them() -> None:
    def of(*norms: tuple[float, float] | None) -> float | None:
        found = [tensor_diff("changed", "abc"[at], replace(values_of(0.5), norms=one)) for at, one in enumerate(norms)]
        return report_of(found).relative_norm

    assert of((3.0, 0.0), (4.0, 0.5)) == 0.1
    assert of((1e200, 0.0), (0.0, 1e200)) == 1.0
    assert of((3.0, 0.0), None) is None
    assert of((0.0, 1.0)) is None
    assert of((math.inf, 1.0)) is None
    assert of() is None
    measured = tensor_diff("changed", "a", replace(values_of(0.5), norms=(2.0, 1.0)))
    empty = TensorEntry("b", "F32", (0,), 0, "model.safetensors")
    assert report_of([measured, TensorDiff("same", empty, empty)]).relative_norm == 0.5
    assert report_of([measured, tensor_diff("same", "b")]).relative_norm is None  # it was not read
    assert report_of([measured, tensor_diff("only_in_b", "b")]).relative_norm is None


def test_what_differs_is_everything_but_the_same() -> None:
    found = [
        tensor_diff("same", "a"),
        tensor_diff("changed", "b", values_of(math.inf)),
        tensor_diff("only_in_a", "c"),
        tensor_diff("changed", "d", values_of(0.5)),
    ]
    report = report_of(found)

    assert report.differing == tuple(found[1:])
    assert report.zero_in_a == ("b",)
    assert report.has_values
    assert not report.is_same
    assert not report_of(found[:1]).has_values
    assert report_of(found[:1]).is_same


def test_files_of_weights_are_those_with_tensors() -> None:
    weights = small_checkpoint()
    config = FileEntry("config.json", 70_000, None, FileDigest())
    found = replace(weights, files=(*weights.files, config))

    assert [file.name for file in found.weights_files] == [file.name for file in weights.files]
    assert (weights.largest_file_bytes, found.largest_file_bytes) == (66_496, 70_000)
    assert replace(found, files=()).largest_file_bytes == 0


# Norms have levels by their logarithm, whatever their size.


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
