"""The card of a pushed checkpoint, a picture and a table, and its place in a README.md: between two markers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias

from hfshard._util.lazy_imports import from_above
from hfshard.constants import README
from hfshard.disk.byte_source import ByteSource
from hfshard.errors import InvalidArgumentError

CARD_PICTURE: Final = "hfshard-card.png"
"""The picture's file in a repo."""

BEGIN: Final = "<!-- hfshard:card -->"
END: Final = "<!-- /hfshard:card -->"
"""The lines around what hfshard writes; everything else in the file is left as it is."""

_FENCE: Final = re.compile(r" {0,3}(?:```|~~~)")
_HEADING: Final = re.compile(r" {0,3}# ")


class DrawnCard(NamedTuple):
    """What is shown of a checkpoint."""

    picture: bytes
    """PNG."""
    text: str
    """Markdown: the picture, by its file's name, and the table."""


CardDrawer: TypeAlias = Callable[[Mapping[str, ByteSource], str], DrawnCard]
"""What draws a card. Its arguments are those of `draw_card`."""


def draw_card(contents: Mapping[str, ByteSource], name: str) -> DrawnCard:
    """Draw the card of a checkpoint. What draws it is above all that pushes: `hfshard/__init__.py` hands it down.

    Args:
        contents: Path in the repo -> contents; of weights, only headers are read.
        name: The name of the repo, which the picture shows.

    Raises:
        BrowserError: There is no Chromium, or it failed.
        DamagedCheckpointError: A file is damaged.
    """
    drawer: CardDrawer = from_above("draw_card")
    return drawer(contents, name)


def merge_card(old: bytes | None, text: str, title: str) -> bytes:
    """Replace what is between the markers of a README.md, or insert it with them below the title.

    Args:
        old: The README.md; None: it is created.
        text: The Markdown of a `DrawnCard`.
        title: The heading of a file that is created: a name.

    Returns:
        The new file. Outside of the markers, its bytes are those of the old one.

    Raises:
        InvalidArgumentError: The old file is not UTF-8; or its markers are not one pair, each on a line of its own,
            outside of the metadata and of code.
    """
    if old is None:
        heading = re.sub(r"[^\w./-]", "-", title)
        return f"# {heading}\n\n{BEGIN}\n{text}\n{END}\n".encode()
    try:
        readme = old.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"The {README} is not valid UTF-8, so the card cannot be put into it: {error}. Fix it, or push without "
            "card_picture."
        ) from error
    newline = "\r\n" if "\r\n" in readme else "\n"
    block = newline.join([BEGIN, *text.split("\n"), END])
    lines = readme.splitlines(keepends=True)
    first = _end_of_metadata(lines)
    found = _find_markers(lines, first)
    if found is not None:
        start, end = found
        ending = lines[end][len(lines[end].rstrip("\r\n")) :]
        return "".join([*lines[:start], block, ending, *lines[end + 1 :]]).encode()
    at = next((number for number in range(first, len(lines)) if lines[number].strip()), len(lines))
    at = at + 1 if at < len(lines) and _HEADING.match(lines[at]) else first
    before, after = "".join(lines[:at]), "".join(lines[at:])
    gap = newline if before.endswith(("\n", "\r")) or not before else newline * 2
    return f"{before}{gap if before else ''}{block}{newline}{newline if after.strip() else ''}{after}".encode()


def _find_markers(lines: list[str], first: int) -> tuple[int, int] | None:
    """Find the lines of the markers; None if there are none.

    Raises:
        InvalidArgumentError: They are not exactly one pair that can be replaced.
    """
    text = "".join(lines)
    counts = {marker: text.count(marker) for marker in (BEGIN, END)}
    if not any(counts.values()):
        return None
    begins, ends = ([number for number, line in enumerate(lines) if line.strip() == one] for one in (BEGIN, END))
    if set(counts.values()) != {1} or not begins or not ends:
        _refuse(f"it has {counts[BEGIN]} of '{BEGIN}' and {counts[END]} of '{END}', not one pair on lines of their own")
    if ends[0] < begins[0]:
        _refuse(f"'{END}' is before '{BEGIN}'")
    if begins[0] < first:
        _refuse("they are in the metadata")
    if sum(_FENCE.match(line) is not None for line in lines[first : begins[0]]) % 2:
        _refuse("they are in a block of code")
    return begins[0], ends[0]


def _refuse(why: str) -> None:
    raise InvalidArgumentError(
        f"The markers of the card in the {README} cannot be used: {why}. Nothing was pushed. Edit the file: leave one "
        f"line '{BEGIN}' above one line '{END}', or neither; or push without card_picture."
    )


def _end_of_metadata(lines: list[str]) -> int:
    """Return the number of the first line after the YAML at the top; 0 if there is none."""
    if not lines or lines[0].removeprefix("\ufeff").rstrip() != "---":
        return 0
    return next((number + 1 for number in range(1, len(lines)) if lines[number].rstrip() == "---"), 0)
