#!/usr/bin/env python3
"""Draw charts/*.svg from results.json, hub_requests.json and resume.json; `--check`: say which are not drawn so."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # `bench` is a package of scripts/
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.harness.figures import GIGABYTE, MEGABYTE, Data, Spread, ratio, runs_of, seconds, spread
from bench.resumes.cases import CASES, WAYS
from bench.svg import MARGIN, PALETTES, SMALL, WIDTH, Drawing, Palette, heading

HERE = Path(__file__).resolve().parent
DIRECTORY = HERE / "charts"


def main(arguments: list[str]) -> int:
    """Write the charts; or compare them with what would be written: 1 where one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a chart is not up to date")
    drawn = draw_all()
    if not parser.parse_args(arguments).check:
        DIRECTORY.mkdir(exist_ok=True)
        for name, text in drawn.items():
            (DIRECTORY / name).write_text(text, encoding="utf-8")
        return 0
    there = {path.name: path.read_text(encoding="utf-8") for path in DIRECTORY.iterdir()}
    different = sorted(name for name in there.keys() | drawn.keys() if there.get(name) != drawn.get(name))
    for name in different:
        print(f"{DIRECTORY / name} is not what is drawn now: python scripts/bench/charts.py", file=sys.stderr)
    return 1 if different else 0


def draw_all() -> dict[str, str]:
    """File name -> SVG."""
    results, counts, resumes = (_read(name) for name in ("results", "hub_requests", "resume"))
    drawn: dict[str, str] = {}
    for palette in PALETTES:
        charts = {name: draw_ratios(chart, results[chart.question], palette) for name, chart in CHARTS.items()}
        charts |= {f"wire-{over}": draw_wire(counts, over, palette) for over in SERVERS}
        charts["resumes"] = draw_grid(resumes, palette)
        drawn |= {f"{name}-{palette.name}.svg": text for name, text in charts.items()}
    return drawn


def _read(name: str) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))
    return figures


BAR = 10
"""Pixels, the height of a bar."""
PEER = 34
"""Pixels from one peer to the next."""
CAP = 3
"""Half the height of the end of a whisker."""
AXIS = 34
"""Pixels below the bars: the scale and what stands under it."""


@dataclass(frozen=True)
class Chart:
    """The part of one question that a chart shows."""

    question: str
    title: str
    """{size} is that of the model."""
    limit: str
    """The limit, in words."""
    phase: str
    peers: dict[str, str]
    """Peer in results.json -> what the chart calls it."""


SAVE = Chart(
    "save",
    "Save {size}",
    "the limit: a flushed O_DIRECT write, or sha256",
    "save",
    {
        "transformers": "transformers, not flushed to the disk",
        "transformers fsync": "transformers, then fsync",
        "hfshard sha256": "hfshard, sha256",
        "hfshard xxh3": "hfshard, xxh3",
        "hfshard none": "hfshard, no checksum",
        "huggingface_hub": "huggingface_hub, not flushed",
        "safetensors": "safetensors, not flushed",
        "torch.save": "torch.save, not flushed",
        "torch DCP": "torch DCP",
    },
)
LOAD = Chart(
    "load",
    "Load {size} from disk",
    "to every byte read; the limit: an O_DIRECT read",
    "read",
    {
        "transformers/cold": "transformers",
        "hfshard/cold": "hfshard",
        "hfshard full/cold": "hfshard, every byte by its sha256",
        "hfshard pread/cold": "hfshard, read into memory",
        "safetensors/cold": "safetensors",
        "torch.load/cold": "torch.load(mmap=True)",
        "torch DCP/cold": "torch DCP, safetensors",
        "torch DCP files/cold": "torch DCP, its own files",
        "fastsafetensors/cold": "fastsafetensors, on the CPU",
        "runai/cold": "runai-model-streamer",
        "instanttensor/cold": "instanttensor",
    },
)
RESHARD = Chart(
    "reshard",
    "Re-shard {size}: files of twice the size",
    "the limit: O_DIRECT read, then flushed write",
    "reshard",
    {
        "transformers/cold": "transformers: load, save, fsync",
        "hfshard none/cold": "hfshard, no checksum",
        "hfshard sha256/cold": "hfshard, sha256",
    },
)
CHARTS = {"save": SAVE, "load": LOAD, "reshard": RESHARD}


@dataclass(frozen=True)
class Bar:
    """One peer: its time, and the ratio to the limit of the same rounds."""

    peer: str
    label: str
    seconds: float
    ratio: Spread
    rounds: int

    @property
    def is_ours(self) -> bool:
        """Return whether it is hfshard."""
        return self.peer.startswith("hfshard")


def bars_of(chart: Chart, data: Data) -> list[Bar]:
    """The peers that were measured, the fastest first."""
    bars = []
    for peer, label in chart.peers.items():
        runs = runs_of(data, peer)
        taken = spread(seconds(run, chart.phase) for run in runs)
        to_limit = ratio(data, peer, data["peers"][peer]["limit"], chart.phase) if runs else None
        if taken and to_limit:
            bars.append(Bar(peer, label, taken.median, to_limit, len(runs)))
    return sorted(bars, key=lambda bar: bar.ratio.median)


def draw_ratios(chart: Chart, data: Data, palette: Palette) -> str:
    """The SVG of a chart."""
    bars = bars_of(chart, data)
    title = chart.title.format(size=f"{data['bytes'] / GIGABYTE:.2f} GB")
    drawing = Drawing(palette)
    top = heading(drawing, title, "time as a multiple of the limit of this machine:", chart.limit)
    most = math.ceil(max(bar.ratio.highest for bar in bars))
    scale = (WIDTH - 2 * MARGIN) / most
    for number, bar in enumerate(bars):
        _draw_bar(drawing, bar, top + number * PEER, scale)
    bottom = top + len(bars) * PEER
    _draw_scale(drawing, bottom, scale, most)
    fewest, many = min(bar.rounds for bar in bars), max(bar.rounds for bar in bars)
    rounds = f"{many}" if fewest == many else f"{fewest} or {many}"
    drawing.text(
        MARGIN, bottom + AXIS, f"medians of {rounds} rounds, lowest to highest", size=SMALL, fill=palette.muted
    )
    return drawing.finish(bottom + AXIS + MARGIN, f"{title}: time as a multiple of the limit", _describe_ratios(bars))


def _draw_bar(drawing: Drawing, bar: Bar, top: float, scale: float) -> None:
    palette, found = drawing.palette, bar.ratio
    drawing.begin(peer=bar.peer, seconds=bar.seconds, ratio=found.median, lowest=found.lowest, highest=found.highest)
    drawing.text(MARGIN, top + 14, bar.label, bold=bar.is_ours)
    drawing.text(
        WIDTH - MARGIN, top + 14, f"{found.median:.2f} ×  ·  {bar.seconds:.2f} s", anchor="end", fill=palette.muted
    )
    start, middle = top + 19, top + 19 + BAR / 2
    drawing.rectangle(MARGIN, start, found.median * scale, BAR, palette.ours if bar.is_ours else palette.peers)
    low, high = MARGIN + found.lowest * scale, MARGIN + found.highest * scale
    drawing.line(low, middle, high, middle, palette.text)
    for end in (low, high):
        drawing.line(end, middle - CAP, end, middle + CAP, palette.text)
    drawing.line(MARGIN + scale, start - 2, MARGIN + scale, start + BAR + 2, palette.limit, 2)
    drawing.end()


def _draw_scale(drawing: Drawing, y: float, scale: float, most: int) -> None:
    drawing.line(MARGIN, y + 4, MARGIN + scale * most, y + 4, drawing.palette.line, 1)
    for number in range(most + 1):
        anchor = "" if number == 0 else "end" if number == most else "middle"
        fill = drawing.palette.limit if number == 1 else drawing.palette.muted
        words = {0: "0", 1: "the limit"}.get(number, f"{number} ×")
        drawing.text(MARGIN + number * scale, y + 17, words, size=SMALL, anchor=anchor, fill=fill)


def _describe_ratios(bars: list[Bar]) -> str:
    found = (
        f"{bar.label}: {bar.ratio.show()} times the limit, {bar.seconds:.2f} seconds over {bar.rounds} rounds"
        for bar in bars
    )
    return "; ".join(found) + "."


KILOBYTE = 1000
ACTIONS = {
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
ACTION, STEP = 50, 14
"""Pixels from one action to the next, and from one client to the next."""
HALF = WIDTH / 2 + 4
"""Left edge of the bytes, right of the requests."""
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
    most = {what: max(_figure(found[who][name], what) for who in CLIENTS for name in ACTIONS) for what in _SHOWN}
    for name, label in ACTIONS.items():
        drawing.text(MARGIN, top + 13, label)
        for number, who in enumerate(CLIENTS):
            _draw_counts(drawing, who, name, found[who][name], most, top + 18 + number * STEP)
        top += ACTION
    for x, who in ((MARGIN, CLIENTS[0]), (HALF, CLIENTS[1])):
        drawing.rectangle(x, top + 4, BAR, BAR, _colour(palette, who))
        drawing.text(x + BAR + 6, top + 13, who, size=SMALL)
    return drawing.finish(
        top + 26, f"Requests and bytes on the wire, {SERVERS[over]}", _describe_wire(counts["over"][over])
    )


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


def _describe_wire(found: dict[str, dict[str, dict[str, int]]]) -> str:
    lines = (
        f"{label}: "
        + ", ".join(
            f"{who} {found[who][name]['requests']} requests and {show_bytes(_figure(found[who][name], 'bytes'))}"
            for who in CLIENTS
        )
        for name, label in ACTIONS.items()
    )
    return "; ".join(lines) + "."


LABELS = {
    "augmentation": "augmentation by three random generators",
    "reordered": "parameters in another order afterwards",
    "user-schedule": "a scheduler that holds its own method",
    "full-disk": "a full disk, one checkpoint kept",
}
"""Cases whose title in RESUME.md is too long for the chart."""
HALVES = {
    "without hfshard": ("torch.save", "Trainer", "Accelerate"),
    "with hfshard": ("alone", "Trainer", "Accelerate"),
}
"""Headings of the columns, which are the ways in their order."""
WORDS = {
    "exact": ("good", "exact"),
    "resumes": ("good", "resumes"),
    "weights exact": ("silent", "RNGs ≠"),
    "differs": ("silent", "differs"),
    "silently wrong": ("silent", "wrong"),
    "error": ("loud", "error"),
    "crash": ("loud", "crash"),
    "–": ("none", "–"),
}
"""Beginning of a cell's outcome -> its look and its word."""
LEGEND = (
    ("good", "bit for bit; of damaged ones, the one before"),
    ("silent", "goes on with another result, silently"),
    ("loud", "refuses, or ends by an exception"),
)
GAP, CELL, CASE = 4, 18, 42
COLUMN = (WIDTH - 2 * MARGIN + GAP) / len(WAYS)


def draw_grid(results: dict[str, Any], palette: Palette) -> str:
    """The SVG of all resumes."""
    drawing = Drawing(palette)
    top = heading(drawing, "Which resumes are exact", "trainings, killed and resumed in a new process")
    heads = [(half, words) for half, columns in HALVES.items() for words in columns]
    for number, (half, words) in enumerate(heads):
        left = MARGIN + number * COLUMN
        if words == HALVES[half][0]:
            drawing.text(left, top + 12, half, size=SMALL, bold=True)
        drawing.text(left + (COLUMN - GAP) / 2, top + 28, words, size=SMALL, anchor="middle", fill=palette.muted)
    top += 34
    for name, case in CASES.items():
        drawing.text(MARGIN, top + 14, LABELS.get(name, case.title))
        for number, way in enumerate(WAYS):
            _draw_cell(drawing, name, way, results["cells"][name][way][0], MARGIN + number * COLUMN, top + 19)
        top += CASE
    for look, words in LEGEND:
        top += 18
        drawing.rectangle(MARGIN, top - 10, 12, 12, getattr(palette, look)[0])
        drawing.text(MARGIN + 19, top, words, size=SMALL)
    return drawing.finish(top + MARGIN, "Which resumes are exact", _describe_grid(results["cells"]))


def look_of(outcome: str) -> tuple[str, str]:
    """Find the look of a cell, and its word.

    Raises:
        KeyError: The outcome is none that is known.
    """
    for beginning, look in WORDS.items():
        if outcome.startswith(beginning):
            return look
    raise KeyError(outcome)


def _draw_cell(drawing: Drawing, case: str, way: str, outcome: str, x: float, y: float) -> None:
    look, word = look_of(outcome)
    fill, text = getattr(drawing.palette, look) if look != "none" else (drawing.palette.page, drawing.palette.muted)
    drawing.begin(case=case, way=way, outcome=outcome)
    drawing.rectangle(round(x, 1), y, COLUMN - GAP, CELL, fill, note=f"{way}: {outcome}")
    drawing.text(round(x + (COLUMN - GAP) / 2, 1), y + 13, word, size=SMALL, anchor="middle", fill=text)
    drawing.end()


def _describe_grid(cells: dict[str, dict[str, list[str]]]) -> str:
    lines = (
        f"{case.title}: " + ", ".join(f"{way} {cells[name][way][0]}" for way in WAYS) for name, case in CASES.items()
    )
    return "; ".join(lines) + "."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
