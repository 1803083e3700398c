"""What it costs four ranks to save a model of which each has a quarter: time, memory, bytes written and sent."""

from __future__ import annotations

import statistics

from bench.harness.figures import MEGABYTE, Data, Spread, at_most, ratio, runs_of, seconds, skipped, spread
from bench.harness.inputs import make_source
from bench.harness.question import Context, Job, Peer, Question, Target
from bench.many_ranks.one_rank import RANKS
from bench.many_ranks.processes import Ranks
from bench.markdown import markdown_table, paragraphs

BASE, DCP = "transformers", "torch DCP"
OURS = ("hfshard sha256", "hfshard none")
FACTORS = {"hfshard sha256": (0.35, 1.0), "hfshard none": (0.2, 0.6)}
"""Peer -> times that are aimed at: of transformers' gather, and of DCP."""


def peers(context: Context) -> list[Peer]:
    """The lines of the table."""

    def line(key: str, title: str) -> Peer:
        def prepare(context: Context) -> Job:
            ranks = Ranks(context, key)
            return Job([("save", ranks.save)], ranks.result)

        return Peer(key, title, prepare, base=BASE)

    return [
        line(BASE, "transformers `save_pretrained`: gathers on rank 0 (flushed after it)"),
        line(DCP, "torch DCP, `HuggingFaceStorageWriter`, and consolidated on every rank (flushed after it)"),
        line("hfshard sha256", "hfshard, sha256"),
        line("hfshard none", "hfshard, no checksum"),
    ]


def figure(data: Data, name: str, field: str, *, of_all: bool = False) -> list[float]:
    """Of each run, the highest figure of any rank, or the sum of all, as a share of the model."""
    gather = sum if of_all else max
    return [gather(run["result"][field]) / data["bytes"] for run in runs_of(data, name)]


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    titles = [
        "",
        "s (min–max)",
        "× transformers",
        "× DCP",
        "peak MB of a rank",
        "MB written by a rank",
        "by all",
        "sent",
    ]
    return paragraphs(
        f"{data['bytes'] / MEGABYTE:.0f} MB under FSDP2 on {RANKS} ranks of this machine (gloo), loaded by"
        " `from_pretrained(..., distributed_config=DistributedConfig(fsdp_size=4))`; each rank is a fresh process."
        " Time, after the modules that a save needs are imported, is that of all ranks until every file is flushed:"
        " where a library doesn't, by `sync`, which counts. Peak:"
        " VmHWM beyond what was resident before, of the rank that needs most. Written: `write_bytes`. Sent: bytes of"
        " tensors from rank to rank, counted by the exchange itself.",
        markdown_table(titles, [_row(data, name) for name in data["peers"] if runs_of(data, name)]),
        skipped(data),
    )


def _row(data: Data, name: str) -> list[str]:
    def megabytes(field: str, *, of_all: bool = False) -> str:
        values = figure(data, name, field, of_all=of_all)
        return f"{statistics.median(values) * data['bytes'] / MEGABYTE:.0f}"

    return [
        data["peers"][name]["title"],
        _show(spread(seconds(run) for run in runs_of(data, name))),
        _show(ratio(data, name, BASE)) if name != BASE else "",
        _show(ratio(data, name, DCP)) if name != DCP else "",
        megabytes("peak"),
        megabytes("written"),
        megabytes("written", of_all=True),
        megabytes("sent", of_all=True) if name in OURS else "",
    ]


def _show(found: Spread | None) -> str:
    return found.show() if found else ""


def targets(data: Data) -> list[Target]:
    """What is aimed at, and what was measured of it."""

    def cost(text: str, limit: float, field: str, *, of_all: bool = False, unit: float = 1.0) -> Target:
        values = [value / unit for name in OURS for value in figure(data, name, field, of_all=of_all)]
        return Target(f"save on {RANKS} ranks: {text}", *at_most(limit, max(values, default=None)))

    def time(name: str, base: str, title: str, factor: float) -> Target:
        text = f"save on {RANKS} ranks, {name.removeprefix('hfshard ')}: time ≤ {factor} × {title}"
        return Target(text, *at_most(factor, ratio(data, name, base)))

    found = [
        cost("peak memory of a rank ≤ 0.15 × the model", 0.15, "peak"),
        cost("written by a rank ≤ 1.3 × a quarter", 1.3, "written", unit=1 / RANKS),
        cost("written by all ≤ 1.1 × the model", 1.1, "written", of_all=True),
        cost("sent ≤ 1 × the model", 1.0, "sent", of_all=True),
    ]
    for name, (of_gather, of_dcp) in FACTORS.items():
        found += [time(name, BASE, "transformers' gather", of_gather), time(name, DCP, "DCP", of_dcp)]
    return found


def make_inputs(context: Context) -> None:
    """The checkpoint from which the ranks load their parts."""
    make_source(context)


QUESTION: Question = Question(
    "distributed", "Save on many ranks", peers, make_inputs, lambda *_: [], render, targets, side_by_side=1
)
