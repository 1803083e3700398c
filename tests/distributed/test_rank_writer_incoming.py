"""The queue between the rounds and the writing thread."""

from __future__ import annotations

import numpy as np
import pytest

from hfshard._util.threads import start_worker
from hfshard.distributed.rank_writer import WindowQueue


def test_bytes_come_out_in_order_whatever_the_windows_are() -> None:
    incoming = WindowQueue()
    content = np.arange(100, dtype=np.uint8)

    def put() -> None:
        for start in range(0, 100, 7):
            incoming.put(content[start : start + 7], lambda: True)

    future = start_worker(put, "put")
    taken = [[bytes(block) for block in incoming.blocks(nbytes)(16)] for nbytes in (20, 0, 79, 1)]

    assert future is not None
    future.result(timeout=60)
    assert [b"".join(blocks) for blocks in taken] == [
        content[:20].tobytes(), b"", content[20:99].tobytes(), content[99:].tobytes(),
    ]  # fmt: skip
    assert max(len(block) for blocks in taken for block in blocks) <= 16


def test_who_waits_for_bytes_ends_when_it_is_closed() -> None:
    incoming = WindowQueue()
    incoming.put(np.zeros(3, np.uint8), lambda: True)
    blocks = incoming.blocks(5)(16)
    assert len(next(blocks)) == 3
    incoming.close()
    with pytest.raises(InterruptedError):
        next(blocks)


def test_a_full_queue_is_left_when_nobody_takes() -> None:
    incoming = WindowQueue()
    asked = iter([True, True, True, False])
    for _ in range(3):
        incoming.put(np.zeros(1, np.uint8), lambda: next(asked))
    assert next(asked, None) is None
