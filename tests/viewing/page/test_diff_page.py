"""The page of what differs, as data: it stays small whatever the names are."""

from __future__ import annotations

from hfshard.viewing.page.diff_page import make_diff_page
from tests.viewing.diff.reports import report_of, tensor_diff


def test_grids_have_no_more_cells_than_a_browser_draws() -> None:
    names = [f"stack{stack}.{layer}.w" for stack in range(3) for layer in range(200)]
    names += [f"stack{stack}.0.kind{kind}" for stack in range(3) for kind in range(150)]

    page = make_diff_page(report_of(tensor_diff("same", name) for name in names))

    assert [(len(stack["layers"]), len(stack["kinds"])) for stack in page.data["stacks"]] == [(200, 100), (200, 100)]
    assert page.view["more_stacks"] == 1
