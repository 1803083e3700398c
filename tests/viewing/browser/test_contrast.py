"""Every text of every kind of page can be read: its contrast is measured in the browser, in light and in dark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hfshard.viewing.page.checkpoint_page import make_checkpoint_page
from hfshard.viewing.page.page import render_page
from hfshard.viewing.show import show_checkpoint
from hfshard.viewing.tensor_values import MeasuredValues, ValueSummary
from tests.viewing.browser.diffs import make_two
from tests.viewing.browser.runs import make_run
from tests.viewing.page.checkpoints import small_checkpoint

if TYPE_CHECKING:
    from playwright.sync_api import Page

LEAST = 4.5
"""What WCAG 2.2 asks of text (level AA)."""

FAINT_TEXTS = """least => {
  const context = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const rgba = (colour) => {
    if (!known.has(colour)) {
      context.clearRect(0, 0, 1, 1);
      context.fillStyle = colour;
      context.fillRect(0, 0, 1, 1);
      known.set(colour, [...context.getImageData(0, 0, 1, 1).data]);
    }
    return known.get(colour);
  };
  const over = ([...above], below) => {
    const share = above.pop() / 255;
    return above.map((part, at) => part * share + below[at] * (1 - share));
  };
  const grounds = new Map();
  const ground = (element) => {
    if (!element) return [255, 255, 255];
    if (!grounds.has(element)) {
      const own = rgba(getComputedStyle(element).backgroundColor);
      grounds.set(element, over(own, own[3] === 255 ? own : ground(element.parentElement)));
    }
    return grounds.get(element);
  };
  const opaque = new Map([[null, true]]);
  const isOpaque = (element) => {
    if (!opaque.has(element)) {
      opaque.set(element, getComputedStyle(element).opacity === "1" && isOpaque(element.parentElement));
    }
    return opaque.get(element);
  };
  const light = (colour) => {
    const linear = (part) => (part <= 10 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = colour.map(linear);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  let measured = 0;
  const measure = (element, colour, text) => {
    const below = ground(element);
    const lights = [light(over(rgba(colour), below)), light(below)];
    const ratio = (Math.max(...lights) + 0.05) / (Math.min(...lights) + 0.05);
    measured += 1;
    const where = `${element.tagName} ${element.getAttribute("class")}`;
    if (ratio < least) found.push(`${ratio.toFixed(2)}: ${text.slice(0, 40)} in ${where}`);
    if (!isOpaque(element)) found.push(`see-through: ${text.slice(0, 40)} in ${where}`);
  };
  for (const element of document.body.querySelectorAll("*")) {
    if (!element.checkVisibility({ opacityProperty: true }) || element.closest("script, noscript, .unseen")) continue;
    const style = getComputedStyle(element);
    const text = [...element.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data.trim()).join("");
    if (text) measure(element, element.closest("svg") ? style.fill : style.color, text);
    const before = getComputedStyle(element, "::before");
    if (!["none", "normal"].includes(before.content)) measure(element, before.color, before.content);
    if (element.placeholder) measure(element, getComputedStyle(element, "::placeholder").color, element.placeholder);
  }
  return [measured, found];
}"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pages")
    old, new = make_two(directory)
    show_checkpoint(new, directory / "diff.html", against=old, values=True)
    show_checkpoint(make_run(directory / "run", 8), directory / "run.html", best="accuracy", metric_mode="max")
    values = ValueSummary(10_000, 1, 2, -1.0, 1.0, 0.0, 1.0, -1.0, 1.0, (1, 5, 9, 5, 1))
    measured = MeasuredValues({"model.embed.weight": values}, 1, 0)
    html = render_page(make_checkpoint_page(small_checkpoint(), 50_000, measured))
    (directory / "checkpoint.html").write_text(html, encoding="utf-8")
    return directory


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_each_text_stands_out_from_its_ground(browser_page: Page, pages: Path, theme: str) -> None:
    browser_page.emulate_media(color_scheme="dark" if theme == "dark" else "light")
    steps = {
        "checkpoint": ("button.link >> nth=0", "[data-colour=file]", "#search"),
        "run": (),
        "diff": ("td.k-changed >> nth=0", "[data-kind=changed]", "td.k-changed >> nth=0"),
    }
    for name, clicks in steps.items():
        browser_page.goto((pages / f"{name}.html").as_uri())
        for target in (None, *clicks):
            if target is not None:
                browser_page.click(target)
            if target == "#search":
                browser_page.fill("#search", "weight")
                browser_page.keyboard.press("ArrowDown")
            measured, faint = browser_page.evaluate(FAINT_TEXTS, LEAST)
            assert (measured > 40, faint) == (True, []), (name, target)
