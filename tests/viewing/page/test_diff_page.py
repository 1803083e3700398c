"""The page of what differs, as data: it stays small whatever the names are."""

from __future__ import annotations

import math

from hfshard.viewing.page.diff_page import make_diff_page
from tests.viewing.reports import report_of, tensor_diff, values_of


def test_grids_have_no_more_cells_than_a_browser_draws() -> None:
    names = [f"stack{stack}.{layer}.w" for stack in range(3) for layer in range(200)]
    names += [f"stack{stack}.0.kind{kind}" for stack in range(3) for kind in range(150)]

    page = make_diff_page(report_of(tensor_diff("same", name) for name in names))

    assert [(len(stack["layers"]), len(stack["kinds"])) for stack in page.data["stacks"]] == [(200, 100), (200, 100)]
    assert page.view["more_stacks"] == 1


def test_shades_span_what_changed_however_little() -> None:
    norms = [1e-7, 1e-6, 1e-5, 1e-4, 1e-3, math.inf, 0.0]
    found = [tensor_diff("changed", f"h.{layer}.w", values_of(norm)) for layer, norm in enumerate(norms)]

    page = make_diff_page(report_of([*found, tensor_diff("same", "h.7.w")]))

    [stack] = page.data["stacks"]
    assert stack["shades"] == [[1, 2, 3, 4, 5, 5, 1, 0]]
    assert stack["norms"] == [[1e-7, 1e-6, 1e-5, 1e-4, 1e-3, "from 0", 0.0, None]]
    assert page.view["ramp"] == ["1.0e-07", "1.0e-06", "1.0e-05", "1.0e-04", "1.0e-03"]


def test_a_name_in_several_pairs_has_the_largest_norm_on_the_scale() -> None:
    found = [tensor_diff("changed", f"h.{n}.w", values_of(norm)) for n, norm in ((0, 1e-7), (0, 1e-3), (1, 1e-1))]

    page = make_diff_page(report_of(found))

    assert page.data["stacks"][0]["shades"] == [[1, 5]]
    assert page.view["ramp"] == ["1.0e-03", "3.2e-03", "1.0e-02", "3.2e-02", "1.0e-01"]


def test_the_largest_change_is_a_number_and_what_was_zero_is_counted() -> None:
    norms = {"a.weight": 0.02, "a.bias": math.inf, "b.weight": 0.01, "b.bias": math.inf}
    page = make_diff_page(report_of(tensor_diff("changed", name, values_of(norm)) for name, norm in norms.items()))

    assert [(fact.label, fact.value, fact.note) for fact in page.facts[-2:]] == [
        ("largest change", "0.02", "a.weight"),
        ("zero in A, not in B", "2", "a.bias"),
    ]
    assert [row[5] for row in page.data["tensors"]] == [0.02, "from 0", 0.01, "from 0"]
