"""Tables are sorted by their headers, on each kind of page, by mouse and by keyboard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hfshard.viewing.show import show_checkpoint
from tests.viewing.browser.diffs import make_two
from tests.viewing.browser.runs import make_run

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

TABLE = """<main><table class="sortable" id="planets">
<thead><tr><th scope="col">planet</th><th scope="col"><span class="unseen">sign</span></th>
<th scope="col" class="number">moons</th><th scope="col" class="number" aria-sort="ascending">size</th></tr></thead>
<tbody><tr><td>Mars 10</td><td></td><td class="number">2</td><td class="number" data-value="6779e3">6.8 Mm</td></tr>
<tr><td>Earth</td><td></td><td class="number">1,000</td><td class="number" data-value="12742e3">12.7 Mm</td></tr>
<tr><td colspan="4">a remark on Earth</td></tr>
<tr><td>Pluto</td><td></td><td class="number">nan</td><td class="number"></td></tr>
<tr><td>mars 9</td><td></td><td class="number">30 %</td><td class="number" data-value="inf">vast</td></tr></tbody>
</table>"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One page of each kind, with the same table at its beginning."""
    directory = tmp_path_factory.mktemp("tables")
    old, new = make_two(directory)
    show_checkpoint(old, directory / "checkpoint.html")
    show_checkpoint(new, directory / "diff.html", against=old)
    show_checkpoint(make_run(directory / "run", 8), directory / "run.html")
    for page in directory.glob("*.html"):
        page.write_text(page.read_text(encoding="utf-8").replace("<main>", TABLE), encoding="utf-8")
    return directory


def first_cells(page: Page) -> list[str]:
    return page.locator("#planets tbody td:first-child").all_inner_texts()


def header(page: Page, label: str) -> Locator:
    return page.locator("#planets").get_by_role("button", name=label)


def order(page: Page, label: str) -> str | None:
    return page.locator("#planets th", has_text=label).get_attribute("aria-sort")


@pytest.mark.parametrize("kind", ["checkpoint", "run", "diff"])
def test_clicks_on_a_header_sort_a_table_of_each_page(browser_page: Page, pages: Path, kind: str) -> None:
    browser_page.goto((pages / f"{kind}.html").as_uri())
    moons = header(browser_page, "moons")

    moons.click()
    assert first_cells(browser_page) == ["Earth", "a remark on Earth", "mars 9", "Mars 10", "Pluto"]
    assert (order(browser_page, "moons"), order(browser_page, "size")) == ("descending", None)
    assert browser_page.locator("#announcer").inner_text() == "Sorted by moons, descending"
    moons.click()
    assert first_cells(browser_page) == ["Mars 10", "mars 9", "Earth", "a remark on Earth", "Pluto"]
    assert order(browser_page, "moons") == "ascending"


def test_keys_sort_and_stay_where_they_are(browser_page: Page, pages: Path) -> None:
    browser_page.goto((pages / "checkpoint.html").as_uri())
    header(browser_page, "planet").focus()

    browser_page.keyboard.press("Enter")
    assert first_cells(browser_page) == ["Earth", "a remark on Earth", "mars 9", "Mars 10", "Pluto"]
    assert order(browser_page, "planet") == "ascending"
    browser_page.keyboard.press("Space")
    assert first_cells(browser_page) == ["Pluto", "Mars 10", "mars 9", "Earth", "a remark on Earth"]
    browser_page.keyboard.press("Tab")
    assert browser_page.evaluate("document.activeElement.textContent") == "moons"  # nothing to see sorts by nothing


def test_a_value_of_its_own_comes_before_the_text(browser_page: Page, pages: Path) -> None:
    browser_page.goto((pages / "checkpoint.html").as_uri())
    assert order(browser_page, "size") == "ascending"  # as the page says

    header(browser_page, "size").click()
    assert first_cells(browser_page) == ["mars 9", "Earth", "a remark on Earth", "Mars 10", "Pluto"]
    header(browser_page, "size").click()
    assert first_cells(browser_page) == ["Mars 10", "Earth", "a remark on Earth", "mars 9", "Pluto"]


def test_every_table_of_a_step_has_headers_that_sort(browser_page: Page, tmp_path: Path) -> None:
    show_checkpoint(make_run(tmp_path / "run", 8) / "checkpoint-00000020", tmp_path / "step.html")
    browser_page.goto((tmp_path / "step.html").as_uri())

    tables = browser_page.locator("table:has(tbody tr + tr)")
    assert tables.count() >= 3
    assert browser_page.locator("table:has(tbody tr + tr) thead:not(:has(.sort))").count() == 0
    browser_page.locator("#parts").get_by_role("button", name="size").click()
    sizes = browser_page.locator("#parts td[data-value]").evaluate_all("all => all.map((one) => +one.dataset.value)")
    assert sizes == sorted(sizes, reverse=True)
