"""How long it takes to hash every byte of a checkpoint: hfshard against hashlib, from the disk and from the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.harness.figures import Data, at_least, at_most, peers_in, ratio, skipped, table
from bench.harness.inputs import make_source, shards_of, sized, source_of
from bench.harness.limits import read_files
from bench.harness.question import SIDE, Context, Job, Peer, Question, Target
from bench.markdown import paragraphs

LOOP_BYTES = 2**20
MEMORY_BYTES = 4 * 2**20
THREADS = 4
"""As many as hfshard verifies with."""
BASE, LIMIT, MEMORY = "loop", "limit", "memory"
DISK_FACTOR = 1.2
"""xxh3 is at the disk's limit when it takes no more than this times a plain read."""


def peers(context: Context) -> list[Peer]:
    """The lines of the tables."""

    def line(key: str, title: str, prepare: Callable[[Context], Job], state: str, every: int = 1) -> Peer:
        limit = f"{LIMIT}/{state}" if state == "cold" else ""
        return Peer(key, title, prepare, state, every, f"{BASE}/{state}", limit)

    found = []
    for state in ("cold", "warm"):
        found += [
            line(
                BASE, "hashlib sha256 over the files, 1 MiB reads", with_hashlib, state, 1 if state == "cold" else SIDE
            ),
            line("hfshard sha256", "hfshard, sha256", lambda context: with_hfshard(context, "sha256"), state),
            line(
                "hfshard xxh3",
                "hfshard, xxh3",
                lambda context: with_hfshard(context, "xxh3"),
                state,
                1 if state == "cold" else SIDE,
            ),
        ]
    return [
        *found,
        line(LIMIT, "the limit: O_DIRECT reads into the same blocks", at_the_limit, "cold"),
        line(MEMORY, f"hashlib sha256 over the same bytes in memory, {THREADS} threads", in_memory, "warm"),
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


def in_memory(context: Context) -> Job:
    """The hashes alone."""
    contents = [path.read_bytes() for path in shards_of(context.source)]

    def hash_one(content: bytes) -> str:
        view, hasher = memoryview(content), hashlib.sha256()
        for at in range(0, len(view), MEMORY_BYTES):
            hasher.update(view[at : at + MEMORY_BYTES])
        return hasher.hexdigest()

    def verify() -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(hash_one, contents))

    return Job([("verify", verify)])


def at_the_limit(context: Context) -> Job:
    """Reading alone."""
    paths = sized(shards_of(context.source))
    return Job([("verify", lambda: read_files(None, paths))])


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    parts = []
    for state in ("cold", "warm"):
        parts += [f"### Verify, {state}", table(data, peers_in(data, state), [("verify", "")], "the plain loop")]
    return paragraphs(*parts, skipped(data))


def targets(data: Data) -> list[Target]:
    """What is aimed at, and what was measured of it."""
    speed = ratio(data, f"{MEMORY}/warm", "hfshard sha256/warm")  # of the times the other way round
    loop = ratio(data, "hfshard sha256/cold", f"{BASE}/cold")
    disk = ratio(data, "hfshard xxh3/cold", f"{LIMIT}/cold")
    return [
        Target(
            "verify, warm, sha256: speed ≥ 0.9 × hashlib in memory on as many threads",
            *at_least(0.9, speed),
        ),
        Target("verify, cold, sha256: time ≤ 0.6 × a plain hashlib loop", *at_most(0.6, loop)),
        Target(f"verify, cold, xxh3: time ≤ {DISK_FACTOR} × reading alone", *at_most(DISK_FACTOR, disk)),
    ]


QUESTION = Question("verify", "Verify", peers, make_inputs, files, render, targets)
