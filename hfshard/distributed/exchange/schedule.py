"""Which bytes go to which owner in each round: all ranks find the same, without a word."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from hfshard.distributed.exchange.holders import Holders

WINDOW_BYTES: Final = 4 * 1024 * 1024
"""Of one owner's files in one round: large for a network, and a few of them stay small beside a model."""
SOURCE_BYTES: Final = 64 * 1024 * 1024
"""That one rank sends in a round, about: it holds them in memory."""


class Stretch(NamedTuple):
    """Some consecutive bytes of a stored tensor."""

    name: str
    start: int
    stop: int


Window = list[Stretch]
"""What one owner gets in a round."""


def cut_windows(sizes: Sequence[tuple[str, int]], window_bytes: int) -> Iterator[Window]:
    """Cut consecutive tensors into windows of so many bytes; the last one may be shorter.

    Args:
        sizes: (name, bytes).
        window_bytes: Of each window.
    """
    window: Window = []
    room = window_bytes
    for name, nbytes in sizes:
        start = 0
        while start < nbytes:
            stop = min(nbytes, start + room)
            window.append(Stretch(name, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield window
                window, room = [], window_bytes
    if window:
        yield window


def schedule(
    streams: Mapping[int, Sequence[tuple[str, int]]],
    holders: Holders,
    *,
    window_bytes: int = WINDOW_BYTES,
    source_bytes: int = SOURCE_BYTES,
) -> Iterator[dict[int, Window]]:
    """The windows of each round, by owner.

    As a rule every owner gets its next window. But the files of many owners begin alike, and one rank has the first
    rows of all: an owner whose window would make a rank send too much waits for the next round, where it comes first.
    So owners that began together are soon at different places.

    Args:
        streams: Owner -> (name, bytes), in the order in which the owner wants them.
        holders: Who has what.
        window_bytes: Of a window.
        source_bytes: That a rank sends in a round, at most, unless all goes to one owner.
    """
    left = {owner: cut_windows(sizes, window_bytes) for owner, sizes in streams.items()}
    # A window that comes from more parts than these makes no rank send too much, even if all owners' windows are alike:
    # the parts are equal, but the first one and the last one may be cut.
    most_parts = len(streams) * window_bytes // source_bytes + 2
    is_crowded = len(streams) * window_bytes > source_bytes
    waiting: dict[int, tuple[Window, dict[int, int]]] = {}
    order = sorted(streams)
    while True:
        for owner in order:
            if owner not in waiting and (window := next(left[owner], None)) is not None:
                waiting[owner] = window, _sent_by(window, owner, holders, most_parts) if is_crowded else {}
        order = [owner for owner in order if owner in waiting]
        if not order:
            return
        given: dict[int, Window] = {}
        load: dict[int, int] = {}
        for owner in order:
            window, sent = waiting[owner]
            if not given or all(load.get(rank, 0) + count <= source_bytes for rank, count in sent.items()):
                load |= {rank: load.get(rank, 0) + count for rank, count in sent.items()}
                given[owner] = window
                del waiting[owner]
        order = [owner for owner in order if owner not in given] + list(given)
        yield given


def _sent_by(window: Window, owner: int, holders: Holders, most_parts: int) -> dict[int, int]:
    """About how many bytes of a window each rank sends, of tensors of which the window has not many parts."""
    sent: dict[int, int] = {}
    for name, start, stop in window:
        parts = holders.parts_of(name)
        numbers = parts.between(start, stop)
        if len(numbers) <= most_parts:
            for number in numbers:
                source = parts.source(number, owner)
                if source != owner:
                    sent[source] = sent.get(source, 0) + parts.count_between(number, start, stop)
    return sent
