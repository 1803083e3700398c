"""Pictures of pages: of the size and theme that was asked for, and one clear error where no browser draws them."""

from __future__ import annotations

import os
import select
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest

from hfshard.errors import BrowserError, InvalidArgumentError
from hfshard.viewing import screenshot
from hfshard.viewing.screenshot import CHROMIUM, ScreenshotOptions, find_chromium, parse_still_size, take_screenshot

needs_chromium = pytest.mark.skipif(find_chromium() is None, reason="no chromium: apt-get install chromium")

# Scripts and styles in it run; a script draws what the window's size and theme are.
PAGE = """<!doctype html><meta charset="utf-8"><style>
:root { color-scheme: light dark } body { margin: 0; background: #fff }
@media (prefers-color-scheme: dark) { body { background: #000 } }
</style><body><script>
document.body.innerHTML = `<div style="background:#f00;width:${innerWidth / 2}px;height:${innerHeight}px"></div>`
</script>"""


@needs_chromium
def test_a_picture_has_its_size_and_theme() -> None:
    picture = take_screenshot(PAGE, ScreenshotOptions(width=200, height=200, theme="dark"))

    width, height, rows = _pixels(picture)
    assert (width, height) == (200, 200)
    assert [rows[199][at] for at in (0, 99, 100, 199)] == [(255, 0, 0), (255, 0, 0), (0, 0, 0), (0, 0, 0)]


def test_a_missing_browser_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(CHROMIUM, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(BrowserError, match=r"none of its usual names is on PATH. Run: apt-get install chromium"):
        take_screenshot(PAGE, ScreenshotOptions())

    monkeypatch.setenv(CHROMIUM, str(tmp_path / "chrome"))
    with pytest.raises(BrowserError, match=rf"HFSHARD_CHROMIUM names '{tmp_path}/chrome', which is not a program"):
        take_screenshot(PAGE, ScreenshotOptions())


def test_a_browser_that_fails_is_told_with_what_it_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CHROMIUM, _program(tmp_path, "echo first >&2; echo no display >&2; exit 7"))

    with pytest.raises(
        BrowserError, match=r"browser' wrote no screenshot. Its output ended with: no display \(exit status 7\)"
    ):
        take_screenshot(PAGE, ScreenshotOptions())


def test_a_browser_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(screenshot, "_SECONDS", 0.2)
    monkeypatch.setenv(CHROMIUM, _program(tmp_path, f"sleep 600 & echo $! > {tmp_path}/pid; wait"))
    os.mkfifo(tmp_path / "pid")
    ends: list[int] = []

    class Begun(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            ends.append(os.pidfd_open(int((tmp_path / "pid").read_text())))  # its seconds begin when it has a child

    monkeypatch.setattr(subprocess, "Popen", Begun)
    with pytest.raises(BrowserError, match=r"wrote no screenshot in 0.2 seconds"):
        take_screenshot(PAGE, ScreenshotOptions())

    [end] = ends
    assert select.select([end], [], [], 60)[0] == [end]  # its child, too
    os.close(end)


def test_sizes_and_themes_are_checked() -> None:
    assert parse_still_size("390x844") == (390, 844)
    for text in ("390", "390x", "x844", "-1x5", "390×844", "1e3x10", "390x844 "):
        with pytest.raises(InvalidArgumentError, match="is not a valid screenshot size, such as 1280x800"):
            parse_still_size(text)
    with pytest.raises(InvalidArgumentError, match="The width of a screenshot must be 200 to 10000 pixels, got 199"):
        ScreenshotOptions(width=199)
    with pytest.raises(InvalidArgumentError, match="theme must be 'light' or 'dark', got 'sepia'"):
        ScreenshotOptions(theme="sepia")  # type: ignore[arg-type]


def _program(directory: Path, script: str) -> str:
    path = directory / "browser"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def _pixels(png: bytes) -> tuple[int, int, list[list[tuple[int, int, int]]]]:
    """The pixels of a picture as Chromium writes it: 8 bits, RGB or RGBA, not interlaced."""
    at = 8
    data = b""
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        kind = png[at + 4 : at + 8]
        body = png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", body)
            assert (depth, interlaced) == (8, 0)
        data += body if kind == b"IDAT" else b""
        at += 12 + length
    step = {2: 3, 6: 4}[colour]
    raw = zlib.decompress(data)
    rows: list[bytearray] = []
    for number in range(height):
        start = number * (width * step + 1)
        above = rows[-1] if rows else bytearray(width * step)
        rows.append(_unfiltered(raw[start], raw[start + 1 : start + 1 + width * step], above, step))
    return width, height, [[(row[x], row[x + 1], row[x + 2]) for x in range(0, len(row), step)] for row in rows]


def _unfiltered(kind: int, row: bytes, above: bytearray, step: int) -> bytearray:
    done = bytearray()
    for at, byte in enumerate(row):
        left = done[at - step] if at >= step else 0
        corner = above[at - step] if at >= step else 0
        guess = left + above[at] - corner
        nearest = min((abs(guess - one), number, one) for number, one in enumerate((left, above[at], corner)))[2]
        done.append((byte + (0, left, above[at], (left + above[at]) // 2, nearest)[kind]) % 256)
    return done
