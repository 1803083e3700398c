"""A page as one HTML file: styles, scripts and data are in it, and its policy lets nothing else run or load."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from importlib.resources import files
from typing import Any, Final

import jinja2

from hfshard._util.text import format_size
from hfshard.constants import VERSION
from hfshard.viewing.page.page import Page, PageKind

_STYLES: Final[dict[PageKind, tuple[str, ...]]] = {
    "checkpoint": ("base", "treemap", "histograms"),
    "run": ("base", "run"),
    "diff": ("base", "diff"),
}
"""Which files of `assets` a kind of page has, in this order."""

_SCRIPTS: Final[dict[PageKind, tuple[str, ...]]] = {
    "checkpoint": ("base", "tree", "squarify", "treemap", "details", "histograms", "search", "checkpoint"),
    "run": ("base",),
    "diff": ("base", "diff"),
}
"""The same of scripts. All are in one function, and call each other's by name."""

_LONGEST_BROKEN: Final = 300
"""Characters of a name that is broken at its dots; a longer one is broken anywhere."""

_ESCAPES: Final = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
"""What could end a script element, or a line of it: in JSON it stands in strings only."""


def render_page(page: Page) -> str:
    """Write a page as HTML. It is a function of the page and this version of hfshard alone: no time, no random id.

    Args:
        page: What it shows.
    """
    style = _joined(page.kind, "css")
    script = _joined(page.kind, "js")
    template = _environment().get_template(f"{page.kind}.html")
    return template.render(
        page=page,
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=json_for_html(page.data),
        version=VERSION,
        **page.view,
    )


def json_for_html(value: Any) -> str:
    """Write JSON that can stand in a script element, whatever text is in it."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.translate(_ESCAPES)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hfshard.viewing.page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["size"] = format_size
    environment.filters["count"] = "{:,}".format
    environment.filters["pieces"] = _pieces
    return environment


def _pieces(name: str) -> list[str]:
    """Parts of a name, between which it may be broken: after a dot or a slash, not in a word or a number."""
    return [name] if len(name) > _LONGEST_BROKEN else re.split(r"(?<=[._/-])(?=[^\d\s])", name)


@cache
def _joined(kind: PageKind, suffix: str) -> str:
    """All styles, or scripts, of a kind of page as one text."""
    folder = files("hfshard.viewing.page") / "assets"
    names = {"css": _STYLES, "js": _SCRIPTS}[suffix][kind]
    text = "\n".join((folder / f"{name}.{suffix}").read_text(encoding="utf-8") for name in names)
    return text if suffix == "css" else f'(() => {{\n"use strict";\n{text}\n}})();\n'


def _hash(text: str) -> str:
    """A source of a Content-Security-Policy: this very text."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
