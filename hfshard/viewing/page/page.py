"""Page data, its rendering as one self-contained HTML file, and writing that file atomically."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any, Final, Literal

import jinja2

from hfshard._util.arguments import absolute_directory, wraps_os_errors
from hfshard._util.text import format_size, printable
from hfshard.constants import VERSION
from hfshard.disk.fsops import rename, unlink_if_exists, write_file
from hfshard.errors import InvalidPathError, escaped
from hfshard.training.run.manifest import CHECKPOINT
from hfshard.viewing.model_summary import ModelSummary
from hfshard.viewing.screenshot import PNG_BEGINNING

PageKind = Literal["checkpoint", "run", "diff"]
"""Each kind has its own template, `templates/KIND.html`, and the scripts and styles listed below."""

LONGEST_TEXT: Final = 4000
"""The most characters of one value that a page shows: values may have megabytes, which nobody reads on a page."""

NO_NAME: Final = "(no name)"
"""Shown for a tensor whose name is empty."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One of the figures at the top of a page."""

    label: str
    value: str
    note: str = ""
    """In small print below it."""


@dataclass(frozen=True, slots=True)
class Page:
    """Contents of one page."""

    kind: PageKind
    title: str
    """The object shown: the name of a folder, a file or a repo; for a diff, the short names of both."""
    facts: tuple[Fact, ...]
    about: tuple[str, ...] = ()
    """What it is, in a few words each, below the title."""
    place: str = ""
    """An address, or the path of a page that shows paths, in small print; "" if it says no more than the title."""
    view: Mapping[str, Any] = field(default_factory=dict)
    """Values that the template writes into the HTML, readable without scripts. The template escapes only markup: names
    and values from a checkpoint must pass through `printable` first."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Data for the scripts, as JSON: columns rather than objects, because there may be 100,000 tensors."""


def name_of(place: str) -> str:
    """Return the name of a place: the last part of its path or address, a checkpoint of a run with the run's.

    Args:
        place: An absolute path, a store address, or a name on the Hub, which remains whole.

    Example:
        >>> name_of("/data/runs/bert/checkpoint-30"), name_of("org/name@v1")
        ('bert/checkpoint-30', 'org/name@v1')
    """
    if not is_path(place) and "://" not in place:
        return printable(place)
    parts = [part for part in place.rpartition("://")[2].split("/") if part]
    count = 2 if parts and CHECKPOINT.fullmatch(parts[-1]) else 1
    return printable("/".join(parts[-count:]) or place)


def is_path(place: str) -> bool:
    """Return whether a place is a path of this machine, which a page that is shared does not show."""
    return place.startswith("/")


def describe_model(model: ModelSummary | None) -> tuple[str, ...]:
    """Say what a model or an adapter is, in a few words each; a base in a folder of this machine by its name."""
    if model is None:
        return ()
    shown = model if model.base is None or not is_path(model.base) else replace(model, base=name_of(model.base))
    return tuple(map(printable, shown.describe()))


def share_text(part: float, whole: float) -> str:
    """Format a share as a percentage."""
    percent = 100 * part / whole if whole else 0.0
    return "under 0.1 %" if 0 < percent < 0.1 else f"{percent:.1f} %"


def percent_text(share: float, digits: int = 3) -> str:
    """Format a finite number as a percentage that has as many digits, and all before the point."""
    percent = 100 * share
    is_long = 100 <= percent < _LARGEST_PERCENT
    return f"{percent:,.0f} %" if is_long else f"{percent:.{digits}g} %"


_LARGEST_PERCENT: Final = 1e6
"""From it on, percentages are written with an exponent."""


def printable_value(value: Any) -> str:
    """Format a metadata value as text, truncated if it is very long."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
    if len(text) > LONGEST_TEXT:
        text = f"{text[:LONGEST_TEXT]} … and {len(text) - LONGEST_TEXT:,} more characters"
    return escaped(text, keep="\n")


# Rendering as one HTML file: it contains styles, scripts and data, and its policy lets nothing else run or load.


_STYLES: Final[dict[PageKind, tuple[str, ...]]] = {
    "checkpoint": ("base", "tables", "treemap", "histograms", "still"),
    "run": ("base", "tables", "run", "still"),
    "diff": ("base", "tables", "diff", "still"),
}
"""The style files in `assets` for each kind of page, in this order."""

_SCRIPTS: Final[dict[PageKind, tuple[str, ...]]] = {
    "checkpoint": ("base", "tables", "tree", "squarify", "treemap", "details", "histograms", "search", "checkpoint"),
    "run": ("base", "tables", "run"),
    "diff": ("base", "tables", "heatmap", "diff"),
}
"""The script files for each kind of page. All are placed in one function and call each other's functions by name."""

_LONGEST_BROKEN: Final = 300
"""The most characters of a name that is broken at its dots; a longer name is broken anywhere."""

_ESCAPES: Final = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
"""Characters that could end a script element, or a line of it; JSON has them in strings only."""


def render_page(page: Page, *, is_still: bool = False) -> str:
    """Render a page as HTML, which depends only on the page and this version of hfshard: no time, no random id.

    `is_still` is for a screenshot: without controls, and arranged to fill a low one.
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
        is_still=is_still,
        **page.view,
    )


def json_for_html(value: Any) -> str:
    """Encode JSON so that it is safe in a script element, whatever text it contains."""
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
    environment.filters["share"] = share_text
    return environment


def _pieces(name: str) -> list[str]:
    """Split a name where it may be broken: after a dot, slash, underscore or hyphen, but not in a word or a number."""
    return [name] if len(name) > _LONGEST_BROKEN else re.split(r"(?<=[._/-])(?=[^\d\s])", name)


@cache
def _joined(kind: PageKind, suffix: str) -> str:
    """Join all styles, or all scripts, of a kind of page into one text."""
    folder = files("hfshard.viewing.page") / "assets"
    names = {"css": _STYLES, "js": _SCRIPTS}[suffix][kind]
    text = "\n".join((folder / f"{name}.{suffix}").read_text(encoding="utf-8") for name in names)
    return text if suffix == "css" else f'(() => {{\n"use strict";\n{text}\n}})();\n'


def _hash(text: str) -> str:
    """Return a Content-Security-Policy source that allows exactly this text."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


# Writing a page to its file: atomically, and over nothing but a page.


PAGE_BEGINNING: Final = "<!doctype html>\n<!-- A page of hfshard"
"""The beginning of each hfshard page; every template inherits it."""


def checked_output(output: str | os.PathLike[str], *, is_picture: bool = False) -> str:
    """Check the path that a page, or a screenshot of one, is to be written to, before anything is read for it.

    Returns:
        The absolute path, without links.

    Raises:
        InvalidPathError: It is an address or a directory, its parent directory does not exist, or it is an existing
            file that is not an hfshard page, or not a PNG.
    """
    path = os.path.realpath(absolute_directory(output, "output"))
    if os.path.isdir(path):
        raise InvalidPathError(f"'{path}' is a directory. Pass the file to write.", path=path)
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise InvalidPathError(f"The directory '{folder}' does not exist. Create it, or pass another path.", path=path)
    what, beginning = ("PNG", PNG_BEGINNING) if is_picture else ("page of hfshard", PAGE_BEGINNING.encode())
    if os.path.lexists(path) and not _begins_with(path, beginning):
        raise InvalidPathError(
            f"'{path}' exists and is not a {what}, so it was left unchanged. Pass another file, or remove it.",
            path=path,
        )
    return path


@wraps_os_errors("path")
def write_page(page: str | bytes, path: str) -> None:
    """Write a page or a screenshot to a temporary file and rename it, so that readers see the old or the new one.

    Args:
        page: HTML, or the bytes of a PNG.
        path: The result of `checked_output`.
    """
    raw = page.encode() if isinstance(page, str) else page
    like = os.stat(path) if os.path.exists(path) else None
    name = os.path.basename(path).encode(errors="ignore")[:200].decode(errors="ignore")
    beside = os.path.join(os.path.dirname(path), f".{name}.{secrets.token_hex(4)}")
    try:
        write_file(beside, raw, like=like)
        rename(beside, path)
    except BaseException:
        unlink_if_exists(beside)
        raise


def _begins_with(path: str, beginning: bytes) -> bool:
    """Return whether a file has this beginning or is empty."""
    if not os.path.exists(path) or not stat.S_ISREG(os.stat(path).st_mode):
        return False
    with open(path, "rb") as file:
        return file.read(len(beginning)) in (b"", beginning)
