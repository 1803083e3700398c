"""What a page shows, before it is HTML: the seam between what is looked at and how it looks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from hfshard.errors import escaped

PageKind = Literal["checkpoint", "run", "diff"]
"""A kind has a template of its own, `templates/KIND.html`, and scripts and styles that `rendering.py` lists."""

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
