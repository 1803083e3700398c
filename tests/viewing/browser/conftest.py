"""A real browser: Debian's Chromium, driven by playwright; one for all tests, and one page."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from hfshard.viewing.screenshot import CHROMIUM, find_chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_INSTALL = "to run it: pip install -e '.[test]', apt-get install chromium"
_ARGUMENTS = (
    "--no-sandbox",  # CI is root
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
_PATIENCE_MS = 120_000
"""For how long an action waits for its element: on any machine longer than it takes."""


@pytest.fixture(scope="session")
def _session_browser() -> Iterator[tuple[Browser, asyncio.AbstractEventLoop]]:
    """The browser of all tests, and the loop that playwright takes for the one that runs in this thread."""
    sync_api = pytest.importorskip("playwright.sync_api", reason=f"no playwright ({_INSTALL})")
    chromium = find_chromium()
    if chromium is None and CHROMIUM in os.environ:
        pytest.fail(f"{CHROMIUM} names no browser: {os.environ[CHROMIUM]}")
    if chromium is None:
        pytest.skip(f"no chromium ({_INSTALL})")
    with sync_api.sync_playwright() as playwright:
        loop = asyncio.get_running_loop()
        started = playwright.chromium.launch(executable_path=chromium, args=list(_ARGUMENTS), timeout=_PATIENCE_MS)
        asyncio._set_running_loop(None)
        yield started, loop
        asyncio._set_running_loop(loop)
        started.close()


@pytest.fixture
def browser(_session_browser: tuple[Browser, asyncio.AbstractEventLoop]) -> Iterator[Browser]:
    """The browser; without one the test is skipped, unless HFSHARD_CHROMIUM names one that is not there."""
    started, loop = _session_browser
    asyncio._set_running_loop(loop)
    yield started
    asyncio._set_running_loop(None)  # other tests have loops of their own


class _OnePage:
    """The page of the test before, which is there a second sooner than a new one."""

    def __init__(self) -> None:
        self._page: Page | None = None
        self._complaints: list[str] = []

    def fresh(self, browser: Browser) -> tuple[Page, list[str]]:
        """The page, empty, of 1280 x 800 and in light colours; and the complaints about it from now on."""
        from tests.viewing.browser.watching import complaints_of  # imports playwright

        page = self._page
        if page is None or page.is_closed():
            page = self._page = browser.new_context().new_page()
            page.set_default_timeout(_PATIENCE_MS)
            self._complaints = complaints_of(page)
        page.goto("about:blank")
        page.mouse.move(0, 0)
        page.set_viewport_size({"width": 1280, "height": 800})
        page.emulate_media(color_scheme="light")
        self._complaints.clear()
        return page, self._complaints


@pytest.fixture(scope="session")
def _one_page() -> _OnePage:
    return _OnePage()


@pytest.fixture
def browser_page(browser: Browser, _one_page: _OnePage) -> Iterator[Page]:
    """An empty page of 1280 x 800 in light colours; the test fails if it logs an error, or asks for more than the file.

    browser_page.goto(path.as_uri())
    """
    page, complaints = _one_page.fresh(browser)
    yield page
    page.evaluate("0")  # what happened before has been reported then
    assert complaints == []
