"""The memory of parts: bounded for all uploads together, used again, and given back."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from hfshard.stores.object_store import BufferPool

MIB = 1 << 20


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> BufferPool:
    monkeypatch.setenv("HFSHARD_STORE_MEMORY", "32MiB")  # of which parts may take 24
    memory = BufferPool()
    memory.join()
    return memory


def test_who_finds_no_room_waits_for_a_part_that_is_sent(memory: BufferPool) -> None:
    lent = [memory.lend(memory.take_buffer(8 * MIB), 8 * MIB) for _ in range(3)]
    taken: list[int] = []
    waiting = threading.Thread(target=lambda: taken.append(len(memory.take_buffer(8 * MIB))))
    waiting.start()
    waiting.join(0.05)
    assert taken == []

    lent.pop()
    waiting.join(60)
    assert taken == [8 * MIB]


def test_a_buffer_is_used_again_when_nobody_holds_its_view(memory: BufferPool) -> None:
    first = memory.take_buffer(8 * MIB)
    view = memory.lend(first, 5)
    assert len(view) == 5
    assert memory.take_buffer(8 * MIB) is not first
    del view
    assert memory.take_buffer(8 * MIB) is first


def test_a_part_that_is_larger_than_all_there_is_comes_alone(memory: BufferPool) -> None:
    large = memory.take_buffer(40 * MIB)
    taken: list[int] = []
    waiting = threading.Thread(target=lambda: taken.append(len(memory.take_buffer(40 * MIB))))
    waiting.start()
    waiting.join(0.05)
    assert taken == []
    memory.give_back_buffer(large)
    waiting.join(60)
    assert taken == [40 * MIB]


def test_a_buffer_that_is_dropped_returns_its_bytes(memory: BufferPool) -> None:
    buffer = memory.take_buffer(8 * MIB)
    assert memory.taken_bytes == 8 * MIB
    del buffer
    gc.collect()
    assert memory.taken_bytes == 0


def test_nothing_is_kept_after_the_last_upload(memory: BufferPool) -> None:
    buffer = memory.take_buffer(8 * MIB)
    memory.leave()
    memory.give_back_buffer(buffer)
    memory.join()
    assert memory.take_buffer(8 * MIB) is not buffer


def test_a_forked_child_has_none_of_its_parents_buffers(memory: BufferPool) -> None:
    buffer = memory.take_buffer(8 * MIB)
    view = memory.lend(memory.take_buffer(8 * MIB), 8 * MIB)

    child = os.fork()
    if not child:
        del view
        memory.give_back_buffer(buffer)
        memory.leave()
        memory.join()
        own = memory.take_buffer(8 * MIB)
        # Nothing of the parent's was subtracted, or kept to be used again.
        is_right = memory.taken_bytes == 8 * MIB and own is not buffer
        memory.give_back_buffer(own)
        os._exit(0 if is_right and memory.take_buffer(8 * MIB) is own else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert memory.taken_bytes == 16 * MIB
