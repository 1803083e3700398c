"""The memory of parts: bounded for all uploads together, used again, and given back."""

from __future__ import annotations

import threading

import pytest

from hfshard.stores.byte_budget import BufferPool

MIB = 1 << 20


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> BufferPool:
    monkeypatch.setenv("HFSHARD_STORE_MEMORY", "32MiB")  # of which parts may take 24
    memory = BufferPool()
    memory.join()
    return memory


def test_who_finds_no_room_waits_for_a_part_that_is_sent(memory: BufferPool) -> None:
    lent = [memory.lend(memory.take(8 * MIB), 8 * MIB) for _ in range(3)]
    taken: list[int] = []
    waiting = threading.Thread(target=lambda: taken.append(len(memory.take(8 * MIB))))
    waiting.start()
    waiting.join(0.05)
    assert taken == []

    lent.pop()
    waiting.join(60)
    assert taken == [8 * MIB]


def test_a_buffer_is_used_again_when_nobody_holds_its_view(memory: BufferPool) -> None:
    first = memory.take(8 * MIB)
    view = memory.lend(first, 5)
    assert len(view) == 5
    assert memory.take(8 * MIB) is not first
    del view
    assert memory.take(8 * MIB) is first


def test_a_part_that_is_larger_than_all_there_is_comes_alone(memory: BufferPool) -> None:
    large = memory.take(40 * MIB)
    taken: list[int] = []
    waiting = threading.Thread(target=lambda: taken.append(len(memory.take(40 * MIB))))
    waiting.start()
    waiting.join(0.05)
    assert taken == []
    memory.give_back(large)
    waiting.join(60)
    assert taken == [40 * MIB]


def test_nothing_is_kept_after_the_last_upload(memory: BufferPool) -> None:
    buffer = memory.take(8 * MIB)
    memory.leave()
    memory.give_back(buffer)
    memory.join()
    assert memory.take(8 * MIB) is not buffer
