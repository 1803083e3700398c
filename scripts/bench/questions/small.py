"""Time of a save of 90 MB, the size of most models: a flush costs more than the bytes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from bench.harness.figures import MEGABYTE, Data, Target, at_most, paragraphs, ratio, table
from bench.harness.inputs import hash_limit, make_specs, write_limit
from bench.harness.models import total_bytes
from bench.harness.question import Context, Job, Peer, Question
from bench.questions.save import BASE, HASH, OURS, SYNCED, Save, by_hfshard, by_transformers, saving

SIZE, ONE_FILE, FIVE_FILES = "45m", "1GB", "20MB"
WRITE = "write"


def peers(context: Context) -> list[Peer]:
    """The lines of the table."""

    def peer(key: str, title: str, prepare: Callable[[Context], Job], base: str = SYNCED) -> Peer:
        return Peer(key, title, prepare, base=base, limit=f"{WRITE} | {HASH}" if "sha256" in key else WRITE)

    def line(
        key: str, title: str, make: Callable[[Context], Save], base: str = SYNCED, *, is_over: bool = False
    ) -> Peer:
        return peer(key, title, lambda context: _second_save(context, make(context), is_over=is_over), base)

    by_sha256 = partial(by_hfshard, checksum="sha256")
    in_five = partial(by_transformers, fsync=True, shard_size=FIVE_FILES)
    five = f"files of {FIVE_FILES}"
    return [
        line(BASE, "transformers `save_pretrained` (not flushed, not hashed)", by_transformers),
        line(SYNCED, "the same, then fsync of its files and the directory", partial(by_transformers, fsync=True)),
        line("hfshard sha256", "hfshard, sha256", by_sha256),
        line("hfshard xxh3", "hfshard, xxh3", partial(by_hfshard, checksum="xxh3")),
        line("hfshard none", "hfshard, no checksum", partial(by_hfshard, checksum=None)),
        line("hfshard over sha256", "hfshard, sha256, over an older checkpoint", by_sha256, is_over=True),
        line("transformers five", f"transformers, then fsync, {five}", in_five),
        line(
            "hfshard five sha256",
            f"hfshard, sha256, {five}",
            partial(by_sha256, shard_size=FIVE_FILES),
            "transformers five",
        ),
        peer(WRITE, "the limit: O_DIRECT from memory, flushed", lambda c: write_limit(c, "save", ONE_FILE)),
        peer(
            HASH,
            "sha256 of as many bytes in memory, one thread",
            lambda c: hash_limit("save", total_bytes(c.specs), threads=1),
        ),
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


def _second_save(context: Context, save: Save, *, is_over: bool) -> Job:
    """The second save of a process, as the first one imports; into a new directory, or over a checkpoint."""
    first = context.target / "first"
    save(first)
    shutil.rmtree(first)
    saved = context.target / "saved"
    if is_over:
        save(saved)
    return saving(context, lambda _: save(saved))


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    return paragraphs(
        f"A Llama of {data['bytes'] / MEGABYTE:.1f} MB in one file. The second save of a process, into a new directory"
        " unless a line says otherwise. hfshard flushes every file and directory. One file is hashed by one thread, so"
        " that sha256 of one takes as long as the last line at least.",
        table(data, list(data["peers"]), [("save", "")], "transformers with fsync", digits=3),
    )


def targets(data: Data) -> list[Target]:
    """The aims, and what was measured of them."""
    what = f"save of {data['bytes'] / MEGABYTE:.0f} MB"
    return [
        at_most(f"{what}, {name.split()[1]}: time", 1.0, ratio(data, name, SYNCED), "transformers with fsync")
        for name in OURS
    ]


QUESTION = Question(
    name="small",
    title="Save of a small model",
    peers=peers,
    make_inputs=make_specs,
    render=render,
    targets=targets,
    around=around,
)
