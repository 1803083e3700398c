"""A chart of requests and bytes on the wire: two bars for each action, one of each client."""

from __future__ import annotations

from typing import Any

from bench.drawing.svg import MARGIN, SMALL, WIDTH, Drawing, Palette, heading
from bench.harness.figures import MEGABYTE

KILOBYTE = 1000
LABELS = {
    "new": "push, new repo",
    "unchanged": "push again, unchanged",
    "load": "from_pretrained, empty cache",
    "load main": "from_pretrained, main in the cache",
    "load commit": "from_pretrained, a commit in the cache",
    "tensor": "push, one tensor changed",
    "size": "push, another shard size",
    "single": "push, a single file",
    "again": "push, 8 shards again",
}
"""Action in hub_requests.json -> what the chart calls it."""
SERVERS = {"xet": "over Xet, as on the Hugging Face Hub", "lfs": "over LFS, to a server without Xet"}
CLIENTS = ("transformers", "hfshard")
ROW, BAR, STEP = 50, 10, 14
"""Pixels from one action to the next, of a bar, and from one client to the next."""
HALF = WIDTH / 2 + 4
"""Where the bytes begin, right of the requests."""
LONGEST = 108
"""Pixels of the longest bar of a half; its figure stands behind it."""


def draw_wire(counts: dict[str, Any], over: str, palette: Palette) -> str:
    """The SVG of what was counted on one kind of server."""
    drawing = Drawing(palette)
    top = heading(drawing, "Requests and bytes on the wire", SERVERS[over] + "; a BERT of 3.8 MB")
    for x, words in ((MARGIN, "requests"), (HALF, "bytes, up and down")):
        drawing.text(x, top + 8, words, size=SMALL, bold=True)
    top += 16
    found = counts["over"][over]
    most = {what: max(_figure(found[who][name], what) for who in CLIENTS for name in LABELS) for what in _SHOWN}
    for name, label in LABELS.items():
        drawing.text(MARGIN, top + 13, label)
        for number, who in enumerate(CLIENTS):
            _draw_counts(drawing, who, name, found[who][name], most, top + 18 + number * STEP)
        top += ROW
    for x, who in ((MARGIN, CLIENTS[0]), (HALF, CLIENTS[1])):
        drawing.rectangle(x, top + 4, BAR, BAR, _colour(palette, who))
        drawing.text(x + BAR + 6, top + 13, who, size=SMALL)
    return drawing.finish(top + 26, f"Requests and bytes on the wire, {SERVERS[over]}", _describe(counts["over"][over]))


def _draw_counts(drawing: Drawing, who: str, name: str, counts: dict[str, int], most: dict[str, int], y: float) -> None:
    drawing.begin(client=who, action=name, requests=counts["requests"], bytes=_figure(counts, "bytes"))
    for x, what in ((MARGIN, "requests"), (HALF, "bytes")):
        figure = _figure(counts, what)
        length = figure / most[what] * LONGEST
        drawing.rectangle(x, y, max(length, 1), BAR, _colour(drawing.palette, who))
        words = str(figure) if what == "requests" else show_bytes(figure)
        drawing.text(x + length + 6, y + BAR, words, size=SMALL, fill=drawing.palette.muted)
    drawing.end()


_SHOWN = ("requests", "bytes")


def _figure(counts: dict[str, int], what: str) -> int:
    return counts["requests"] if what == "requests" else counts["up"] + counts["down"]


def _colour(palette: Palette, who: str) -> str:
    return palette.ours if who == "hfshard" else palette.peers


def show_bytes(number: int) -> str:
    """Write bytes with three digits."""
    if number >= MEGABYTE:
        return f"{number / MEGABYTE:.2f} MB"
    return f"{number / KILOBYTE:.1f} kB" if number >= KILOBYTE else f"{number} B"


def _describe(found: dict[str, dict[str, dict[str, int]]]) -> str:
    lines = (
        f"{label}: "
        + ", ".join(
            f"{who} {found[who][name]['requests']} requests and {show_bytes(_figure(found[who][name], 'bytes'))}"
            for who in CLIENTS
        )
        for name, label in LABELS.items()
    )
    return "; ".join(lines) + "."
