"""Histograms on the page of a checkpoint, and its picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import hfshard
from hfshard.errors import InvalidPathError
from hfshard.viewing.screenshot import find_chromium
from hfshard.viewing.show import show_checkpoint

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("values")
    weight = torch.linspace(-1, 1, 10_000).reshape(100, 100)
    hfshard.save_state_dict(
        {"layer.weight": weight, "norm.bias": torch.tensor([1.0, float("nan")])}, directory / "saved"
    )
    return directory / "saved"


def test_the_histogram_of_a_chosen_tensor(browser_page: Page, saved: Path) -> None:
    page_file = saved.parent / "saved.html"
    show_checkpoint(saved, page_file, values=True)
    browser_page.goto(page_file.as_uri())
    assert "NaN, inf\n1, 0\nin 1 tensor" in browser_page.locator(".facts").inner_text()

    browser_page.locator("[data-node] button", has_text="layer.weight").click()
    details = browser_page.locator("#details")
    assert "standard deviation\n0.57741" in details.inner_text()
    assert details.locator("svg.histogram rect").count() in range(50, 65)
    assert browser_page.locator("#treemap .chosen").inner_text() == "layer.weight"


def test_modules_are_sorted_by_their_numbers(browser_page: Page, saved: Path) -> None:
    page_file = saved.parent / "modules.html"
    show_checkpoint(saved, page_file, values=True)
    browser_page.goto(page_file.as_uri())
    names = browser_page.locator("#values td:first-child")
    assert names.all_inner_texts() == ["layer", "norm"]
    assert "NaN or infinite numbers in norm.bias." in browser_page.locator("#odd").inner_text()

    browser_page.locator("#values th", has_text="greatest").get_by_role("button").click()
    browser_page.keyboard.press("Enter")

    assert browser_page.locator("#values [aria-sort]").get_attribute("aria-sort") == "ascending"
    assert names.all_inner_texts() == ["layer", "norm"]
    browser_page.locator("#values th", has_text="numbers").get_by_role("button").click()
    browser_page.keyboard.press("Enter")
    assert names.all_inner_texts() == ["norm", "layer"]


@pytest.mark.skipif(find_chromium() is None, reason="no chromium: apt-get install chromium")
def test_a_picture_replaces_nothing_but_a_picture(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.png").write_text("notes")
    with pytest.raises(InvalidPathError, match=r"notes.png' exists and is not a PNG, so it was left unchanged"):
        show_checkpoint(saved, tmp_path / "page.html", png=tmp_path / "notes.png")
    assert not (tmp_path / "page.html").exists()

    written = show_checkpoint(saved, tmp_path / "page.html", png=tmp_path / "page.png")

    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    assert written == str(tmp_path / "page.html")
    assert Path(written).read_text().startswith("<!doctype html>")
