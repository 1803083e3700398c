"""Reads boxes of tensors in files far away: near stretches by one request, several requests under way."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import torch

from hfshard._util.progress import bytes_bar
from hfshard.distributed.layout import whole_box
from hfshard.distributed.parts.part import FileTensor, Part, assign_bits, blocks_of, bytes_of, is_read_into, windows_of
from hfshard.distributed.runs import Runs, gather_into
from hfshard.format.digests import Verify
from hfshard.shards.ranged_shard import (
    GAP_BYTES,
    REQUEST_BYTES,
    Comparison,
    Piece,
    RangedShard,
    RunningDigest,
    read_pieces,
)
from hfshard.tensors.stored_tensor import memory_of, own_memory


class RangedParts:
    """Parts of tensors of files that are read by ranges, for one call."""

    def __init__(self, level: Verify) -> None:
        """Ask for nothing yet; `level` says what is compared (see `Comparison`)."""
        self._level = level
        self._pieces: dict[RangedShard, list[Piece]] = {}
        self._comparisons: dict[RangedShard, Comparison] = {}
        self._whole: dict[RangedShard, set[str]] = {}
        """The tensors whose bytes are all hashed on the way."""

    def add(self, part: Part) -> list[Part]:
        """Take a part; return the blocks of it that have to wait for several requests each, which are not taken."""
        source = part.source
        assert isinstance(source, FileTensor)
        shard = source.shard
        assert isinstance(shard, RangedShard)
        if shard not in self._comparisons:
            self._comparisons[shard] = Comparison(shard, self._level)
            self._pieces[shard] = []
            self._whole[shard] = set()
        comparison, pieces, whole = self._comparisons[shard], self._pieces[shard], self._whole[shard]
        digest = None
        if part.box == whole_box(part.sizes) and source.name not in whole:
            digest = comparison.digest_of(shard.header.tensors[source.name])
            whole.add(source.name)
        left: list[Part] = []
        for block in blocks_of(part, REQUEST_BYTES):
            found = _pieces_of(block, source, digest)
            pieces += found
            left += [] if found else blocks_of(block)
        return left

    def read(self, memory_bytes: int, progress: bool | None) -> int:
        """Read what was added, compare it, and return the bytes that were asked for.

        Args:
            memory_bytes: What this may take beside the targets.
            progress: A bar.

        Raises:
            IntegrityError: A tensor is not what was saved; the targets are overwritten.
        """
        for shard, comparison in self._comparisons.items():
            self._pieces[shard] += comparison.others(self._whole[shard])
        total = sum(piece.nbytes for pieces in self._pieces.values() for piece in pieces)
        with bytes_bar("Loading", total, progress if total else False) as progress_callback:
            count_bytes = read_pieces(list(self._pieces.items()), progress_callback, memory_bytes)
        for comparison in self._comparisons.values():
            comparison.compare()
        return count_bytes


def _pieces_of(block: Part, source: FileTensor, digest: RunningDigest | None) -> list[Piece]:
    """What is asked for to fill a block, each for itself; nothing where that can't be."""
    _, sizes, box, target = block
    runs = Runs.of_box(sizes, source.dtype.itemsize, box)
    is_direct = is_read_into(target, source.dtype)
    if is_direct and len(runs.offsets) == 1:
        start = int(runs.offsets[0]) + source.start
        take = None if digest is None else partial(_hash, digest, start)
        return [Piece(start, runs.total, memory_of(target), take)]
    windows = list(windows_of(runs, GAP_BYTES))
    if len(windows) > 1 and not is_direct:
        return []
    found = []
    for first, last in windows:
        some = Runs(runs.offsets[first:last], runs.lengths[first:last], runs.positions[first:last])
        start = int(some.offsets[0]) + source.start
        nbytes = int(some.offsets[-1] + some.lengths[-1] - some.offsets[0])
        found.append(Piece(start, nbytes, None, partial(_take_runs, block, source, some, digest, start)))
    return found


def _hash(digest: RunningDigest, start: int, found: memoryview, cancelled: threading.Event) -> None:
    digest.add(start, found, cancelled, stays=True)


def _take_runs(
    block: Part,
    source: FileTensor,
    runs: Runs,
    digest: RunningDigest | None,
    start: int,
    found: memoryview,
    cancelled: threading.Event,
) -> None:
    """Bring the bytes of a window, which holds these runs of a block, to their places."""
    target = block.target
    raw = np.frombuffer(found, np.uint8)
    starts = runs.offsets - runs.offsets[0]
    with torch.no_grad():
        if is_read_into(target, source.dtype):
            begin = int(runs.positions[0])
            gather_into(bytes_of(target)[begin : begin + runs.total], raw, starts, runs.lengths)
        else:
            gathered = own_memory((runs.total,), torch.uint8)
            gather_into(bytes_of(gathered), raw, starts, runs.lengths)
            assign_bits(target, gathered.view(source.dtype).view(target.shape))
    if digest is not None:
        digest.add(start, found, cancelled, stays=False)
