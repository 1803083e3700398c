"""How long it takes to measure what differs between two checkpoints: hfshard against reading both, and plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bench.harness.figures import Data, at_most, peak_at_most, peers_in, ratio, skipped, table
from bench.harness.inputs import make_specs, shards_of, sized
from bench.harness.models import make_tensors
from bench.harness.question import SIDE, Context, Job, Peer, Question, Target
from bench.machine.limits import read_files
from bench.markdown import paragraphs

if TYPE_CHECKING:
    from torch import Tensor

LOOP_BYTES = 2**20
BASE, LIMIT = "loop", "limit"
DTYPES = ("BF16", "F32")
FACTOR = 1.5
PEAK_MIB = 100
MOVED_BITS = {"BF16": 3, "F32": 12}
"""The last bits of a number that training has changed, at random: seven of eight numbers in bfloat16, nearly all in
float32. Which ones can't be foreseen, as a processor would do with those of a made-up pattern."""


def peers(context: Context) -> list[Peer]:
    """The lines of the tables."""

    def line(key: str, title: str, prepare: Callable[[Context], Job], state: str, every: int = 1) -> Peer:
        dtype = key.split()[-1]
        limit = f"{LIMIT} {dtype}/cold" if state == "cold" else ""
        return Peer(key, title, prepare, state, every, f"{BASE} {dtype}/{state}", limit)

    def lines(dtype: str, state: str) -> list[Peer]:
        every = 1 if state == "cold" else SIDE
        found = [
            line(f"{BASE} {dtype}", f"both read, 1 MiB at a time: {dtype}", with_loop(dtype), state, every),
            line(f"hfshard values {dtype}", f"hfshard, `values=True`: {dtype}", with_hfshard(dtype), state, every),
            line(f"torch {dtype}", f"safetensors, then torch in float64: {dtype}", with_torch(dtype), state, SIDE),
        ]
        if state == "cold":
            title = f"the limit: O_DIRECT reads of both into the same blocks: {dtype}"
            found.append(line(f"{LIMIT} {dtype}", title, at_the_limit(dtype), state))
        return found

    return [peer for state in ("cold", "warm") for dtype in DTYPES for peer in lines(dtype, state)]


def make_inputs(context: Context) -> None:
    """Two checkpoints of each dtype, of as many bytes; every tensor of the second one has changed."""
    make_specs(context)
    import torch

    import hfshard

    tensors = make_tensors(context.specs)
    total = sum(tensor.nbytes for tensor in tensors.values())
    for dtype in DTYPES:
        if dtype == "F32":
            tensors = _widened(tensors, total)
        for place in _places(context, dtype):
            hfshard.save_state_dict(tensors, place, max_shard_size=context.size.shard_size, progress=False)
            for tensor in tensors.values():
                bits = tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize])
                bits ^= torch.randint(2 ** MOVED_BITS[dtype], bits.shape, dtype=bits.dtype)


def _widened(tensors: dict[str, Tensor], total: int) -> dict[str, Tensor]:
    """The first of the tensors in float32, not more bytes than they all have in bfloat16."""
    found = {}
    for name, tensor in tensors.items():
        total -= 2 * tensor.nbytes
        if total >= 0:
            found[name] = tensor.float()
    return found


def _places(context: Context, dtype: str) -> tuple[Path, Path]:
    return context.directory / f"before-{dtype}", context.directory / f"after-{dtype}"


def _shards(context: Context, dtype: str) -> list[Path]:
    return [path for place in _places(context, dtype) for path in shards_of(place)]


def files(context: Context, peer: Peer) -> list[Path]:
    """What this peer reads."""
    return _shards(context, peer.key.split()[-1])


def with_loop(dtype: str) -> Callable[[Context], Job]:
    """A plain loop over the files of both."""

    def prepare(context: Context) -> Job:
        def read() -> None:
            block = bytearray(LOOP_BYTES)
            for path in _shards(context, dtype):
                with open(path, "rb", buffering=0) as file:
                    while file.readinto(block):
                        pass

        return Job([("diff", read)])

    return prepare


def with_hfshard(dtype: str) -> Callable[[Context], Job]:
    """`hfshard.diff_checkpoints`, which must have read every tensor of both."""

    def prepare(context: Context) -> Job:
        import hfshard

        hfshard.diff_checkpoints  # noqa: B018  imported before the clock starts
        a, b = _places(context, dtype)

        def diff() -> None:
            report = hfshard.diff_checkpoints(a, b, values=True, progress=False)
            expected = sum(tensor.a.nbytes + tensor.b.nbytes for tensor in report.tensors if tensor.a and tensor.b)
            if set(report.counts) != {"changed"} or report.read_bytes != expected:
                raise RuntimeError(f"read {report.read_bytes} of {expected} bytes: {report.counts}")

        return Job([("diff", diff)])

    return prepare


def with_torch(dtype: str) -> Callable[[Context], Job]:
    """What one would write by hand, tensor by tensor, without NaN, infinities and digests."""

    def prepare(context: Context) -> Job:
        import torch
        from safetensors import safe_open

        def diff() -> None:
            for before, after in zip(*map(shards_of, _places(context, dtype)), strict=True):
                with safe_open(before, "pt") as old, safe_open(after, "pt") as new:
                    for name in old.keys():  # noqa: SIM118  it is no dict
                        a, b = old.get_tensor(name).double(), new.get_tensor(name).double()
                        difference = b - a
                        norms = [float(torch.linalg.vector_norm(one)) for one in (a, b, difference)]
                        cosine = float((a * b).sum()) / (norms[0] * norms[1])
                        [cosine, float(difference.abs().max()), int(torch.count_nonzero(difference))]

        return Job([("diff", diff)])

    return prepare


def at_the_limit(dtype: str) -> Callable[[Context], Job]:
    """Reading alone, past the page cache."""

    def prepare(context: Context) -> Job:
        paths = sized(_shards(context, dtype))
        return Job([("diff", lambda: read_files(None, paths))])

    return prepare


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    parts = [
        "Two checkpoints in which every tensor differs, so that every byte of both is read, compared with its digest "
        "and measured: bfloat16 in float32, float32 in float64. From the page cache, reading takes hardly any time: "
        "the factor is that of measuring."
    ]
    for state in [state for state in ("cold", "warm") if peers_in(data, state)]:
        parts += [f"### Diff, {state}", table(data, peers_in(data, state), [("diff", "")], "reading both")]
    return paragraphs(*parts, skipped(data))


def targets(data: Data) -> list[Target]:
    """What is aimed at, and what was measured of it."""
    ours = [name for name in data["peers"] if name.startswith("hfshard")]
    found = []
    for dtype in DTYPES:
        reading = ratio(data, f"hfshard values {dtype}/cold", f"{BASE} {dtype}/cold")
        text = f"diff with values, {dtype}, cold: time ≤ {FACTOR} × reading both"
        found.append(Target(text, *at_most(FACTOR, reading)))
    return [*found, Target(f"diff: peak memory ≤ {PEAK_MIB} MiB more", *peak_at_most(PEAK_MIB, data, ours))]


QUESTION = Question("diff", "Diff", peers, make_inputs, files, render, targets)
