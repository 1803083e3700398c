"""How long it takes to cut a checkpoint into files of twice the size: hfshard against load and save by transformers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.harness.figures import Data, at_most, highest, peak_at_most, peers_in, ratio, skipped, table
from bench.harness.inputs import make_source, shards_of, sized, written
from bench.harness.models import total_bytes
from bench.harness.question import SIDE, Context, Job, Peer, Question, SkipPeer, Target
from bench.machine.limits import copy_files, files_of, random_memory, read_files, write_files
from bench.markdown import paragraphs

BASE, READ, WRITE = "transformers", "read alone", "write alone"
FACTOR = 1.15
PEAK_MIB = 64
BYTES_FACTOR = 1.02


def peers(context: Context) -> list[Peer]:
    """The lines of the tables."""
    found = []
    for state in ("cold", "warm"):

        def line(
            key: str,
            title: str,
            prepare: Callable[[Context], Job],
            every: int = SIDE if state == "warm" else 1,
            state: str = state,
        ) -> Peer:
            limit = f"{READ}/cold + {WRITE}/cold" if state == "cold" and key not in (READ, WRITE) else ""
            return Peer(key, title, prepare, state, every, f"{BASE}/{state}", limit)

        sizes = f"{context.size.shard_size} → {context.size.reshard_size}"
        found += [
            line(BASE, f"transformers: load, save, fsync ({sizes})", with_transformers),
            line("hfshard none", "hfshard, no checksum", lambda context: with_hfshard(context, None)),
            line("hfshard sha256", "hfshard, sha256", lambda context: with_hfshard(context, "sha256")),
        ]
        if state == "cold":
            found += [
                line(READ, "the limit, first part: O_DIRECT reads into the same blocks", read_alone),
                line(WRITE, "the limit, second part: O_DIRECT from memory, flushed", write_alone),
                line("copy", "O_DIRECT copy, read and written side by side, flushed", copy, SIDE),
            ]
    return found


def with_transformers(context: Context) -> Job:
    """Load, save, and flush what was saved: the way without hfshard."""
    import torch
    from transformers import LlamaForCausalLM

    def reshard() -> None:
        model = LlamaForCausalLM.from_pretrained(context.source, dtype=torch.bfloat16)
        model.save_pretrained(context.target, max_shard_size=context.size.reshard_size)
        for path in [*context.target.iterdir(), context.target]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    return Job([("reshard", reshard)], lambda: written(context))


def with_hfshard(context: Context, checksum: Any) -> Job:
    """`hfshard.reshard_checkpoint`."""
    import hfshard

    if "reshard_checkpoint" not in hfshard.__all__:
        raise SkipPeer("this hfshard has no reshard_checkpoint")
    hfshard.reshard_checkpoint  # noqa: B018  imported before the clock starts
    size = context.size.reshard_size

    def reshard() -> None:
        hfshard.reshard_checkpoint(context.source, context.target, max_shard_size=size, checksum=checksum)

    return Job([("reshard", reshard)], lambda: written(context))


def read_alone(context: Context) -> Job:
    """Read every byte of the shards."""
    sources = sized(shards_of(context.source))
    return Job([("reshard", lambda: read_files(None, sources))])


def write_alone(context: Context) -> Job:
    """Write as many bytes from memory into files of the new size."""
    files = _new_files(context)
    memory = random_memory(files)
    return Job([("reshard", lambda: write_files(memory, files))], lambda: written(context))


def copy(context: Context) -> Job:
    """Read as many bytes from the shards and write them into files of the new size."""
    files = _new_files(context)
    sources = sized(shards_of(context.source))
    return Job([("reshard", lambda: copy_files(sources, files))], lambda: written(context))


def _new_files(context: Context) -> list[tuple[Path, int]]:
    from hfshard._util.text import parse_size

    return files_of(context.target, total_bytes(context.specs), parse_size(context.size.reshard_size))


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    parts = [
        "Into a new directory each time; every line that writes flushes its files and the directory. The limit is the"
        " sum of reading alone and writing alone, in the same round."
    ]
    for state in [state for state in ("cold", "warm") if peers_in(data, state)]:
        parts += [f"### Re-shard, {state}", table(data, peers_in(data, state), [("reshard", "")])]
    return paragraphs(*parts, skipped(data))


def targets(data: Data) -> list[Target]:
    """What is aimed at, and what was measured of it."""
    found = []
    for what in ("none", "sha256"):
        both = ratio(data, f"hfshard {what}/cold", f"{READ}/cold + {WRITE}/cold")
        text = f"re-shard, cold, {what}: time ≤ {FACTOR} × (O_DIRECT read alone + flushed O_DIRECT write alone)"
        found.append(Target(text, *at_most(FACTOR, both)))
    ours = [name for name in data["peers"] if name.startswith("hfshard")]
    found.append(Target(f"re-shard: peak memory ≤ {PEAK_MIB} MiB more", *peak_at_most(PEAK_MIB, data, ours)))
    for field in ("read", "written"):
        names = [name for name in ours if field == "written" or name.endswith("/cold")]
        most = highest(data, names, field)
        factor = most / data["bytes"] if most is not None else None
        found.append(Target(f"re-shard: bytes {field} ≤ size × {BYTES_FACTOR}", *at_most(BYTES_FACTOR, factor, 3)))
    return found


QUESTION = Question(
    "reshard",
    "Re-shard",
    peers,
    make_source,
    lambda context, peer: shards_of(context.source),
    render,
    targets,
    held=2.0,
)
