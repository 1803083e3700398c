"""Time to save and to load 100,000 tiny tensors: the work for each tensor is all there is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness.figures import Data, Target, at_most, paragraphs, peers_in, ratio, table
from bench.harness.inputs import shards_of
from bench.harness.question import Context, Job, Peer, Question
from bench.machine.limits import sync_files

if TYPE_CHECKING:
    from torch import Tensor

COUNT = 100_000
"""Tensors, with all --params but tiny."""
TINY_COUNT = 1_000
SHAPES = ((8,), (3, 5), (2, 2, 2), (4, 4))
ELEMENTS = (8, 15, 8, 16)
FILES = 5
SEED = 20251121
SAVE, SYNCED, LOAD, LOAD_FIVE = ("safetensors save", "safetensors fsync", "safetensors load", "safetensors load five")


def peers(context: Context) -> list[Peer]:
    """The lines of both tables."""

    def save(key: str, title: str, prepare: Callable[[Context], Job]) -> Peer:
        return Peer(key, title, prepare, base=SAVE)

    def load(key: str, title: str, load: Callable[[Context, Path], Job], where: Path, base: str = LOAD) -> Peer:
        return Peer(key, title, lambda context: load(context, where), "warm", base=f"{base}/warm")

    one, five = source_of(context), five_of(context)
    return [
        save(SAVE, "safetensors `save_file` (not flushed)", save_with_safetensors),
        save(SYNCED, "the same, then fsync", partial(save_with_safetensors, fsync=True)),
        save("hfshard sha256", "hfshard `save_state_dict`", partial(save_with_hfshard, checksum="sha256")),
        save("hfshard none", "hfshard, no checksum", partial(save_with_hfshard, checksum=None)),
        load(LOAD, "safetensors `load_file`", load_with_safetensors, one),
        load("hfshard load", "hfshard `load_state_dict`", load_with_hfshard, one),
        load(LOAD_FIVE, f"safetensors, {FILES} files", load_with_safetensors, five, LOAD_FIVE),
        load("hfshard load five", f"hfshard, {FILES} files", load_with_hfshard, five, LOAD_FIVE),
    ]


def make_tensors(context: Context) -> dict[str, Tensor]:
    """Float32 tensors of 8 to 16 elements, each with a storage of its own."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    return {
        f"model.layers.{number // 100}.blocks.{number % 100}.scale": torch.rand(
            SHAPES[number % len(SHAPES)], generator=generator
        )
        for number in range(TINY_COUNT if context.params == "tiny" else COUNT)
    }


def source_of(context: Context) -> Path:
    """The directory of the checkpoint of one file."""
    return context.directory / "tiny-one"


def five_of(context: Context) -> Path:
    """The directory of that of five files."""
    return context.directory / "tiny-five"


def make_inputs(context: Context) -> None:
    """Both checkpoints, by hfshard."""
    import hfshard

    tensors = make_tensors(context)
    largest = hfshard.plan_shards(tensors).shards[0].nbytes
    for where, shard_bytes in ((source_of(context), largest), (five_of(context), largest // FILES + largest // 100)):
        hfshard.save_state_dict(tensors, where, max_shard_size=shard_bytes, progress=False)


def save_with_safetensors(context: Context, *, fsync: bool = False) -> Job:
    """The plain writer, into one file."""
    import torch
    from safetensors.torch import save_file

    tensors = make_tensors(context)
    path = context.target / "model.safetensors"

    def save() -> None:
        save_file(tensors, path)
        if fsync:
            sync_files(context.target)

    save_file({"warm.up": torch.zeros(1)}, path)
    path.unlink()
    return Job([("done", save)], lambda: {"bytes": path.stat().st_size})


def save_with_hfshard(context: Context, checksum: Any) -> Job:
    """The state dict, into one file and its index."""
    import torch

    import hfshard

    tensors = make_tensors(context)
    where = context.target / "saved"
    hfshard.save_state_dict({"warm.up": torch.zeros(1)}, context.target / "first", checksum=checksum)
    return Job(
        [("done", lambda: hfshard.save_state_dict(tensors, where, checksum=checksum))],
        lambda: {"bytes": sum(path.stat().st_size for path in where.iterdir() if path.is_file())},
    )


def load_with_safetensors(context: Context, directory: Path) -> Job:
    """The plain reader, a file at a time."""
    from safetensors.torch import load_file

    paths = shards_of(directory)
    return _load(lambda: {name: tensor for path in paths for name, tensor in load_file(path).items()})


def load_with_hfshard(context: Context, directory: Path) -> Job:
    """Names, sizes, headers and fingerprints are checked, as by default."""
    import torch

    import hfshard

    hfshard.save_state_dict({"warm.up": torch.zeros(1)}, context.target)
    hfshard.load_state_dict(context.target)  # what the first call imports
    return _load(lambda: hfshard.load_state_dict(directory))


def _load(load: Callable[[], dict[str, Tensor]]) -> Job:
    found: dict[str, Tensor] = {}

    def result() -> dict[str, Any]:
        import torch

        words = torch.cat([found[name].view(-1) for name in sorted(found)]).view(torch.int32)
        return {"sum": int(words.sum(dtype=torch.int64))}

    return Job([("done", lambda: found.update(load()))], result)


def render(data: Data) -> str:
    """The section of RESULTS.md."""
    return paragraphs(
        f"{COUNT:,} float32 tensors of {min(ELEMENTS)} to {max(ELEMENTS)} elements. hfshard's saves are flushed, and"
        " note a digest of each tensor; its loads check names, sizes, headers and fingerprints.",
        "### Save",
        table(data, [name for name in data["peers"] if not name.endswith("/warm")], [("done", "")], "safetensors"),
        "### Load, warm",
        table(data, peers_in(data, "warm"), [("done", "")], "safetensors"),
    )


def targets(data: Data) -> list[Target]:
    """The aims, and what was measured of them."""
    found = []
    for text, name, base in (
        ("save, sha256", "hfshard sha256", SAVE),
        ("load, one file", "hfshard load/warm", f"{LOAD}/warm"),
        ("load, five files", "hfshard load five/warm", f"{LOAD_FIVE}/warm"),
    ):
        text = f"{COUNT:,} tiny tensors, {text}"
        found += [
            at_most(f"{text}: time", 1.0, ratio(data, name, base), "safetensors"),
            at_most(f"{text}: CPU", 1.0, ratio(data, name, base, value=_cpu_of), "safetensors"),
        ]
    return found


def _cpu_of(run: Data, phase: str) -> float:
    """CPU seconds of all threads."""
    return float(run["cpu"])


QUESTION = Question(
    name="tiny",
    title="Tiny tensors",
    peers=peers,
    make_inputs=make_inputs,
    files=lambda context, peer: shards_of(five_of(context) if "five" in peer.key else source_of(context)),
    render=render,
    targets=targets,
)
