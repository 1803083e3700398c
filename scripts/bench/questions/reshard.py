"""Time to cut a checkpoint into files of twice the size: hfshard against load and save by transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from bench.harness.figures import (
    STATES,
    Data,
    Target,
    at_most,
    ours_in,
    paragraphs,
    peak_at_most,
    ratio,
    runs_of,
    tables_by_state,
)
from bench.harness.inputs import make_source, read_limit, source_shards, write_limit, written
from bench.harness.question import SIDE, Context, Job, Peer, Question
from bench.machine.limits import sync_files

BASE, READ, WRITE = "transformers", "read alone", "write alone"
BOTH = f"{READ}/cold + {WRITE}/cold"
FACTOR = 1.15
PEAK_MIB = 64
BYTES_FACTOR = 1.02


def peers(context: Context) -> list[Peer]:
    """The lines of the tables."""

    def line(key: str, title: str, prepare: Callable[[Context], Job], state: str) -> Peer:
        every = SIDE if state == "warm" else 1
        limit = BOTH if state == "cold" and key not in (READ, WRITE) else ""
        return Peer(key, title, prepare, state, every, f"{BASE}/{state}", limit)

    old, new = context.size.shard_size, context.size.reshard_size
    found = []
    for state in STATES:
        found += [
            line(BASE, f"transformers: load, save, fsync ({old} → {new})", _by_transformers, state),
            line("hfshard none", "hfshard, no checksum", partial(_by_hfshard, checksum=None), state),
            line("hfshard sha256", "hfshard, sha256", partial(_by_hfshard, checksum="sha256"), state),
        ]
        if state == "cold":
            reads = "the limit, first part: O_DIRECT reads into the same blocks"
            writes = "the limit, second part: O_DIRECT from memory, flushed"
            found += [
                line(READ, reads, lambda context: read_limit("reshard", source_shards(context)), state),
                line(WRITE, writes, lambda context: write_limit(context, "reshard", new), state),
            ]
    return found


def _by_transformers(context: Context) -> Job:
    """Load, save, and flush the files: the way without hfshard."""
    import torch
    from transformers import LlamaForCausalLM

    def reshard() -> None:
        model = LlamaForCausalLM.from_pretrained(context.source, dtype=torch.bfloat16)
        model.save_pretrained(context.target, max_shard_size=context.size.reshard_size)
        sync_files(context.target)

    return Job([("reshard", reshard)], lambda: written(context))


def _by_hfshard(context: Context, checksum: Any) -> Job:
    """`hfshard.reshard_checkpoint`."""
    import hfshard

    reshard = hfshard.reshard_checkpoint
    options: dict[str, Any] = {"max_shard_size": context.size.reshard_size, "checksum": checksum}
    return Job([("reshard", lambda: reshard(context.source, context.target, **options))], lambda: written(context))


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    return paragraphs(
        "Into a new directory each time; every line that writes flushes its files and the directory. The limit is the"
        " sum of reading alone and writing alone, in the same round.",
        tables_by_state(data, "Re-shard", "reshard"),
    )


def targets(data: Data) -> list[Target]:
    """The aims, and what was measured of them."""
    limit = "(O_DIRECT read alone + flushed O_DIRECT write alone)"
    ours = ours_in(data)
    found = [
        at_most(f"re-shard, cold, {what}: time", FACTOR, ratio(data, f"hfshard {what}/cold", BOTH), limit)
        for what in ("none", "sha256")
    ]
    found.append(peak_at_most("re-shard", PEAK_MIB, data, ours))
    for field, names in (("read", [name for name in ours if name.endswith("/cold")]), ("written", ours)):
        factors = [run[field] / data["bytes"] for name in names for run in runs_of(data, name)]
        text = f"re-shard: bytes {field} ≤ size × {BYTES_FACTOR}"
        found.append(at_most(text, BYTES_FACTOR, max(factors, default=None), digits=3))
    return found


QUESTION = Question(
    name="reshard",
    title="Re-shard",
    peers=peers,
    make_inputs=make_source,
    files=source_shards,
    render=render,
    targets=targets,
    held=2.0,
)
