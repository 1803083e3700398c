"""Where the bytes of a box lie: worked out by hand, compared with numpy's indexing, and within bounds of time."""

from __future__ import annotations

import random
from math import prod
from time import process_time

import numpy as np

from hfshard.distributed.layout import Box, Interval
from hfshard.distributed.spread_tensor import BoxRuns, Runs, gather_into, scatter_into


def _listed(runs: Runs) -> list[tuple[int, int, int]]:
    return list(zip(runs.offsets.tolist(), runs.lengths.tolist(), runs.positions.tolist(), strict=True))


def test_runs_are_those_worked_out_by_hand() -> None:
    columns: Box = (((0, 2),), ((1, 3),))
    gaps: Box = (((0, 1), (2, 3)), ((0, 4),))
    experts: Box = (((1, 3),), ((0, 1),), ((0, 2),))

    assert _listed(Runs.of_box((2, 4), 2, columns)) == [(2, 4, 0), (10, 4, 4)]
    assert _listed(Runs.of_box((3, 4), 1, gaps)) == [(0, 4, 0), (8, 4, 4)]
    assert _listed(Runs.of_box((3, 2, 2), 4, experts)) == [(16, 8, 0), (32, 8, 8)]
    assert _listed(Runs.of_box((3, 4), 2, (((0, 3),), ((0, 4),)))) == [(0, 24, 0)]
    assert _listed(Runs.of_box((), 8, ())) == [(0, 8, 0)]
    assert _listed(Runs.of_box((0, 3), 8, ((), ((0, 3),)))) == []
    assert _listed(Runs.of_box((2, 4), 2, (((0, 2),), ()))) == []


def test_clip_keeps_the_places_in_the_local_tensor() -> None:
    runs = Runs.of_box((3, 4), 2, (((0, 3),), ((1, 3),)))  # bytes 2 to 6, 10 to 14 and 18 to 22

    assert _listed(runs.clip(4, 20)) == [(4, 2, 2), (10, 4, 4), (18, 2, 8)]
    assert _listed(runs.clip(11, 13)) == [(11, 2, 5)]
    assert _listed(runs.clip(6, 10)) == []
    assert _listed(runs.clip(0, 99)) == [(2, 4, 0), (10, 4, 4), (18, 4, 8)]
    assert runs.clip(4, 20).total == 8


def _random_intervals(size: int, numbers: random.Random) -> tuple[Interval, ...]:
    if numbers.random() < 0.4:
        return ((0, size),)
    cuts = sorted(numbers.sample(range(size + 1), min(size + 1, numbers.choice([0, 2, 2, 2, 4])) // 2 * 2))
    return tuple(zip(cuts[::2], cuts[1::2], strict=True))


def test_runs_of_random_boxes_are_what_indexing_gives() -> None:
    numbers = random.Random(13)
    for _ in range(400):
        shape = tuple(numbers.randint(1, 7) for _ in range(numbers.randint(0, 4)))
        box = tuple(_random_intervals(size, numbers) for size in shape)
        itemsize = numbers.choice([1, 2, 8])
        nbytes = prod(shape) * itemsize
        part = np.arange(nbytes).reshape(*shape, itemsize)
        for dim, intervals in enumerate(box):
            part = np.take(part, [index for start, stop in intervals for index in range(start, stop)], axis=dim)
        expected = part.ravel().tolist()
        start = numbers.randint(0, nbytes)
        stop = numbers.randint(start, nbytes + 2)
        within = [(place, place_in_local) for place_in_local, place in enumerate(expected) if start <= place < stop]

        runs = Runs.of_box(shape, itemsize, box)
        clipped = BoxRuns(shape, itemsize, box).clip(start, stop)

        assert [offset + i for offset, length, _ in _listed(runs) for i in range(length)] == expected
        assert runs.total == BoxRuns(shape, itemsize, box).total == len(expected)
        assert _listed(clipped) == _listed(runs.clip(start, stop))
        assert [(offset + i, at + i) for offset, length, at in _listed(clipped) for i in range(length)] == within
        _check_copies(nbytes, clipped)


def _check_copies(nbytes: int, runs: Runs) -> None:
    source = np.arange(nbytes, dtype=np.int64).astype(np.uint8)
    pieces = [source[offset : offset + length] for offset, length, _ in _listed(runs)]
    expected = np.concatenate([source[:0], *pieces])
    packed = np.zeros(runs.total, np.uint8)
    spread = np.full(nbytes, 255, np.uint8)

    gather_into(packed, source, runs.offsets, runs.lengths)
    scatter_into(spread, runs.offsets, runs.lengths, packed)

    assert packed.tolist() == expected.tolist()
    for offset, length, _ in _listed(runs):
        assert spread[offset : offset + length].tolist() == source[offset : offset + length].tolist()
        spread[offset : offset + length] = 255
    assert (spread == 255).all()


def test_windows_of_a_column_shard_cost_what_they_hold() -> None:
    # Rank 3 of 8 of a matrix of 50,000 x 20,000 in bf16: 50,000 runs; a window of 4 MiB has 105 rows.
    shape = (50_000, 20_000)
    part = BoxRuns(shape, 2, (((0, 50_000),), ((7_500, 10_000),)))
    window = 4 << 20
    begin = process_time()

    clips = [part.clip(start, start + window) for start in range(0, 2 * prod(shape), window)]

    assert process_time() - begin < 1  # 0.02 s of an idle core
    assert sum(clip.total for clip in clips) == part.total == 250_000_000
    assert max(len(clip.offsets) for clip in clips) == 105
