"""Contents and differences as data: what pages, terminal and JSON all show."""

from __future__ import annotations

import math
from dataclasses import replace

from hfshard.format.index import FileDigest
from hfshard.viewing.results import FileEntry, TensorEntry, ValueDiff
from tests.viewing.page.checkpoints import small_checkpoint
from tests.viewing.reports import report_of, tensor_diff, values_of


def test_json_has_no_infinity() -> None:
    values = ValueDiff(2, 1, 0.5, float("inf"), None, 0, 1, 0, 0)
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
