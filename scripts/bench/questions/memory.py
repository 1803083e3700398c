"""What memory a save and a load of the 3b model take, beyond it and in all; with smaller --params, of that model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.harness.figures import GIB, GIGABYTE, Data, at_most, peak_at_most, skipped, table
from bench.harness.inputs import make_source, shards_of
from bench.harness.question import Context, Job, Peer, Question, Target
from bench.markdown import paragraphs
from bench.questions import load, save

PEAK_MIB = 64
MOST_GIB = 24
LARGE = "3b"
LARGE_FROM = "1b"
"""Whoever measures with this size has room for the large one."""


def peers(context: Context) -> list[Peer]:
    """The lines of the table."""

    def line(key: str, title: str, prepare: Callable[[Context], Job], state: str = "") -> Peer:
        return Peer(key, title, lambda context: _with_total(prepare(context)), state)

    return [
        line("hfshard save", "hfshard: save, sha256", lambda context: save.with_hfshard(context, "sha256")),
        line("hfshard strided", "hfshard: save of transposed views, no checksum", save.strided),
        line("hfshard flat", "hfshard: save of views of one buffer, no checksum", save.flat),
        line("transformers save", "transformers: save", save.with_transformers),
        line("hfshard load", "hfshard: load, cold", lambda context: load.with_hfshard(context), "cold"),
        line("transformers load", "transformers: load, cold", load.with_transformers, "cold"),
    ]


def _with_total(job: Job) -> Job:
    def result() -> dict[str, Any]:
        found = job.result()
        found.pop("sum", None)
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                found["most"] = int(line.split()[1]) * 1024
        return found

    return replace(job, result=result)


@contextmanager
def around(context: Context) -> Iterator[Context]:
    """Give it another model in a directory of its own, which is removed at once."""
    directory = context.directory / "memory"
    directory.mkdir()
    try:
        params = LARGE if context.params == LARGE_FROM else context.params
        yield replace(context, directory=directory, params=params)
    finally:
        shutil.rmtree(directory)


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    most = [
        f"{peer['title']} {max(run['result']['most'] for run in peer['runs']) / GIB:.1f} GiB"
        for peer in data["peers"].values()
        if peer["runs"]
    ]
    return paragraphs(
        f"A model of {data['bytes'] / GIGABYTE:.2f} GB. *Peak*: anonymous memory beyond that at the start, which for a"
        " save holds the model.",
        table(data, list(data["peers"]), [("", "")]),
        f"The most resident memory in all, pages of mapped files included (VmHWM): {', '.join(most)}.",
        skipped(data),
    )


def targets(data: Data) -> list[Target]:
    """What is aimed at, and what was measured of it."""
    ours = [name for name in data["peers"] if name.startswith("hfshard")]
    runs = [run for name in ours for run in data["peers"][name]["runs"]]
    most = max((run["result"]["most"] for run in runs), default=None)
    found = []
    for what, names in (("save", [name for name in ours if "load" not in name]), ("load", ["hfshard load/cold"])):
        text = f"{what} of the {data['params']} model: peak memory ≤ {PEAK_MIB} MiB more"
        found.append(Target(text, *peak_at_most(PEAK_MIB, data, names)))
    in_all = at_most(MOST_GIB, most / GIB if most is not None else None, 1, " GiB")
    found.append(Target(f"save and load of the {data['params']} model: in {MOST_GIB} GiB", *in_all))
    return found


QUESTION = Question(
    "memory",
    "Memory of a large model",
    peers,
    make_source,
    lambda context, peer: shards_of(context.source) if peer.state else [],
    render,
    targets,
    max_rounds=1,
    around=around,
)
