"""A model of 1 TB on 1,024 ranks, in simulation: what one rank computes before and during the exchange."""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter
from itertools import islice

from hfshard.distributed.exchange import SOURCE_BYTES, WINDOW_BYTES, Window, schedule
from hfshard.distributed.layout import Placement
from hfshard.distributed.tensor_owners import (
    ListedTensor,
    Listing,
    Mesh,
    RankGroup,
    TensorOwners,
    assign_owners,
)
from hfshard.format.index import sha256_of
from hfshard.tensors.stored_tensor import TensorLayout

RANKS = 1024
LAYERS = 155
HIDDEN, INNER, HEADS, VOCABULARY = 16384, 53248, 1024, 128256
FILE_BYTES = 5_000_000_000


def entries() -> dict[str, ListedTensor]:
    """FSDP over 128 ranks and tensor parallelism over 8."""
    shapes = {
        "q": (HIDDEN, HIDDEN, 0), "k": (HEADS, HIDDEN, 0), "v": (HEADS, HIDDEN, 0), "o": (HIDDEN, HIDDEN, 1),
        "gate": (INNER, HIDDEN, 0), "up": (INNER, HIDDEN, 0), "down": (HIDDEN, INNER, 1),
    }  # fmt: skip
    found = {"embed": entry(VOCABULARY, HIDDEN, 0)}
    for layer in range(LAYERS):
        found |= {f"layers.{layer}.{name}": entry(*shape) for name, shape in shapes.items()}
    return found


def entry(rows: int, columns: int, split_by_tensor_parallel: int) -> ListedTensor:
    nbytes = 2 * rows * columns
    groups = 8 if split_by_tensor_parallel == 0 else 1
    placements = (Placement(0, groups), Placement(split_by_tensor_parallel))
    return ListedTensor(TensorLayout("BF16", (rows, columns), nbytes), 2, (rows, columns), None, 0, placements)


def streams_of(holders: TensorOwners) -> dict[int, list[tuple[str, int]]]:
    files: list[list[tuple[str, int]]] = [[]]
    for name, layout in holders.layouts.items():
        if sum(nbytes for _, nbytes in files[-1]) + layout.nbytes > FILE_BYTES:
            files.append([])
        files[-1].append((name, layout.nbytes))
    owners = assign_owners([sum(nbytes for _, nbytes in file) for file in files], range(RANKS))
    return dict(zip(owners, files, strict=True))


def test_a_terabyte_on_a_thousand_ranks_is_planned_in_seconds() -> None:
    tracemalloc.start()
    start = time.process_time()
    listing = Listing(entries(), {}, (), ())
    digest = sha256_of(listing.to_json())
    group = RankGroup(tuple(range(RANKS)), digest, (Mesh((128, 8), tuple(range(RANKS))),))
    holders = TensorOwners.unite([group], {digest: listing})
    streams = streams_of(holders)
    seconds = time.process_time() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    loads = [sum(nbytes for _, nbytes in file) for file in streams.values()]
    assert sum(loads) > 990_000_000_000
    assert max(loads) / (sum(loads) / len(loads)) < 1.2
    assert seconds < 30
    assert peak < 100_000_000

    # All owners begin with the first rows of some tensor, which a few ranks have.
    for number, windows in enumerate(islice(schedule(streams, holders), 60)):
        if number % 20 == 0:
            assert max(sent_by(windows, holders).values()) <= SOURCE_BYTES + WINDOW_BYTES
    assert len(windows) > len(streams) / 2


def sent_by(windows: dict[int, Window], holders: TensorOwners) -> Counter[int]:
    sent: Counter[int] = Counter()
    for owner, window in windows.items():
        for name, start, stop in window:
            parts = holders.parts[name]
            for number in parts.between(start, stop):
                runs = parts.clip(number, start, stop)
                source = parts.source(number, owner)
                if runs is not None and source != owner:
                    sent[source] += runs.total
    return sent
