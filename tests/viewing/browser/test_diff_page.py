"""The page of what differs, in a browser: the grid, the list, by mouse and by keyboard; a hostile name is text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import hfshard
from hfshard.viewing.page.diff_page import make_diff_page
from hfshard.viewing.page.page import render_page
from hfshard.viewing.results import ValueDiff
from hfshard.viewing.show import show_checkpoint
from tests.viewing.adapters import make_adapter, make_base
from tests.viewing.browser.diffs import HOSTILE, make_two
from tests.viewing.reports import report_of, tensor_diff

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("diff")
    old, new = make_two(directory)
    show_checkpoint(new, directory / "diff.html", against=old)
    return directory / "diff.html"


def names(page: Page) -> list[str]:
    script = "cells => cells.map(cell => cell.querySelector('.name').textContent)"
    found: list[str] = page.locator("#list td:first-child").evaluate_all(script)
    return found


def test_cells_and_words_narrow_the_list(browser_page: Page, page_file: Path) -> None:
    browser_page.goto(page_file.as_uri())
    headline = browser_page.locator(".headline").inner_text()
    assert headline.startswith("4 of 50 tensors changed: q of layers 8-11 of 12; 1 of 51 tensors cast from F32 to BF16")
    assert browser_page.locator("td.k-changed").count() == 4
    assert browser_page.locator("td.k-same").count() == 43
    assert browser_page.locator("#shown").inner_text() == "8 tensors in 5 rows"

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
    assert len(names(browser_page)) == 5
    browser_page.keyboard.press("/")
    browser_page.keyboard.type("embed")
    assert names(browser_page) == ["embed.weight"]


@pytest.fixture(scope="module")
def values_file(page_file: Path) -> Path:
    """The page of seven layers by how much they changed: 3 to 6, each ten times the one before, and a head."""
    directory = page_file.parent
    generator = torch.Generator().manual_seed(0)
    kinds = ("attn.q.weight", "attn.q.bias", "norm.weight")
    base = {f"h.{layer}.{kind}": torch.randn(8, 8, generator=generator) for layer in range(7) for kind in kinds}
    base["head.weight"] = torch.randn(4, 8, generator=generator)
    base["head.bias"] = torch.zeros(4)
    tuned = dict(base)
    for layer in range(3, 7):
        for kind in kinds[:2]:
            part = 10.0 ** (layer - 7)
            tuned[f"h.{layer}.{kind}"] = base[f"h.{layer}.{kind}"] * (1 + (part if "weight" in kind else part / 10))
    tuned["head.weight"] = base["head.weight"] * -9
    tuned["head.bias"] = torch.ones(4)
    hfshard.save_state_dict(base, directory / "base")
    hfshard.save_state_dict(tuned, directory / "tuned")
    show_checkpoint(directory / "tuned", directory / "values.html", against=directory / "base", values=True)
    return directory / "values.html"


def shades(page: Page, kind: str) -> list[str]:
    every = attributes(page.locator(f"td[aria-label*=' {kind}:']"), "class")
    return [next(name for name in classes.split() if name != "k-changed") for classes in every]


def attributes(cells: Locator, name: str) -> list[str]:
    script = "(cells, name) => cells.map(cell => cell.getAttribute(name))"
    found: list[str] = cells.evaluate_all(script, name)
    return found


def test_values_shade_the_grid_by_what_it_shows(browser_page: Page, values_file: Path) -> None:
    browser_page.goto(values_file.as_uri())

    assert shades(browser_page, "attn.q.weight") == ["k-same"] * 3 + ["s3", "s5", "s7", "s9"]
    assert shades(browser_page, "attn.q.bias") == ["k-same"] * 3 + ["s1", "s3", "s5", "s7"]
    assert browser_page.locator(".ramp b").all_inner_texts() == ["0.001 %", "10 %"]  # not the head's 1,000 %
    assert browser_page.locator("tr.role").all_inner_texts() == ["attention", "norms"]
    box = browser_page.locator(".grid").bounding_box()
    assert box is not None
    assert box["width"] > 1100  # of 1280


def test_a_cell_prints_its_value_under_the_mouse_and_with_the_focus(browser_page: Page, values_file: Path) -> None:
    browser_page.goto(values_file.as_uri())
    pointer = browser_page.locator("#tip")

    browser_page.locator("td.s9").hover()
    assert pointer.inner_text() == "h.6.attn.q.weight\nchanged · relative norm 10.0 %"
    browser_page.locator("h1").hover()
    assert pointer.is_hidden()
    browser_page.locator(".grid td[tabindex='0']").focus()
    browser_page.keyboard.press("ArrowDown")
    assert pointer.inner_text() == "h.0.attn.q.bias\nsame"
    for _ in range(3):
        browser_page.keyboard.press("ArrowRight")
    assert pointer.inner_text() == "h.3.attn.q.bias\nchanged · relative norm 0.00100 %"
    label = browser_page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert label == "layer 3, attn.q.bias: changed, relative norm 0.00100 %"


def test_headers_sort_by_mouse_and_by_keyboard(browser_page: Page, values_file: Path) -> None:
    browser_page.goto(values_file.as_uri())
    by_norm = ["head.weight", "h.{3-6}.attn.q.weight", "h.{3-6}.attn.q.bias", "head.bias"]
    assert names(browser_page) == by_norm
    norm = browser_page.locator("th", has_text="relative norm")
    assert norm.get_attribute("aria-sort") == "descending"

    norm.get_by_role("button").click()
    assert names(browser_page) == ["h.{3-6}.attn.q.bias", "h.{3-6}.attn.q.weight", "head.weight", "head.bias"]
    assert norm.get_attribute("aria-sort") == "ascending"
    browser_page.locator("th button", has_text="1 − cosine").focus()
    browser_page.keyboard.press("Enter")
    assert names(browser_page)[0] == "head.weight"  # turned round: 2
    assert (norm.get_attribute("aria-sort"), names(browser_page)[-1]) == (None, "head.bias")
    browser_page.locator("th button", has_text="tensor").focus()
    browser_page.keyboard.press("Space")
    assert names(browser_page) == ["h.{3-6}.attn.q.bias", "h.{3-6}.attn.q.weight", "head.bias", "head.weight"]


def test_folded_layers_open(browser_page: Page, values_file: Path) -> None:
    browser_page.goto(values_file.as_uri())
    text = browser_page.locator("#list tr").nth(1).inner_text().split()
    assert text[:5] == ["h.{3-6}.attn.q.weight", "4", "tensors", "10.0", "%"]
    assert browser_page.locator("#list tr").first.inner_text().split()[:3] == ["head.weight", "1,000", "%"]
    assert browser_page.locator("#list tr").nth(3).inner_text().split()[:3] == ["head.bias", "from", "0"]
    assert browser_page.locator("#method").inner_text() == "10 tensors were read: 4.4 KB; digests told the others."
    assert "In every row: changed · F32 · 100.0 % of elements changed" in browser_page.locator("main").inner_text()

    browser_page.get_by_role("button", name="Tensors of h.{3-6}.attn.q.weight").press("Enter")
    assert names(browser_page)[1:6] == [
        "h.{3-6}.attn.q.weight", "h.6.attn.q.weight", "h.5.attn.q.weight", "h.4.attn.q.weight", "h.3.attn.q.weight",
    ]  # fmt: skip
    assert browser_page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true"
    browser_page.keyboard.press("Enter")
    assert len(names(browser_page)) == 4
    browser_page.get_by_role("button", name="Unfold layers").click()
    assert len(names(browser_page)) == 10
    browser_page.get_by_role("button", name="Fold layers").click()
    assert len(names(browser_page)) == 4


def test_a_fold_of_thousands_opens_in_part(browser_page: Page, tmp_path: Path) -> None:
    values = ValueDiff(2, 2, 0.5, 0.25, 0.9, 0, 0, 0, 0)
    names_of_experts = [f"h.{layer}.experts.{expert}.up" for layer in range(10) for expert in range(1000)]
    found = report_of(tensor_diff("changed", name, values) for name in names_of_experts)
    (tmp_path / "diff.html").write_text(render_page(make_diff_page(found)), encoding="utf-8")
    browser_page.goto((tmp_path / "diff.html").as_uri())

    browser_page.locator(".fold").click()

    assert browser_page.locator("#list tr").count() == 202
    assert browser_page.locator("#list tr").last.inner_text() == "and 9,800 more: search for them"
    browser_page.locator("#search").fill("h.7.experts.999.")
    assert names(browser_page) == ["h.7.experts.999.up"]


def test_a_chosen_cell_leaves_its_own_row_until_all_are_asked_for(browser_page: Page, values_file: Path) -> None:
    browser_page.goto(values_file.as_uri())

    browser_page.locator("td.s9").click()
    assert names(browser_page) == ["h.6.attn.q.weight"]
    cells = browser_page.locator("#list td").all_inner_texts()
    assert cells == ["h.6.attn.q.weight", "10.0 %", cells[2], cells[3], "8 × 8"]
    assert browser_page.locator("#chosen").inner_text() == "Only h.6.attn.q.weight Show all"
    browser_page.get_by_role("button", name="Show all").click()
    assert (len(names(browser_page)), browser_page.locator("#chosen").is_visible()) == (4, False)


def test_some_of_a_cells_tensors_are_a_share_of_it(browser_page: Page, tmp_path: Path) -> None:
    base = {f"h.{layer}.experts.{expert}.up": torch.ones(2) for layer in (0, 1) for expert in range(8)}
    tuned = base | {f"h.1.experts.{expert}.up": torch.zeros(2) for expert in (1, 5)}
    hfshard.save_state_dict(base, tmp_path / "a")
    hfshard.save_state_dict(tuned, tmp_path / "b")
    show_checkpoint(tmp_path / "b", tmp_path / "diff.html", against=tmp_path / "a")
    browser_page.goto((tmp_path / "diff.html").as_uri())

    cell = browser_page.locator("td.part")

    assert cell.evaluate("cell => cell.style.getPropertyValue('--share')") == "25%"
    assert cell.get_attribute("aria-label") == "layer 1, experts.*.up: changed, 2 of 8 tensors differ"
    assert names(browser_page) == ["h.1.experts.*.up"]


def test_what_is_the_same_everywhere_is_a_line_that_opens(browser_page: Page, tmp_path: Path) -> None:
    base = {f"h.{layer}.w": torch.ones(2) for layer in range(3)}
    hfshard.save_state_dict(base, tmp_path / "a")
    show_checkpoint(tmp_path / "a", tmp_path / "same.html", against=tmp_path / "a")
    hfshard.save_state_dict({f"new.{name}": tensor + 1 for name, tensor in base.items()} | base, tmp_path / "b")
    show_checkpoint(tmp_path / "b", tmp_path / "more.html", against=tmp_path / "a")

    browser_page.goto((tmp_path / "same.html").as_uri())
    assert browser_page.locator("summary").all_inner_texts() == ["h: same in all 3 layers"]
    assert browser_page.locator("h2:visible").all_inner_texts() == ["Which layers differ"]
    browser_page.locator("summary").press("Enter")
    assert browser_page.locator("td.k-same:visible").count() == 3
    browser_page.goto((tmp_path / "more.html").as_uri())
    assert browser_page.locator("summary").all_inner_texts() == [
        "h: same in all 3 layers", "new.h: only in B in all 3 layers",
    ]  # fmt: skip


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

    assert names(browser_page)[3] == HOSTILE.replace("\u202e", "\\u202e")
    assert browser_page.locator("img").count() == 0


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_of_a_diff_sticks_out(browser_page: Page, page_file: Path, width: int) -> None:
    browser_page.set_viewport_size({"width": width, "height": 844})
    browser_page.goto(page_file.as_uri())

    assert browser_page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_legend_of_an_adapter_wraps(browser_page: Page, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "mine")
    show_checkpoint(adapter, tmp_path / "diff.html", against=make_base(tmp_path / "base"), values=True)
    browser_page.set_viewport_size({"width": 390, "height": 844})
    browser_page.goto((tmp_path / "diff.html").as_uri())

    legend = browser_page.locator(".ramp > span").first.inner_text()

    assert legend == "relative norm |update| / |weight|, log scale; the update includes alpha / rank"
    assert browser_page.evaluate("document.documentElement.scrollWidth") <= 390
