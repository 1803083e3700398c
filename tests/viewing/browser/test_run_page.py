"""The page of a run in a browser: 30 checkpoints, a damaged and an unfinished one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hfshard.viewing.show import show_checkpoint
from tests.viewing.browser.runs import make_run

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    show_checkpoint(make_run(directory / "run"), directory / "run.html", best="eval_loss")
    return directory / "run.html"


def test_a_run_at_a_glance(browser_page: Page, page_file: Path) -> None:
    browser_page.goto(page_file.as_uri())

    facts = browser_page.locator(".facts > div").all_inner_texts()
    assert facts[0].splitlines() == ["checkpoints", "31", "steps 10 to 310"]
    assert facts[2].splitlines()[:2] == ["latest", "step 300"]
    assert facts[3].splitlines()[:2] == ["best", "step 300"]
    assert facts[4].splitlines()[:2] == ["damaged", "2"]  # the optimizer of step 70 is linked at step 80
    assert facts[4].splitlines()[2] == "1 more unfinished"
    assert browser_page.locator(".state.damaged").count() == 2
    assert browser_page.locator(".state.unfinished").count() == 1
    assert browser_page.locator("rect.written").count() == 30
    assert browser_page.locator("rect.written.damaged").count() == 2
    assert browser_page.locator("figure").count() == 2
    assert browser_page.locator("figure").nth(1).locator("circle").count() == 29  # one is NaN
    assert "checkpoint.json' is missing" in browser_page.locator(".problem").first.inner_text()
    assert page_file.stat().st_size < 100_000


def test_bars_lead_to_rows_by_keyboard_too(browser_page: Page, page_file: Path) -> None:
    browser_page.goto(page_file.as_uri())

    browser_page.locator("svg a").nth(1).focus()
    browser_page.keyboard.press("Enter")

    target = browser_page.locator("tr:target")
    assert target.locator("th").inner_text() == "20"
    browser_page.wait_for_function(
        "row => { const { top } = row.getBoundingClientRect(); return top > 0 && top < innerHeight }",
        arg=target.element_handle(),
    )


def test_nothing_sticks_out(browser_page: Page, page_file: Path) -> None:
    browser_page.emulate_media(color_scheme="dark")
    browser_page.goto(page_file.as_uri())

    for width in (1280, 390):
        browser_page.set_viewport_size({"width": width, "height": 844})
        assert browser_page.evaluate("document.documentElement.scrollWidth") <= width
    assert browser_page.locator("#theme").inner_text() == "Light"
