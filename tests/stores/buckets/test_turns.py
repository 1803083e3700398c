"""Transfers over Xet take turns, so that memory is bounded."""

from __future__ import annotations

import threading

from hfshard.stores.buckets import turns
from hfshard.stores.buckets.turns import Turn


def test_memory_says_how_many_go_at_once() -> None:
    at_once = [turns.uploads_at_once(size << 20) for size in (32, 256, 512, 1024)]
    assert at_once == [1, 1, 2, 5]
    assert [turns.downloads_at_once(size << 20) for size in (32, 256, 512, 1024)] == [1, 4, 8, 16]


def test_large_transfers_wait_for_each_other_and_small_ones_do_not() -> None:
    row = turns._Turns(lambda memory_bytes: 1)
    first, again, small = Turn(row, 10**8), Turn(row, 10**8), Turn(row, 10)
    begun: list[Turn] = []
    other = threading.Thread(target=lambda: begun.append(Turn(row, 10**8)))
    other.start()

    other.join(0.05)
    assert not begun  # the thread that has a turn got another one; the other thread waits for both
    again.end()
    small.end()
    other.join(0.05)
    assert not begun
    del first  # forgotten, not ended
    other.join(5)
    assert len(begun) == 1
