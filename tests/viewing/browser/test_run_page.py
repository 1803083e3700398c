"""The page of a run in a browser: 30 checkpoints, a damaged and an unfinished one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hfshard.viewing.show import show_checkpoint
from tests.viewing.browser.runs import make_decay, make_run

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
    assert facts[0].splitlines() == ["best", "step 300", "eval_loss -0.0321365"]
    assert facts[1].splitlines() == ["latest", "step 300", "eval_loss -0.0321365"]
    assert facts[2].splitlines() == ["checkpoints", "31", "steps 10 to 310"]
    assert facts[4].splitlines()[:2] == ["damaged", "2"]  # the optimizer of step 70 is linked at step 80
    assert facts[4].splitlines()[2] == "1 more unfinished"
    assert browser_page.locator("section h2").all_inner_texts()[:2] == ["Metrics by step", "Bytes of each checkpoint"]
    assert browser_page.locator(".state.damaged").count() == 2
    assert browser_page.locator(".state.unfinished").count() == 1
    assert browser_page.locator("rect.written").count() == 30
    assert browser_page.locator("rect.written.damaged").count() == 2
    assert browser_page.locator("figure").count() == 2
    assert browser_page.locator("figure .name").all_inner_texts() == ["eval_loss", "accuracy"]  # the best's is first
    loss = browser_page.locator("figure").first
    assert loss.locator("circle:visible").count() == 29  # one is NaN
    assert loss.locator("polyline").count() == 2
    assert "not a number at 1 step 50" in " ".join(loss.locator("figcaption").inner_text().split())
    assert "checkpoint.json' is missing" in browser_page.locator(".problem").first.inner_text()
    assert page_file.stat().st_size < 100_000


def test_bars_lead_to_rows_by_keyboard_too(browser_page: Page, page_file: Path) -> None:
    browser_page.goto(page_file.as_uri())

    browser_page.locator("#bytes svg a").nth(1).focus()
    browser_page.keyboard.press("Enter")

    target = browser_page.locator("tr:target")
    assert target.locator("th").inner_text() == "20"
    browser_page.wait_for_function(
        "row => { const { top } = row.getBoundingClientRect(); return top > 0 && top < innerHeight }",
        arg=target.element_handle(),
    )


def test_metrics_come_first_and_fit_above_the_fold(browser_page: Page, page_file: Path) -> None:
    browser_page.set_viewport_size({"width": 1280, "height": 900})
    browser_page.goto(page_file.as_uri())

    charts = [browser_page.locator("figure").nth(number).bounding_box() for number in (0, 1)]
    assert [box["x"] for box in charts if box is not None] == [64, 64]  # one under another
    assert charts[1] is not None
    assert charts[1]["y"] + charts[1]["height"] < 900


def test_a_logarithmic_scale_by_keyboard(browser_page: Page, tmp_path: Path) -> None:
    show_checkpoint(make_decay(tmp_path / "run"), tmp_path / "run.html")
    browser_page.goto((tmp_path / "run.html").as_uri())
    button = browser_page.get_by_role("button", name="Log scale")
    heights = (
        "() => [...document.querySelectorAll('figure circle')].filter((one) => one.getBoundingClientRect().width)"
        ".map((one) => Number(one.getAttribute('cy')))"
    )
    assert browser_page.evaluate(heights) == [8, 129.8, 142]

    button.focus()
    browser_page.keyboard.press("Enter")

    assert button.get_attribute("aria-pressed") == "true"
    assert browser_page.evaluate(heights) == [8, 75, 142]
    assert browser_page.locator("figure .tick:visible").all_text_contents()[:3] == ["0.01", "0.02", "0.05"]
    browser_page.keyboard.press("Enter")
    assert browser_page.evaluate(heights) == [8, 129.8, 142]


def test_metrics_without_range_have_no_logarithmic_scale(browser_page: Page, page_file: Path) -> None:
    browser_page.goto(page_file.as_uri())

    assert browser_page.locator("#log-scale").is_hidden()  # one has values below zero, the other hardly a range


def test_steps_lead_to_what_changed_since_the_one_before(browser_page: Page, tmp_path: Path) -> None:
    show_checkpoint(make_run(tmp_path / "run", 8), tmp_path / "run.html", diff=True)
    browser_page.goto((tmp_path / "run.html").as_uri())

    links = browser_page.locator("#checkpoints td a")
    assert links.all_inner_texts() == [
        *("0 of 4 tensors", "2 of 4 tensors", "2 of 4 tensors", "2 of 4 tensors"),  # steps 80 to 50
        *("0 of 4 tensors", "2 of 4 tensors", "2 of 4 tensors"),  # steps 40 to 20
    ]
    links.nth(1).focus()
    browser_page.keyboard.press("Enter")
    found = browser_page.locator(".changes > div:has(:target)")
    assert found.inner_text().splitlines() == [
        "steps 50 to 70",
        "Only layer 1 of 2 changed: 2 of 4 tensors. each time",
    ]
    assert browser_page.locator(".changes > div").count() == 4


def test_nothing_sticks_out(browser_page: Page, page_file: Path) -> None:
    browser_page.emulate_media(color_scheme="dark")
    browser_page.goto(page_file.as_uri())

    for width in (1280, 390):
        browser_page.set_viewport_size({"width": width, "height": 844})
        assert browser_page.evaluate("document.documentElement.scrollWidth") <= width
    assert browser_page.locator("#theme").inner_text() == "Light"
