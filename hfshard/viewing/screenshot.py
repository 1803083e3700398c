"""Screenshots of pages: an installed Chromium draws them, without a window or network access."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from hfshard.errors import BrowserError, InvalidArgumentError

CHROMIUM: Final = "HFSHARD_CHROMIUM"
"""The environment variable that names the browser: a path, or a command on PATH."""

_COMMANDS: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_SECONDS: Final = 60.0
"""The time limit for drawing; it takes one second, and a few on a busy machine."""
_LEAST: Final = 200
_MOST: Final = 10_000
"""Limits of a side in pixels. Below 144, a browser whose window has a frame draws nothing."""
PNG_BEGINNING: Final = b"\x89PNG\r\n\x1a\n"

_ARGUMENTS: Final = (
    "--headless",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # the page requests nothing, and neither must the browser
)

_FRAME: Final = """<!doctype html><meta charset="utf-8"><style>html, body {{ margin: 0; overflow: hidden }}
iframe {{ border: 0; display: block; width: {width}px; height: {height}px }}</style><iframe src="page.html"></iframe>
"""
"""The page that the browser opens. Its windows are at least 500 pixels wide, and lower than requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenshotOptions:
    """Settings of a screenshot."""

    width: int = 1200
    """In pixels, like the height; the defaults are the size of social cards."""
    height: int = 630
    theme: Literal["light", "dark"] = "light"

    def __post_init__(self) -> None:
        """Check the fields."""
        for name, pixels in (("width", self.width), ("height", self.height)):
            if type(pixels) is not int or not _LEAST <= pixels <= _MOST:
                raise InvalidArgumentError(
                    f"The {name} of a screenshot must be {_LEAST} to {_MOST} pixels, got {pixels!r}."
                )
        if self.theme not in ("light", "dark"):
            raise InvalidArgumentError(f"theme must be 'light' or 'dark', got {self.theme!r}.")


def parse_still_size(text: str) -> tuple[int, int]:
    """Parse the width and height of a picture in pixels: "1280x800"."""
    match = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", text)
    if match is None:
        raise InvalidArgumentError(f"{text!r:.50} is not a valid screenshot size, such as 1280x800.")
    return int(match[1]), int(match[2])


def find_chromium() -> str | None:
    """Find the path of a Chromium or Chrome: the one that `HFSHARD_CHROMIUM` names, or the first on PATH."""
    named = os.environ.get(CHROMIUM)
    commands = (named,) if named else _COMMANDS
    return next(filter(None, map(shutil.which, commands)), None)


def require_chromium() -> str:
    """Find a browser, before anything is read for a screenshot; raise BrowserError if there is none."""
    found = find_chromium()
    if found is None:
        named = os.environ.get(CHROMIUM)
        where = f"{CHROMIUM} names '{named}', which is not a program" if named else "none of its usual names is on PATH"
        raise BrowserError(
            f"A screenshot of a page needs Chromium or Chrome, but {where}. Run: apt-get install chromium; or set "
            f"{CHROMIUM} to the browser's path; or open the page (-o FILE.html) in any browser."
        )
    return found


def take_screenshot(html: str, still: ScreenshotOptions) -> bytes:
    """Draw a page as PNG with the browser, in a profile that is removed afterwards.

    Raises:
        BrowserError: There is no browser, or it failed, or took too long.
    """
    chromium = require_chromium()
    with tempfile.TemporaryDirectory(prefix="hfshard-still-", ignore_cleanup_errors=True) as directory:
        for name, text in (("page.html", html), ("frame.html", _FRAME.format(width=still.width, height=still.height))):
            with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
                file.write(text)
        ending = _run([chromium, *_arguments(still, directory), Path(directory, "frame.html").as_uri()], directory)
        try:
            with open(os.path.join(directory, "still.png"), "rb") as file:
                picture = file.read()
        except FileNotFoundError:
            picture = b""
    if not picture.startswith(PNG_BEGINNING):
        raise BrowserError(f"'{chromium}' wrote no screenshot. Its output ended with: {ending}", path=chromium)
    return picture


def _arguments(still: ScreenshotOptions, directory: str) -> list[str]:
    arguments = [
        *_ARGUMENTS,
        f"--window-size={still.width},{still.height}",
        f"--user-data-dir={directory}/profile",
        f"--screenshot={directory}/still.png",
    ]
    if still.theme == "dark":
        arguments.append("--force-dark-mode")
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")  # it does not start otherwise, and the page is hfshard's own
    return arguments


def _run(command: list[str], directory: str) -> str:
    """Run a browser to its end, and return the last line of its output, with the exit status."""
    environment = {**os.environ, "HOME": directory}  # for what it writes outside its profile
    try:
        browser = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise BrowserError(f"'{command[0]}' cannot be run: {error.strerror}.", path=command[0]) from error
    try:
        output = browser.communicate(timeout=_SECONDS)[1]
    except subprocess.TimeoutExpired as error:
        raise BrowserError(
            f"'{command[0]}' wrote no screenshot in {_SECONDS:g} seconds. Retry when the machine is less busy, or "
            "open the page in a browser.",
            path=command[0],
        ) from error
    finally:
        if browser.poll() is None:  # timeout or Ctrl-C: its children end with it
            os.killpg(browser.pid, signal.SIGKILL)
            browser.communicate()
    lines = output.decode(errors="replace").strip().splitlines() or ["nothing"]
    return f"{lines[-1]} (exit status {browser.returncode})"
