"""The harness itself: what a page does that a report must not do is seen, and other tests can have loops."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


COMPLAINTS = {
    "<script>console.error('alas')</script>": "console error: alas",
    "<script>throw new Error('alas')</script>": "page error: alas",
    "<script>setTimeout(() => alert('alas'))</script>": "dialog: alas",
    "<img src=http://192.0.2.1/pixel.png>": "request: http://192.0.2.1/pixel.png",
    "<link rel=stylesheet href=other.css>": "other.css",
    "<iframe src=other.html></iframe>": "other.html",
    "<script>new WebSocket('ws://192.0.2.1/')</script>": "request: ws://192.0.2.1/",
    "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'\"><b style='color:red'>": "console error",
}


def test_what_a_report_does_not_do_is_seen(browser: Browser, tmp_path: Path) -> None:
    from tests.viewing.browser.watching import complaints_of

    file = tmp_path / "page.html"
    with browser.new_context() as context:
        page = context.new_page()
        complaints = complaints_of(page)
        for markup, expected in COMPLAINTS.items():
            file.write_text(f"<!doctype html><title>t</title>{markup}")
            page.goto("about:blank")
            complaints.clear()
            page.goto(file.as_uri(), wait_until="commit")
            end = time.monotonic() + 120
            while expected not in " ".join(complaints) and time.monotonic() < end:
                page.wait_for_timeout(20)

            assert expected in " ".join(complaints), markup


def test_a_page_by_itself_is_in_order(browser_page: Page, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(
        "<!doctype html><title>t</title><script>document.title = matchMedia('(width: 1280px)').matches</script>"
    )

    browser_page.goto(file.as_uri())

    assert browser_page.title() == "true"


def test_other_tests_have_loops_of_their_own() -> None:
    assert asyncio.run(asyncio.sleep(0, "slept")) == "slept"


def test_the_browser_outlives_them(browser: Browser) -> None:
    assert browser.is_connected()
    with browser.new_context() as context:
        assert context.new_page().evaluate("1 + 1") == 2
