"""What memory it takes to save, load, verify and re-shard the 3b model; with smaller --params, that model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.harness.figures import GIB, GIGABYTE, Data, peak_at_most, skipped, table
from bench.harness.inputs import make_source, shards_of
from bench.harness.question import Context, Job, Peer, Question, Target
from bench.markdown import paragraphs
from bench.questions import reshard, save, verify
from bench.readers import models as load

PEAK_MIB = 64
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
        line("hfshard load", "hfshard: load, cold", load.with_hfshard, "cold"),
        line("hfshard load full", 'hfshard: load, `verify="full"`, cold', _load_and_check, "cold"),
        line("transformers load", "transformers: load, cold", load.with_transformers, "cold"),
        line("hfshard verify", "hfshard: verify, cold", lambda context: verify.with_hfshard(context, "sha256"), "cold"),
        line("hfshard reshard", "hfshard: re-shard, cold", lambda context: reshard.with_hfshard(context, None), "cold"),
    ]


def _load_and_check(context: Context) -> Job:
    return load.with_hfshard(context, verify="full")


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
    kinds = {"save": ("save", "strided", "flat"), "load": ("load", "load full"), "verify": ("verify",)}
    found = []
    for what, ends in {**kinds, "re-shard": ("reshard",)}.items():
        names = [name for name in data["peers"] if name.split("/")[0] in [f"hfshard {end}" for end in ends]]
        text = f"{what} of the {data['params']} model: peak memory ≤ {PEAK_MIB} MiB more"
        found.append(Target(text, *peak_at_most(PEAK_MIB, data, names)))
    return found


QUESTION = Question(
    "memory",
    "Memory of a large model",
    peers,
    make_source,
    lambda context, peer: shards_of(context.source) if peer.state else [],
    render,
    targets,
    side_by_side=1,  # each holds a large model
    max_rounds=1,
    around=around,
)
