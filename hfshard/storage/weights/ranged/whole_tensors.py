"""Brings tensors of files that are read by ranges into memory of their own, on the CPU or a device."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from hfshard._util.progress import ProgressCallback
from hfshard.format.digests import Verify
from hfshard.format.header import TensorInfo
from hfshard.storage.weights.ranged.comparison import Comparison
from hfshard.storage.weights.ranged.ranged_shard import RangedShard
from hfshard.storage.weights.ranged.requests import DEFAULT_MEMORY, REQUEST_BYTES, Piece, read_pieces
from hfshard.storage.weights.ranged.running_digest import RunningDigest
from hfshard.tensors.stored_tensor import memory_of, own_memory


def read_whole(
    wanted: Sequence[tuple[RangedShard, Sequence[str]]],
    device: torch.device,
    *,
    level: Verify = "structure",
    progress_callback: ProgressCallback | None = None,
    memory_bytes: int = DEFAULT_MEMORY,
) -> dict[str, torch.Tensor]:
    """Read tensors, each into memory of its own; every byte is asked for once.

    Args:
        wanted: Files, each with the names of tensors.
        device: Where they go.
        level: What is compared on the way (see `Comparison`).
        progress_callback: Called with numbers of bytes that have come.
        memory_bytes: What this may take beside the tensors.

    Raises:
        IntegrityError: Bytes are not those that were saved.
        DamagedCheckpointError: This torch does not know a dtype; nothing was read.
        Everything that `RangedShard.read_into` raises.
    """
    tensors: dict[str, torch.Tensor] = {}
    jobs: list[tuple[RangedShard, list[Piece]]] = []
    comparisons: list[Comparison] = []
    for shard, names in wanted:
        for name in names:
            shard.described(name)  # raises before memory is taken
    for shard, names in wanted:
        comparison = Comparison(shard, level)
        pieces: list[Piece] = list(comparison.others(set(names)))
        for name in names:
            info = shard.header.tensors[name]
            raw = _memory(info.nbytes, device)
            tensors[name] = shard.shaped(name, raw.untyped_storage())
            if info.nbytes:
                pieces += pieces_of(info, shard.header.data_start, raw, comparison.digest_of(info))
        jobs.append((shard, pieces))
        comparisons.append(comparison)
    stage = partial(_page_locked, REQUEST_BYTES) if device.type == "cuda" else None
    read_pieces(jobs, progress_callback, memory_bytes, stage)
    for comparison in comparisons:
        comparison.compare()
    return {name: tensors[name] for _, names in wanted for name in names}


def _memory(nbytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu" and nbytes:
        return own_memory((nbytes,), torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _page_locked(nbytes: int) -> memoryview:
    return memory_of(torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True))


def pieces_of(info: TensorInfo, data_start: int, raw: torch.Tensor, digest: RunningDigest | None) -> Iterator[Piece]:
    """The pieces by which a tensor is read whole.

    Args:
        info: Which tensor.
        data_start: Of its file.
        raw: Where its bytes go, in one dimension.
        digest: Takes them too.
    """
    memory = memory_of(raw) if raw.device.type == "cpu" else None
    # The caller's stream, on which the memory was allocated: another thread has another one.
    stream = torch.cuda.current_stream(raw.device) if raw.device.type == "cuda" else None
    for at in range(0, info.nbytes, REQUEST_BYTES):
        nbytes = min(REQUEST_BYTES, info.nbytes - at)
        start = data_start + info.begin + at
        target = None if memory is None else memory[at : at + nbytes]
        into = None if memory is not None else raw[at : at + nbytes]
        take = None if digest is None and into is None else partial(_take, start, digest, into, stream)
        yield Piece(start, nbytes, target, take)


def _take(
    start: int,
    digest: RunningDigest | None,
    into: torch.Tensor | None,
    stream: torch.cuda.Stream | None,
    found: memoryview,
    cancelled: threading.Event,
) -> None:
    if into is not None:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            into.copy_(torch.frombuffer(found, dtype=torch.uint8))
    if digest is not None:
        digest.add(start, found, cancelled, stays=into is None)
