"""What a ResumableDataLoader costs for each batch over torch's DataLoader, and until the first one after a resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import islice
from typing import Any

from bench.harness.figures import Data, at_most, runs_of, skipped, spread
from bench.harness.question import SIDE, Context, Job, Peer, Question, SkipPeer, Target
from bench.markdown import markdown_table, paragraphs

COUNTS = (10_000, 1_000_000)
TINY_COUNTS = (4_000, 8_000)
BATCH = 4
"""Samples, which are ints: next to nothing, so that what is measured is the loader."""
WARM_UP, BATCHES = 100, 1_000
RESUMED_AT = 0.9
"""The part of the epoch that is done, so that much is skipped."""
LIMIT_MICROSECONDS = 100
MICRO, MILLI = 1e6, 1e3

Make = Callable[[int], Any]


def peers(context: Context) -> list[Peer]:
    """The lines of the table."""
    found = []
    for count in TINY_COUNTS if context.params == "tiny" else COUNTS:
        base = f"torch {count}"
        lines: list[tuple[str, str, Make, int]] = [
            ("torch", "torch: `DataLoader(shuffle=True)`", _torch, 1),
            ("hfshard", "hfshard: `ResumableDataLoader(shuffle=True)`", _ours, 1),
            ("hfshard sampler", "hfshard: `ResumableDataLoader(sampler=RandomSampler)`", _ours_with_sampler, 1),
            ("torchdata", "torchdata: `StatefulDataLoader(shuffle=True)`", _torchdata, SIDE),
        ]
        found += [
            Peer(f"{key} {count}", f"{title}, {count:,}", _iterating(make, count), every=every, base=base)
            for key, title, make, every in lines
        ]
        found.append(Peer(f"hfshard resumed {count}", f"hfshard, resumed, {count:,}", _resuming(count), base=base))
    return found


class _Numbers:
    """Samples that cost nothing."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def _torch(count: int) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(_Numbers(count), BATCH, shuffle=True)  # type: ignore[arg-type]


def _ours(count: int) -> Any:
    from hfshard.training import ResumableDataLoader

    return ResumableDataLoader(_Numbers(count), BATCH, shuffle=True)  # type: ignore[arg-type]


def _ours_with_sampler(count: int) -> Any:
    from torch.utils.data import RandomSampler

    from hfshard.training import ResumableDataLoader

    return ResumableDataLoader(_Numbers(count), BATCH, sampler=RandomSampler(range(count)))  # type: ignore[arg-type]


def _torchdata(count: int) -> Any:
    try:
        loaders = import_module("torchdata.stateful_dataloader")
    except ImportError as error:
        raise SkipPeer("torchdata is not installed") from error
    return loaders.StatefulDataLoader(_Numbers(count), BATCH, shuffle=True)


def _iterating(make: Make, count: int) -> Callable[[Context], Job]:
    def prepare(context: Context) -> Job:
        loader = make(count)
        for _ in islice(loader, WARM_UP):
            pass
        batches: list[Iterator[Any]] = []

        def first() -> None:
            batches.append(iter(loader))
            next(batches[0])

        def rest() -> None:
            for _ in islice(batches[0], min(BATCHES, count // BATCH - 1)):
                pass

        return Job([("first", first), ("rest", rest)], lambda: {"batches": min(BATCHES, count // BATCH - 1)})

    return prepare


def _resuming(count: int) -> Callable[[Context], Job]:
    def prepare(context: Context) -> Job:
        job = _iterating(_ours, count)(context)  # warms up what is imported late
        loader = _ours(count)
        state = {**loader.state_dict(), "batch": int(count / BATCH * RESUMED_AT)}
        state["indexes_crc32"] = loader.order(0, state["batch"]).checksum

        def resume() -> None:
            loader.load_state_dict(state)
            next(iter(loader))

        return Job([("first", resume)], job.result)

    return prepare


def microseconds(run: Data) -> float:
    """Microseconds that a batch took, after the first."""
    return float((run["seconds"]["rest"] - run["seconds"]["first"]) / run["result"]["batches"] * MICRO)


def _more(data: Data, name: str) -> list[float]:
    """Microseconds a batch over torch's in the same round."""
    bases = {run["round"]: microseconds(run) for run in runs_of(data, data["peers"][name]["base"])}
    return [microseconds(run) - bases[run["round"]] for run in runs_of(data, name) if run["round"] in bases]


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    titles = [
        "samples in the dataset at the end",
        "µs a batch (min–max)",
        "more than torch's",
        "first batch, ms",
        "rounds",
    ]
    rows = []
    for name, peer in data["peers"].items():
        runs = runs_of(data, name)
        first = spread(run["seconds"]["first"] * MILLI for run in runs)
        if first is None:
            continue
        has_rest = "rest" in runs[0]["seconds"]
        each = spread(microseconds(run) for run in runs) if has_rest else None
        more = spread(_more(data, name)) if has_rest and name != peer["base"] else None
        cells = [peer["title"], each.show(1) if each else "", more.show(1) if more else "", first.show(1)]
        rows.append([*cells, str(len(runs))])
    return paragraphs(
        f"Batches of {BATCH} ints, shuffled, `num_workers=0`, {BATCHES:,} of them after the first."
        f" *Resumed*: from `load_state_dict` to the first batch, at {RESUMED_AT:.0%} of an epoch.",
        markdown_table(titles, rows),
        skipped(data),
    )


def targets(data: Data) -> list[Target]:
    """What is aimed at, and what was measured of it."""
    found = []
    for name, peer in data["peers"].items():
        if name.startswith("hfshard") and not name.startswith("hfshard resumed"):
            kind = "with a sampler, " if "sampler" in name else ""
            text = (
                f"loader, {kind}{int(name.split()[-1]):,} samples: < {LIMIT_MICROSECONDS} µs a batch more than torch's"
            )
            more = spread(_more(data, name)) if runs_of(data, peer["base"]) else None
            found.append(Target(text, *at_most(LIMIT_MICROSECONDS, more, digits=1, unit=" µs")))
    return found


QUESTION = Question("loader", "Loader", peers, lambda context: None, lambda context, peer: [], render, targets)
