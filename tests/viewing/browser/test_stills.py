"""Pages for screenshots: nothing to press, and as a social card of 1200 x 630 nothing that is cut off."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hfshard.viewing.page.checkpoint_page import make_checkpoint_page
from hfshard.viewing.page.diff_page import make_diff_page
from hfshard.viewing.page.page import Page as PageData
from hfshard.viewing.page.page import render_page
from hfshard.viewing.show import page_of_run
from tests.viewing.browser.runs import make_decay, make_run
from tests.viewing.page.checkpoints import small_checkpoint
from tests.viewing.reports import report_of, tensor_diff, values_of

if TYPE_CHECKING:
    from playwright.sync_api import Page


def open_card(browser_page: Page, page: PageData, path: Path) -> None:
    path.write_text(render_page(page, is_still=True), encoding="utf-8")
    browser_page.set_viewport_size({"width": 1200, "height": 630})
    browser_page.goto(path.as_uri())


def lowest_edge(browser_page: Page, selector: str) -> float:
    edges = "all => Math.max(...all.map((one) => one.getBoundingClientRect().bottom))"
    return float(browser_page.locator(selector).evaluate_all(edges))


def test_a_card_of_a_checkpoint_is_its_map(browser_page: Page, tmp_path: Path) -> None:
    open_card(browser_page, make_checkpoint_page(small_checkpoint()), tmp_path / "page.html")

    assert browser_page.locator(".control:visible").count() == 0
    assert browser_page.locator("section:visible").count() == 1
    box = browser_page.locator("#treemap").bounding_box()
    assert box is not None
    assert box["height"] > 200
    assert box["y"] + box["height"] < 630
    assert lowest_edge(browser_page, "#legend") < 630


def test_a_card_of_a_diff_has_all_rows_of_a_usual_layer(browser_page: Page, tmp_path: Path) -> None:
    kinds = [
        f"{module}.{one}" for module in ("q", "k", "v", "o", "up", "down", "ln", "norm") for one in ("weight", "bias")
    ]
    found = [
        tensor_diff("changed", f"h.{layer}.{kind}", values_of(0.01 * (layer + 1)))
        for layer in range(6)
        for kind in kinds
    ]
    open_card(browser_page, make_diff_page(report_of(found)), tmp_path / "page.html")

    assert browser_page.locator(".control:visible").count() == 0
    assert browser_page.locator(".grid tbody th:visible").count() == 16
    assert lowest_edge(browser_page, ".grid tbody th") < 630 - 32
    fonts = "all => Math.min(...all.map((one) => parseFloat(getComputedStyle(one).fontSize)))"
    assert browser_page.locator(".grid tbody th:visible").evaluate_all(fonts) == 12


def test_a_card_of_a_run_has_two_metrics_side_by_side(browser_page: Page, tmp_path: Path) -> None:
    page = page_of_run(str(make_run(tmp_path / "run", 8)), "eval_loss", "min")
    open_card(browser_page, page, tmp_path / "page.html")

    assert browser_page.locator(".control:visible").count() == 0
    assert browser_page.locator("section:visible").count() == 1
    first, second = (browser_page.locator("figure").nth(number).bounding_box() for number in (0, 1))
    assert first is not None
    assert second is not None
    assert first["y"] == second["y"]
    assert first["height"] == second["height"]
    assert lowest_edge(browser_page, "figure .tick") < 630


def test_a_card_of_a_run_with_one_metric_takes_the_width(browser_page: Page, tmp_path: Path) -> None:
    open_card(browser_page, page_of_run(str(make_decay(tmp_path / "run")), "loss", "min"), tmp_path / "page.html")

    box = browser_page.locator("figure").bounding_box()
    assert box is not None
    assert box["width"] == 1136
    assert lowest_edge(browser_page, "figure") < 630


def test_a_tall_still_shows_the_whole_page(browser_page: Page, tmp_path: Path) -> None:
    open_card(browser_page, make_checkpoint_page(small_checkpoint()), tmp_path / "page.html")
    browser_page.set_viewport_size({"width": 1200, "height": 2000})

    assert browser_page.locator("section:visible").count() > 3
    assert browser_page.locator(".control:visible").count() == 0
