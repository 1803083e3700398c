"""How long a save of 90 MB takes, as most models are: there a flush costs more than the bytes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.harness.figures import MEGABYTE, Data, at_most, ratio, skipped, table
from bench.harness.inputs import make_specs, written
from bench.harness.models import make_model, total_bytes
from bench.harness.question import Context, Job, Peer, Question, Target
from bench.machine.limits import anonymous, hashing, sync_files, write_files
from bench.markdown import paragraphs

SIZE = "45m"
FIVE_FILES = "20MB"
BASE, SYNCED, WRITE, HASH = "transformers", "transformers fsync", "write", "hash"
OURS = ("hfshard sha256", "hfshard xxh3", "hfshard none")


def peers(context: Context) -> list[Peer]:
    """The lines of the table."""

    def line(key: str, title: str, prepare: Callable[[Context], Job], base: str = SYNCED) -> Peer:
        limit = f"{WRITE} | {HASH}" if "sha256" in key else WRITE
        return Peer(key, title, prepare, base=base, limit=limit)

    return [
        line(BASE, "transformers `save_pretrained` (not flushed, not hashed)", with_transformers),
        line(SYNCED, "the same, then fsync of its files and the directory", with_fsync),
        line("hfshard sha256", "hfshard, sha256", lambda context: with_hfshard(context, "sha256")),
        line("hfshard xxh3", "hfshard, xxh3", lambda context: with_hfshard(context, "xxh3")),
        line("hfshard none", "hfshard, no checksum", lambda context: with_hfshard(context, None)),
        line("hfshard over sha256", "hfshard, sha256, over an older checkpoint", over_an_older_one),
        line("transformers five", f"transformers, then fsync, files of {FIVE_FILES}", with_five_and_fsync, SYNCED),
        line("hfshard five sha256", f"hfshard, sha256, files of {FIVE_FILES}", in_five, "transformers five"),
        line(WRITE, "the limit: O_DIRECT from memory, flushed", write_alone),
        line(HASH, "sha256 of as many bytes in memory, one thread", hash_alone),
    ]


@contextmanager
def around(context: Context) -> Iterator[Context]:
    """Give it the small model, in a directory of its own."""
    directory = context.directory / "small"
    directory.mkdir()
    try:
        yield replace(context, directory=directory, params="tiny" if context.params == "tiny" else SIZE)
    finally:
        shutil.rmtree(directory)


def with_transformers(context: Context, *, shard_size: str = "", fsync: bool = False) -> Job:
    """`save_pretrained`, and the flush that it leaves out if asked for."""
    model = make_model(context.size, context.specs)
    shard_size = shard_size or context.size.shard_size

    def save(directory: Path) -> None:
        model.save_pretrained(directory, max_shard_size=shard_size)
        if fsync:
            sync_files(directory)

    return _second_save(context, save)


def with_fsync(context: Context) -> Job:
    """What it takes transformers until the bytes are on the disk."""
    return with_transformers(context, fsync=True)


def with_five_and_fsync(context: Context) -> Job:
    """The same in five files."""
    return with_transformers(context, shard_size=FIVE_FILES, fsync=True)


def with_hfshard(context: Context, checksum: Any, *, shard_size: str = "", is_over: bool = False) -> Job:
    """`hfshard.save_model` of the same model."""
    import hfshard

    import_module("hfshard.models.collect")
    model = make_model(context.size, context.specs)
    shard_size = shard_size or context.size.shard_size

    def save(directory: Path) -> None:
        hfshard.save_model(model, directory, max_shard_size=shard_size, checksum=checksum)

    if is_over:
        save(context.target / "saved")
    return _second_save(context, save)


def over_an_older_one(context: Context) -> Job:
    """Into a directory that holds a checkpoint, which is replaced as a whole."""
    return with_hfshard(context, "sha256", is_over=True)


def in_five(context: Context) -> Job:
    """In five files, which several threads hash and write."""
    return with_hfshard(context, "sha256", shard_size=FIVE_FILES)


def _second_save(context: Context, save: Callable[[Path], None]) -> Job:
    """The second save of a process: the first one imports, which is not what is asked here."""
    first = context.target / "first"
    save(first)
    shutil.rmtree(first)
    return Job([("save", lambda: save(context.target / "saved"))], lambda: written(context))


def write_alone(context: Context) -> Job:
    """Write as many bytes into one file."""
    total = total_bytes(context.specs)
    memory = anonymous(total)
    memory.write(os.urandom(total))
    return Job([("save", lambda: write_files(memory, [(context.target / "file", total)]))], lambda: written(context))


def hash_alone(context: Context) -> Job:
    """Hash as many bytes: one file's sha256 is the work of one thread."""
    return Job([("save", hashing(total_bytes(context.specs), threads=1))])


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    return paragraphs(
        f"A Llama of {data['bytes'] / MEGABYTE:.1f} MB in one file. The second save of a process, into a new directory"
        " unless a line says otherwise. hfshard flushes every file and directory. One file is hashed by one thread, so"
        " that sha256 of one takes as long as the last line at least.",
        table(data, list(data["peers"]), [("save", "")], "transformers with fsync", digits=3),
        skipped(data),
    )


def targets(data: Data) -> list[Target]:
    """What is aimed at, and what was measured of it."""
    return [
        Target(
            f"save of {data['bytes'] / MEGABYTE:.0f} MB, {name.removeprefix('hfshard ')}: time ≤ 1.0 × transformers"
            " with fsync",
            *at_most(1.0, ratio(data, name, SYNCED)),
        )
        for name in OURS
    ]


QUESTION = Question(
    "small", "Save of a small model", peers, make_specs, lambda context, peer: [], render, targets, around=around
)
