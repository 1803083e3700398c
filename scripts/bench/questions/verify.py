"""How long it takes to hash every byte of a checkpoint: hfshard against hashlib, from the disk and from the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from bench.harness.figures import Data, at_most, peak_at_most, peers_in, ratio, skipped, table
from bench.harness.inputs import make_source, shards_of, sized, source_of
from bench.harness.question import SIDE, Context, Job, Peer, Question, Target
from bench.machine.limits import hashing, read_files
from bench.markdown import paragraphs

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
        return line(f"hfshard {checksum}", title, lambda context: with_hfshard(context, checksum), state, every)

    loop = "hashlib sha256 over the files, 1 MiB reads"
    return [
        line(BASE, loop, with_hashlib, "cold", SIDE),
        ours("sha256", "cold"),
        ours("xxh3", "cold"),
        line(LIMIT, "the limit: O_DIRECT reads into the same blocks", at_the_limit, "cold"),
        line(HASH, "the limit of sha256: as many bytes in memory, all cores", hash_alone, "cold"),
        line(BASE, loop, with_hashlib, "warm", SIDE),
        ours("sha256", "warm", SIDE),
        ours("xxh3", "warm", SIDE),
    ]


def make_inputs(context: Context) -> None:
    """The checkpoint with either checksum."""
    make_source(context)
    make_source(context, "xxh3")


def files(context: Context, peer: Peer) -> list[Path]:
    """What this peer reads."""
    return shards_of(source_of(context, "xxh3" if peer.key == "hfshard xxh3" else "sha256"))


def with_hashlib(context: Context) -> Job:
    """A plain loop over the files."""

    def verify() -> None:
        for path in shards_of(context.source):
            hasher = hashlib.sha256()
            with open(path, "rb") as file:
                while block := file.read(LOOP_BYTES):
                    hasher.update(block)
            hasher.hexdigest()

    return Job([("verify", verify)])


def with_hfshard(context: Context, checksum: str) -> Job:
    """`hfshard.verify_checkpoint`, which must have compared every byte."""
    import hfshard

    where = source_of(context, checksum)
    hfshard.verify_checkpoint  # noqa: B018  imported before the clock starts
    total = sum(size for _, size in sized(shards_of(where)))

    def verify() -> None:
        report = hfshard.verify_checkpoint(where)
        if not report.ok or report.checked_bytes < total:
            raise RuntimeError(f"checked {report.checked_bytes} of {total} bytes: {report.problems}")

    return Job([("verify", verify)])


def hash_alone(context: Context) -> Job:
    """Hash as many bytes, cut evenly."""
    return Job([("verify", hashing(sum(size for _, size in sized(shards_of(context.source)))))])


def at_the_limit(context: Context) -> Job:
    """Reading alone."""
    paths = sized(shards_of(context.source))
    return Job([("verify", lambda: read_files(None, paths))])


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    parts = ["The limit of a line with sha256 is the larger of both, in the same round."]
    for state in [state for state in ("cold", "warm") if peers_in(data, state)]:
        parts += [f"### Verify, {state}", table(data, peers_in(data, state), [("verify", "")], "the plain loop")]
    return paragraphs(*parts, skipped(data))


def targets(data: Data) -> list[Target]:
    """What is aimed at, and what was measured of it."""
    disk = ratio(data, "hfshard xxh3/cold", f"{LIMIT}/cold")
    larger = ratio(data, "hfshard sha256/cold", f"{LIMIT}/cold | {HASH}/cold")
    ours = [name for name in data["peers"] if name.startswith("hfshard")]
    return [
        Target(f"verify, cold, xxh3: time ≤ {FACTOR} × the O_DIRECT read", *at_most(FACTOR, disk)),
        Target(
            f"verify, cold, sha256: time ≤ {FACTOR} × the larger of that read and hashing on all cores",
            *at_most(FACTOR, larger),
        ),
        Target(f"verify: peak memory ≤ {PEAK_MIB} MiB more", *peak_at_most(PEAK_MIB, data, ours)),
    ]


QUESTION = Question("verify", "Verify", peers, make_inputs, files, render, targets)
