"""How long a load takes, to ready and to every byte read, from the disk and from the page cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bench.harness.figures import (
    Data,
    at_most,
    peak_at_most,
    peers_in,
    ratio,
    runs_of,
    skipped,
    table,
    who_is_first,
)
from bench.harness.inputs import make_source, shards_of, sized
from bench.harness.models import make_model, write_specs
from bench.harness.question import SIDE, Context, Job, Peer, Question, Target
from bench.machine.limits import aligned, anonymous, hashing, read_files
from bench.markdown import paragraphs
from bench.readers.models import with_hfshard, with_transformers
from bench.readers.state_dicts import (
    dcp_source_of,
    make_others,
    pickle_of,
    with_dcp,
    with_fastsafetensors,
    with_instanttensor,
    with_runai,
    with_safetensors,
    with_torch,
)

BASE, MAPPED, LIMIT, HASH = "transformers", "torch.load", "limit", "hash"
STATES = ("cold", "warm")
PHASES = [("ready", "ready: "), ("read", "read: ")]
PEAK_MIB = 64
MANY = "deep"
"""The model whose checkpoint has 198 files; any other has too few tensors for so many."""
WHY = {
    MAPPED: "torch.load maps one file and checks nothing of it, and builds no model.",
    "safetensors": "safetensors maps the files, checks only their headers, and builds no model.",
    "fastsafetensors": "fastsafetensors reads whole files into memory of its own (as much as the model, see the peaks),"
    " which needs no page to be mapped, and builds no model.",
    "runai": "runai-model-streamer reads into memory of its own by many threads, and builds no model.",
}
"""Why somebody may be before hfshard."""
WARM = {"": "5 files", " one": "1 file", " many": "198 files"}
"""Ends of the keys of the pairs that load from the page cache to ready, and what they load."""


def peers(context: Context) -> list[Peer]:
    """The lines of both tables."""
    return [*_cold(), *_warm(context)]


def _cold() -> list[Peer]:
    def line(key: str, title: str, prepare: Callable[[Context], Job], every: int = 1) -> Peer:
        limit = f"{LIMIT}/cold | {HASH}/cold" if key == "hfshard full" else f"{LIMIT}/cold"
        return Peer(key, title, prepare, "cold", every, f"{BASE}/cold", "" if key == HASH else limit)

    return [
        line(BASE, "transformers `from_pretrained`", with_transformers),
        line("hfshard", "hfshard `load_model`", with_hfshard),
        line("hfshard full", 'hfshard, `verify="full"` (sha256)', lambda context: with_hfshard(context, verify="full")),
        line("hfshard pread", 'hfshard, `read="pread"`', lambda context: with_hfshard(context, read="pread"), SIDE),
        line("safetensors", "safetensors `load_file`, a file at a time", with_safetensors, SIDE),
        line(MAPPED, "`torch.load(mmap=True)`, one file", with_torch),
        line("torch DCP", "torch DCP, `HuggingFaceStorageReader`", with_dcp, SIDE),
        line(
            "torch DCP files",
            "torch DCP, `FileSystemReader` of its own format",
            lambda context: with_dcp(context, "FileSystemReader"),
            SIDE,
        ),
        line("fastsafetensors", "fastsafetensors, on the CPU", with_fastsafetensors, SIDE),
        line("runai", "runai-model-streamer, copied out", with_runai, SIDE),
        line("instanttensor", "instanttensor", with_instanttensor, SIDE),
        line(LIMIT, "the limit: O_DIRECT into a few blocks again and again", at_the_limit),
        line("fresh memory", "O_DIRECT into memory of their own", into_fresh_memory, SIDE),
        line(HASH, "the limit of sha256: as many bytes in memory, all cores", hash_alone),
    ]


def _warm(context: Context) -> list[Peer]:
    found = []
    for end, files in WARM.items():

        def line(key: str, title: str, prepare: Callable[[Context], Job], base: str = f"{BASE}{end}/warm") -> Peer:
            return Peer(key, title, prepare, "warm", base=base)

        where = {"": context.source, " one": one_of(context), " many": many_of(context)}[end]
        found += [
            line(BASE + end, f"transformers, {files}", _from(where, with_transformers)),
            line("hfshard" + end, f"hfshard, {files}", _from(where, with_hfshard)),
        ]

    def side(key: str, title: str, prepare: Callable[[Context], Job], base: str = BASE) -> Peer:
        return Peer(key, title, prepare, "warm", SIDE, f"{base}/warm")

    return [
        *found,
        side(
            "transformers again", "transformers, the process's second load", lambda c: with_transformers(c, again=True)
        ),
        side(
            "hfshard again",
            "hfshard, the process's second load",
            lambda c: with_hfshard(c, again=True),
            "transformers again",
        ),
        side("hfshard full", 'hfshard, `verify="full"` (sha256)', lambda c: with_hfshard(c, verify="full")),
        side("safetensors", "safetensors `load_file`, a file at a time", with_safetensors),
        side(MAPPED, "`torch.load(mmap=True)`, one file", with_torch),
    ]


def _from(where: Path, load: Callable[[Context, Path], Job]) -> Callable[[Context], Job]:
    return lambda context: load(context, where)


def one_of(context: Context) -> Path:
    """The same checkpoint in one file."""
    return context.directory / "one"


def many_of(context: Context) -> Path:
    """That of the model of many tensors."""
    return context.directory / "many"


def make_inputs(context: Context) -> None:
    """The checkpoint of hfshard, in five files and in one, another one of many, and what other libraries load."""
    import hfshard

    make_source(context)
    if not one_of(context).exists():
        hfshard.reshard_checkpoint(context.source, one_of(context), max_shard_size="1TB", progress=False)
    if not many_of(context).exists():
        many = replace(context, params="tiny" if context.params == "tiny" else MANY)
        specs = context.directory / "many.json"
        write_specs(many.size, specs)
        size = "100KB" if context.params == "tiny" else many.size.shard_size
        hfshard.save_model(make_model(many.size, specs), many_of(context), max_shard_size=size, progress=False)
    make_others(context)


def files(context: Context, peer: Peer) -> list[Path]:
    """What this peer reads."""
    match peer.key.split():
        case [key] if key == MAPPED:
            return [pickle_of(context)]
        case ["torch", "DCP", "files"]:
            return [path for path in dcp_source_of(context).iterdir() if path.is_file()]
        case [_, "one"]:
            return shards_of(one_of(context))
        case [_, "many"]:
            return shards_of(many_of(context))
        case [key] if key == HASH:
            return []
        case _:
            return shards_of(context.source)


def at_the_limit(context: Context) -> Job:
    """The files' bytes, and no memory for them."""
    paths = sized(shards_of(context.source))
    return Job([("read", lambda: read_files(None, paths))])


def into_fresh_memory(context: Context) -> Job:
    """The same into memory that nobody has touched, whose pages the kernel has to clear first."""
    paths = sized(shards_of(context.source))

    def load() -> None:
        read_files(anonymous(sum(aligned(size) for _, size in paths)), paths)

    return Job([("read", load)])


def hash_alone(context: Context) -> Job:
    """Hash as many bytes, cut evenly."""
    return Job([("read", hashing(sum(size for _, size in sized(shards_of(context.source)))))])


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    stayed = max((run.get("resident", 0) for name in peers_in(data, "cold") for run in runs_of(data, name)), default=0)
    how = {
        "cold": f"Cold: the files' pages were dropped by posix_fadvise; by mincore at most {stayed:.1%} of them stayed."
        f" {who_is_first(data, _rivals(data), 'cold', WHY, 'read')}",
        "warm": "Warm: the files were dropped, then read once by 8 MiB, so that their pages lie alike for all.",
    }
    parts = [
        "*Ready*: the call has returned. *Read*: from the call to the end of a pass over every byte of every parameter"
        " (torch's sum of 64-bit words, in the model's order, in one thread), the same for all; their sums agree."
    ]
    for state in STATES:
        parts += [f"### Load, {state}", how[state], table(data, peers_in(data, state), PHASES)]
    return paragraphs(*parts, skipped(data))


def _rivals(data: Data) -> list[str]:
    """Who loads from the disk."""
    keys = [name.removesuffix("/cold") for name in peers_in(data, "cold")]
    return [key for key in keys if key not in (LIMIT, HASH, "fresh memory")]


def targets(data: Data) -> list[Target]:
    """What is aimed at, and what was measured of it."""
    read = "load, cold, to every byte read"
    found = [
        Target(
            f"{read}: time ≤ 1.05 × torch.load(mmap=True)",
            *at_most(1.05, ratio(data, "hfshard/cold", f"{MAPPED}/cold", "read")),
        ),
        Target(
            f"{read}: time ≤ 0.75 × transformers",
            *at_most(0.75, ratio(data, "hfshard/cold", f"{BASE}/cold", "read")),
        ),
        Target(
            f"{read}, sha256 on the way: time ≤ 1.4 × hashing on all cores",
            *at_most(1.4, ratio(data, "hfshard full/cold", f"{HASH}/cold", "read")),
        ),
    ]
    for end, shown in WARM.items():
        pair = ratio(data, f"hfshard{end}/warm", f"{BASE}{end}/warm", "ready")
        found.append(Target(f"load, warm, to ready, {shown}: time ≤ 1.0 × transformers", *at_most(1.0, pair)))
    ours = [name for name in data["peers"] if name.startswith("hfshard") and "pread" not in name]
    return [*found, Target(f"load: peak memory ≤ {PEAK_MIB} MiB more", *peak_at_most(PEAK_MIB, data, ours))]


QUESTION = Question("load", "Load", peers, make_inputs, files, render, targets, held=2.0)
