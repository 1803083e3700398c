"""A page as data, as one HTML file that loads nothing else, and in its place: whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Final, Literal

import jinja2

from hfshard._util.arguments import absolute_directory, names_files
from hfshard._util.text import format_size
from hfshard.constants import VERSION
from hfshard.disk.fsops import rename, unlink_if_there, write_file
from hfshard.errors import InvalidPathError, escaped

PageKind = Literal["checkpoint", "run", "diff"]
"""A kind has a template of its own, `templates/KIND.html`, and scripts and styles that are listed below."""

LONGEST_TEXT: Final = 4000
"""Characters of one value that a page shows: a value may have megabytes, and nobody reads them here."""

NO_NAME: Final = "(no name)"
"""What stands for a tensor whose name is empty."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One of the figures at the top of a page."""

    label: str
    value: str
    note: str = ""
    """In small print below it."""


@dataclass(frozen=True, slots=True)
class Page:
    """What one page shows."""

    kind: PageKind
    title: str
    """What is looked at: a path, an address, a name of the Hub; of a diff, both by their short names."""
    facts: tuple[Fact, ...]
    view: Mapping[str, Any] = field(default_factory=dict)
    """What the template writes into the HTML, readable without scripts. It escapes markup, and nothing else: names and
    values from a checkpoint go through `shown` first."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """What the scripts draw from, as JSON: columns rather than objects, because there may be 100,000 tensors."""


def shown(text: str) -> str:
    """Escape what would hide or reorder text, such as a right-to-left override; markup is the template's to escape."""
    return escaped(text, keep="")


def shown_value(value: Any) -> str:
    """A value of the metadata as text, cut where it is very long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
    if len(text) > LONGEST_TEXT:
        text = f"{text[:LONGEST_TEXT]} … and {len(text) - LONGEST_TEXT:,} more characters"
    return escaped(text, keep="\n")


# A page as one HTML file: styles, scripts and data are in it, and its policy lets nothing else run or load.


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


# Puts a page into its file: whole or not at all, and over nothing but a page.


PAGE_BEGINNING: Final = "<!doctype html>\n<!-- A page of hfshard"
"""How each of our pages begins; every template inherits it."""
PNG_BEGINNING: Final = b"\x89PNG\r\n\x1a\n"


def checked_output(output: str | os.PathLike[str], *, is_picture: bool = False) -> str:
    """Check where a page, or a picture of one, is to be written, before anything is read for it.

    Returns:
        The absolute path, without links.

    Raises:
        InvalidPathError: It is an address or a directory, its folder does not exist, or a file is there that is no
            page of hfshard, or no PNG.
    """
    path = os.path.realpath(absolute_directory(output, "output"))
    if os.path.isdir(path):
        raise InvalidPathError(f"'{path}' is a directory: give the file that the page is written to.", path=path)
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise InvalidPathError(f"There is no directory '{folder}' for the page. Make it, or give another.", path=path)
    what, beginning = ("PNG", PNG_BEGINNING) if is_picture else ("page of hfshard", PAGE_BEGINNING.encode())
    if os.path.lexists(path) and not _begins_with(path, beginning):
        raise InvalidPathError(
            f"'{path}' is there and is no {what}, so it is left as it is. Give another file, or remove it.",
            path=path,
        )
    return path


@names_files("path")
def write_page(page: str | bytes, path: str) -> int:
    """Write a page or a picture beside its place and rename it: who opens the file sees the old one or the new one.

    Args:
        page: HTML, or the bytes of a PNG.
        path: What `checked_output` returned.

    Returns:
        Bytes.

    Raises:
        FileError: The disk is full, or the directory can't be written to. An old page is as it was.
    """
    raw = page.encode() if isinstance(page, str) else page
    like = os.stat(path) if os.path.exists(path) else None
    name = os.path.basename(path).encode(errors="ignore")[:200].decode(errors="ignore")
    beside = os.path.join(os.path.dirname(path), f".{name}.{secrets.token_hex(4)}")
    try:
        write_file(beside, raw, like=like)
        rename(beside, path)
    except BaseException:
        unlink_if_there(beside)
        raise
    return len(raw)


def _begins_with(path: str, beginning: bytes) -> bool:
    """Whether a file is of this kind, or empty."""
    if not os.path.exists(path) or not stat.S_ISREG(os.stat(path).st_mode):
        return False
    with open(path, "rb") as file:
        return file.read(len(beginning)) in (b"", beginning)
