"""The tables of a diff, from reports made by hand."""

from __future__ import annotations

import math
from dataclasses import replace

from hfshard.cli.diff_command import (
    diff_as_json,
    modules_table,
    not_finite_lines,
    renames_table,
    tensors_table,
    zero_before_lines,
)
from hfshard.viewing.diff_tensors import ValueDiff
from tests.viewing.reports import BERT, marked, renamed, report_of, tensor_diff, values_of


def test_values_are_summed_up_by_module() -> None:
    found = [
        tensor_diff("changed", "h.0.w", values_of(0.125, changed=1)),
        tensor_diff("changed", "h.1.w", values_of(0.25, changed=0)),
        tensor_diff("cast", "g.w", values_of(0.001, changed=0)),
        tensor_diff("only_in_b", "new"),
        tensor_diff("same", "rest"),
    ]
    assert (
        modules_table(report_of(found), 80)
        == """\
difference     tensors  elements     norm  where
cast F32→BF16        1      none  1.0e-03  g
changed              2     25.0%  2.5e-01  h.{0-1}
only in B            1                     new
same                 1                     the rest"""
    )
    assert (
        tensors_table(report_of([*found, renamed("old", "h.2.w")]))
        == """\
difference     shape  elements     norm  largest  tensor
cast F32→BF16  2          none  1.0e-03  2.5e-01  g.w
changed        2         50.0%  1.2e-01  2.5e-01  h.0.w
changed        2          none  2.5e-01  2.5e-01  h.1.w
renamed        2                                  old → h.2.w
only in B      2                                  new"""
    )


def test_rows_fit_the_terminal() -> None:
    found = marked([f"{'module.' * 20}{number}.{part}" for number in range(3) for part in "ab"], changed=[".a"])
    lines = modules_table(report_of(found), 60).split("\n")
    assert lines[1] == "changed           3  module.module.modul…dule.module.{0-2}.a"
    assert max(map(len, lines)) == 60


def test_what_is_irregular_is_counted() -> None:
    found = [tensor_diff("changed" if number % 3 else "same", f"w{number}") for number in range(10_000)]
    lines = modules_table(report_of(found), 80).split("\n")
    assert lines[1:] == ["changed     6,666 of 10,000  (everywhere)", "same                  3,334  the rest"]


def test_renames_are_told_by_rule() -> None:
    found = [renamed(name, f"model.{name}") for name in BERT] + [renamed(f"x{n}", f"y{n}") for n in range(20)]
    assert renames_table(report_of(found)) == "\n".join(
        ["renamed  how", "    100  with 'model.' in front", *(f"      1  'x{n}' is 'y{n}'" for n in range(7))]
        + ["     13  in 13 other ways"]
    )
    assert renames_table(report_of(marked(BERT))) == ""


def test_numbers_that_are_not_finite_are_named() -> None:
    values = replace(values_of(0.0), nan_b=2, inf_a=1, inf_b=2)
    found = report_of([tensor_diff("changed", "a\x1b", values), tensor_diff("changed", "b", replace(values, nan_a=9))])
    assert not_finite_lines(found) == [
        "NaN or infinite in B and not in A: 3 elements of a\\x1b",
        "NaN or infinite in A and not in B: 6 elements of b",
    ]


def test_json_has_no_infinity() -> None:
    values = ValueDiff(2, 1, 0.5, float("inf"), None, 0, 1, 0, 0)
    (shown,) = diff_as_json(report_of([tensor_diff("changed", "a", values)]))["tensors"]
    assert shown["values"] == {
        "elements": 2, "changed": 1, "max_abs": 0.5, "relative_norm": None, "cosine": None,
        "nan_a": 0, "nan_b": 1, "inf_a": 0, "inf_b": 0,
    }  # fmt: skip


def test_what_was_zero_hides_no_other_norm() -> None:
    norms = {"h.0.b": math.inf, "h.1.b": 0.25, "g.b": math.inf}
    found = report_of(tensor_diff("changed", name, values_of(norm)) for name, norm in norms.items())

    assert zero_before_lines(found) == ["Zero in A and not in B: 2 tensors: h.0.b, g.b"]
    assert zero_before_lines(report_of([tensor_diff("changed", "h.1.b", values_of(0.25))])) == []
    assert (
        modules_table(found, 80)
        == """\
difference  tensors  elements     norm  where
changed           1    100.0%   from 0  g
changed           2    100.0%  2.5e-01  h.{0-1}"""
    )
