"""Inputs that several questions share, limits of the machine as jobs, and checks of the output."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness.models import make_model, total_bytes, write_specs
from bench.harness.question import Context, Job, Peer, SkipPeer
from bench.machine.limits import anonymous, hash_bytes, random_memory, read_files, write_files

if TYPE_CHECKING:
    from torch import Tensor

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def make_specs(context: Context) -> None:
    """Write the names and shapes, once."""
    if not context.specs.exists():
        write_specs(context.size, context.specs)


def make_source(context: Context, checksum: Any = "sha256") -> None:
    """Save the checkpoint to read, once."""
    import hfshard

    make_specs(context)
    where = source_of(context, checksum)
    if not where.exists():
        model = make_model(context.size, context.specs)
        hfshard.save_model(model, where, max_shard_size=context.size.shard_size, checksum=checksum, progress=False)


def source_of(context: Context, checksum: str = "sha256") -> Path:
    """Locate that checkpoint; the one with xxh3 is another directory."""
    return context.source if checksum == "sha256" else context.directory / f"source-{checksum}"


def shards_of(directory: Path) -> list[Path]:
    """List the files of weights in order."""
    return sorted(directory.glob("*.safetensors"))


def source_shards(context: Context, peer: Peer | None = None) -> list[Path]:
    """List the files of weights of the checkpoint to read, as `Question.files` does."""
    return shards_of(context.source)


def sized(paths: list[Path]) -> list[tuple[Path, int]]:
    """Pair files with their sizes."""
    return [(path, path.stat().st_size) for path in paths]


def written(context: Context) -> dict[str, Any]:
    """Count the bytes in the target.

    Raises:
        RuntimeError: They are fewer than the tensors have, so that it was not a whole save.
    """
    found = sum(path.stat().st_size for path in context.target.rglob("*") if path.is_file())
    if found < total_bytes(context.specs):
        raise RuntimeError(f"only {found} bytes were saved")
    return {"bytes": found}


def read_limit(phase: str, paths: list[Path]) -> Job:
    """Read files with O_DIRECT into the same few blocks."""
    files = sized(paths)
    total = sum(size for _, size in files)
    return Job([(phase, lambda: read_files(None, files))], lambda: {"read": total})


def write_limit(context: Context, phase: str, shard_size: str, times: int = 1) -> Job:
    """Write as many bytes as the model has, so many times, from memory into files of a size, with O_DIRECT, flushed."""
    total = times * total_bytes(context.specs)
    shard_bytes = int(shard_size[:-2]) * UNITS[shard_size[-2:]]
    files = [(context.target / f"{at}", min(shard_bytes, total - at)) for at in range(0, total, shard_bytes)]
    memory = random_memory(files)
    probe = context.target / "probe"
    try:
        write_files(anonymous(1), [(probe, 1)])
    except OSError as error:
        raise SkipPeer(f"no O_DIRECT here: {error}") from error
    finally:
        probe.unlink(missing_ok=True)
    return Job([(phase, lambda: write_files(memory, files))], lambda: written(context))


def hash_limit(phase: str, total: int, threads: int = 0) -> Job:
    """Hash as many bytes of memory by sha256, cut evenly; 0: as many threads as cores."""
    return Job([(phase, hash_bytes(total, threads or len(os.sched_getaffinity(0))))])


def sum_of(tensors: Iterable[Tensor]) -> int:
    """Read every byte of the tensors once, in the model's order: the sum of their 64-bit words."""
    import torch

    # One thread: with several, each waits for the others at every parameter, and one that lost its core stops all.
    torch.set_num_threads(1)
    total = 0
    for tensor in {one.data_ptr(): one.detach() for one in tensors}.values():
        words = tensor.view(-1).view(torch.int64) if tensor.data_ptr() % 8 == 0 else tensor.view(-1).view(torch.int16)
        total += int(words.sum(dtype=torch.int64))
    return total & (2**64 - 1)
