"""What the leader orders, as the other ranks read it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from hfshard._util.threads import start_worker
from hfshard.commit.transaction import KnownFile
from hfshard.distributed.rank_writer import WindowQueue, WriteTask
from hfshard.format.index import FileDigest
from hfshard.shards.write_shards import WriteJob
from hfshard.tensors.stored_tensor import RawTensor, TensorLayout

NAMES = [f"w{number}" for number in range(1500)]
LAYOUTS = {name: TensorLayout("F32", (2000,), 8000) for name in NAMES[:-1]} | {"w1499": TensorLayout("U8", (3,), 3)}


def job(path: str, names: list[str], like: os.stat_result | None = None) -> WriteJob:
    tensors = {name: RawTensor(LAYOUTS[name], lambda _: iter(())) for name in names}
    return WriteJob(path, tensors, {"format": "pt"}, {"files": {}} if like else None, like)


def test_an_order_survives_json_with_names_as_numbers(tmp_path: Path) -> None:
    (tmp_path / "old").touch(mode=0o640)
    like = os.stat(tmp_path / "old")
    order = WriteTask.of("write", [job("one", ["w5", "w6", "w7", "w2"], like), job("two", [])], "sha256")

    raw = order.to_json(NAMES)
    again = WriteTask.from_json(raw, NAMES)

    assert b'["one", [[5, 8], [2, 3]], {"format": "pt"}, {"files": {}}, [416, ' in raw
    assert again == order
    first, second = again.files
    assert first.names == ("w5", "w6", "w7", "w2")
    assert first.replaced is not None
    assert (stat.S_IMODE(first.replaced.st_mode), first.replaced.st_gid) == (0o640, like.st_gid)
    assert second.replaced is None


def test_an_order_to_link_tells_of_each_file_what_is_known() -> None:
    known = [
        KnownFile("old/one", FileDigest(8192, xxh3="5e" * 16, fingerprint="0f" * 16)),
        KnownFile("b", FileDigest(1)),
    ]
    order = WriteTask.of("link", [job("one", ["w0"]), job("two", ["w1499"])], "xxh3", known)

    assert WriteTask.from_json(order.to_json(NAMES), NAMES) == order
    assert [file.known for file in order.files] == known
    assert order.wanted_bytes(order.files[0], LAYOUTS) == [("w0", 8000)]


def test_fingerprints_want_the_first_bytes_of_chosen_tensors_only() -> None:
    few = WriteTask.of("fingerprint", [job("", ["w0", "w1499"])], None)
    many = WriteTask.of("fingerprint", [job("", NAMES)], None)
    write = WriteTask.of("write", [job("", ["w0", "w1499"])], None)

    assert few.wanted_bytes(few.files[0], LAYOUTS) == [("w0", 4096), ("w1499", 3)]
    assert len(many.wanted_bytes(many.files[0], LAYOUTS)) == 1024
    assert write.wanted_bytes(write.files[0], LAYOUTS) == [("w0", 8000), ("w1499", 3)]


# The queue between the rounds and the writing thread.


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
