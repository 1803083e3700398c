"""Time to hash every byte of a checkpoint: hfshard against hashlib, from the disk and from the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from bench.harness.figures import Data, Target, at_most, ours_in, paragraphs, peak_at_most, ratio, tables_by_state
from bench.harness.inputs import hash_limit, make_source, read_limit, shards_of, sized, source_of, source_shards
from bench.harness.question import SIDE, Context, Job, Peer, Question

LOOP_BYTES = 2**20
BASE, LIMIT, HASH = "loop", "limit", "hash"
FACTOR = 1.15
PEAK_MIB = 64


def peers(context: Context) -> list[Peer]:
    """The lines of the tables."""

    def line(key: str, title: str, prepare: Callable[[Context], Job], state: str, every: int = 1) -> Peer:
        disk = f"{LIMIT}/cold" if state == "cold" else ""
        limit = {"hfshard sha256": " | ".join(filter(None, [disk, f"{HASH}/cold"])), HASH: ""}.get(key, disk)
        return Peer(key, title, prepare, state, every, f"{BASE}/{state}", limit)

    def ours(checksum: str, state: str, every: int = 1) -> Peer:
        title = f"hfshard, {checksum}"
        return line(f"hfshard {checksum}", title, lambda context: _by_hfshard(context, checksum), state, every)

    loop = "hashlib sha256 over the files, 1 MiB reads"
    return [
        line(BASE, loop, _by_hashlib, "cold", SIDE),
        ours("sha256", "cold"),
        ours("xxh3", "cold"),
        line(LIMIT, "the limit: O_DIRECT reads into the same blocks", _read_alone, "cold"),
        line(HASH, "the limit of sha256: as many bytes in memory, all cores", _hash_alone, "cold"),
        line(BASE, loop, _by_hashlib, "warm", SIDE),
        ours("sha256", "warm", SIDE),
        ours("xxh3", "warm", SIDE),
    ]


def make_inputs(context: Context) -> None:
    """Save the checkpoint with either checksum."""
    make_source(context)
    make_source(context, "xxh3")


def files(context: Context, peer: Peer) -> list[Path]:
    """The files that this peer reads."""
    return shards_of(source_of(context, "xxh3" if peer.key == "hfshard xxh3" else "sha256"))


def _by_hashlib(context: Context) -> Job:
    """A plain loop over the files."""

    def verify() -> None:
        for path in source_shards(context):
            hasher = hashlib.sha256()
            with open(path, "rb") as file:
                while block := file.read(LOOP_BYTES):
                    hasher.update(block)
            hasher.hexdigest()

    return Job([("verify", verify)])


def _by_hfshard(context: Context, checksum: str) -> Job:
    """`hfshard.verify_checkpoint`, which must have compared every byte."""
    import hfshard

    verify_checkpoint = hfshard.verify_checkpoint
    where = source_of(context, checksum)
    total = sum(size for _, size in sized(shards_of(where)))

    def verify() -> None:
        report = verify_checkpoint(where)
        if not report.ok or report.checked_bytes < total:
            raise RuntimeError(f"checked {report.checked_bytes} of {total} bytes: {report.problems}")

    return Job([("verify", verify)])


def _read_alone(context: Context) -> Job:
    return read_limit("verify", source_shards(context))


def _hash_alone(context: Context) -> Job:
    return hash_limit("verify", sum(size for _, size in sized(source_shards(context))))


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    return paragraphs(
        "The limit of a line with sha256 is the larger of both, in the same round.",
        tables_by_state(data, "Verify", "verify", "the plain loop"),
    )


def targets(data: Data) -> list[Target]:
    """The aims, and what was measured of them."""
    disk = ratio(data, "hfshard xxh3/cold", f"{LIMIT}/cold")
    larger = ratio(data, "hfshard sha256/cold", f"{LIMIT}/cold | {HASH}/cold")
    return [
        at_most("verify, cold, xxh3: time", FACTOR, disk, "the O_DIRECT read"),
        at_most("verify, cold, sha256: time", FACTOR, larger, "the larger of that read and hashing on all cores"),
        peak_at_most("verify", PEAK_MIB, data, ours_in(data)),
    ]


QUESTION = Question(
    name="verify", title="Verify", peers=peers, make_inputs=make_inputs, files=files, render=render, targets=targets
)
