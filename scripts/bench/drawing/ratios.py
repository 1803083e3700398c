"""A chart of times as multiples of the limit of the machine: a bar for each peer, whiskers, and the limit as a line."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.drawing.svg import MARGIN, SMALL, WIDTH, Drawing, Palette, heading
from bench.harness.figures import GIGABYTE, Data, Spread, ratio, runs_of, seconds, spread

ROW, BAR = 34, 10
"""Pixels from one peer to the next, and of its bar."""
CAP = 3
"""Half the height of the end of a whisker."""
AXIS = 34
"""Pixels below the bars: the scale and what stands under it."""


@dataclass(frozen=True)
class Chart:
    """What a chart shows of one question."""

    question: str
    title: str
    """{size} is that of the model."""
    limit: str
    """What the limit is, in words."""
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
        """Whether it is hfshard."""
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
        _draw_bar(drawing, bar, top + number * ROW, scale)
    bottom = top + len(bars) * ROW
    _draw_scale(drawing, bottom, scale, most)
    fewest, many = min(bar.rounds for bar in bars), max(bar.rounds for bar in bars)
    rounds = f"{many}" if fewest == many else f"{fewest} or {many}"
    drawing.text(
        MARGIN, bottom + AXIS, f"medians of {rounds} rounds, lowest to highest", size=SMALL, fill=palette.muted
    )
    return drawing.finish(bottom + AXIS + MARGIN, f"{title}: time as a multiple of the limit", _describe(bars))


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


def _describe(bars: list[Bar]) -> str:
    found = (
        f"{bar.label}: {bar.ratio.show()} times the limit, {bar.seconds:.2f} seconds over {bar.rounds} rounds"
        for bar in bars
    )
    return "; ".join(found) + "."
