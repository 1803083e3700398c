"""The page of what differs, in a browser: the grid, the list, by mouse and by keyboard; a hostile name is text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import hfshard
from hfshard.viewing.show import show_checkpoint
from tests.viewing.browser.diffs import HOSTILE, make_two

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("diff")
    old, new = make_two(directory)
    show_checkpoint(new, directory / "diff.html", against=old)
    return directory / "diff.html"


def names(page: Page) -> list[str]:
    script = "cells => cells.map(cell => cell.firstChild.textContent)"
    found: list[str] = page.locator("#list td:first-child").evaluate_all(script)
    return found


def test_cells_and_words_narrow_the_list(browser_page: Page, page_file: Path) -> None:
    browser_page.goto(page_file.as_uri())
    headline = browser_page.locator(".headline").inner_text()
    assert headline.startswith("4 of 50 tensors changed: q of layers 8-11 of 12; 1 of 51 tensors cast from F32 to BF16")
    assert browser_page.locator("td.k-changed").count() == 4
    assert browser_page.locator("td.k-same").count() == 43
    assert browser_page.locator("#shown").inner_text() == "8 tensors"

    browser_page.locator("td.k-changed").nth(1).click()
    assert names(browser_page) == ["model.layers.9.attn.q.weight"]
    browser_page.locator("td.k-same").first.click()
    assert browser_page.locator("#shown").inner_text() == "Nothing here differs."
    browser_page.locator("td.k-same").first.click()
    browser_page.locator("[data-kind=changed]").click()
    browser_page.locator("#search").fill("HEAD weight")
    assert names(browser_page) == ["lm_head.weight"]
    assert "was head.weight" in browser_page.locator("#list").inner_text()


def test_the_keyboard_suffices(browser_page: Page, page_file: Path) -> None:
    browser_page.goto(page_file.as_uri())

    browser_page.locator(".grid td[tabindex='0']").focus()
    for _ in range(8):
        browser_page.keyboard.press("ArrowRight")
    browser_page.keyboard.press("Enter")
    assert names(browser_page) == ["model.layers.8.attn.q.weight"]
    browser_page.keyboard.press("Escape")
    assert len(names(browser_page)) == 8
    browser_page.keyboard.press("/")
    browser_page.keyboard.type("embed")
    assert names(browser_page) == ["embed.weight"]


def test_values_shade_the_grid(browser_page: Page, page_file: Path) -> None:
    old, new = page_file.parent / "old", page_file.parent / "new"
    show_checkpoint(new, page_file.parent / "values.html", against=old, values=True)
    browser_page.goto((page_file.parent / "values.html").as_uri())

    assert browser_page.locator("td.k-changed.s5").count() == 4  # a hundredth, and the most
    assert browser_page.locator(".ramp span").all_inner_texts()[1:] == [
        "1.0e-03", "1.8e-03", "3.2e-03", "5.6e-03", "1.0e-02",
    ]  # fmt: skip
    browser_page.locator("td.s5").first.click()
    cells = browser_page.locator("#list td").all_inner_texts()
    assert cells == ["model.layers.8.attn.q.weight", "changed", "F32 8 × 8", "0.01", cells[4], "1", "100.0 %"]


def test_both_are_named_before_anything_else(browser_page: Page, page_file: Path) -> None:
    browser_page.goto(page_file.as_uri())

    assert browser_page.title() == "old → new"
    assert browser_page.locator("h1").inner_text() == "old → new"
    assert browser_page.locator(".places > div").all_inner_texts() == ["A\nold", "B\nnew"]
    tops = [browser_page.locator(place).bounding_box() for place in (".headline", ".places", ".facts")]
    assert [box["y"] for box in tops if box] == sorted(box["y"] for box in tops if box)


def test_the_last_of_many_layers_is_in_sight(browser_page: Page, tmp_path: Path) -> None:
    base = {f"layers.{layer}.w": torch.ones(2) for layer in range(100)}
    hfshard.save_state_dict(base, tmp_path / "a")
    hfshard.save_state_dict(base | {"layers.99.w": torch.zeros(2)}, tmp_path / "b")
    show_checkpoint(tmp_path / "b", tmp_path / "diff.html", against=tmp_path / "a")
    browser_page.goto((tmp_path / "diff.html").as_uri())

    box = browser_page.locator("td.k-changed").bounding_box()

    assert box is not None
    assert box["width"] >= 6
    assert box["x"] + box["width"] < 1280
    browser_page.set_viewport_size({"width": 400, "height": 844})
    assert browser_page.evaluate("document.documentElement.scrollWidth") <= 400


def test_a_hostile_name_is_text(browser_page: Page, page_file: Path) -> None:
    browser_page.goto(page_file.as_uri())

    assert names(browser_page)[6] == HOSTILE.replace("\u202e", "\\u202e")
    assert browser_page.locator("img").count() == 0


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_of_a_diff_sticks_out(browser_page: Page, page_file: Path, width: int) -> None:
    browser_page.set_viewport_size({"width": width, "height": 844})
    browser_page.goto(page_file.as_uri())

    assert browser_page.evaluate("document.documentElement.scrollWidth") <= width
