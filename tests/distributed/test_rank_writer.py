"""What the leader orders, as the other ranks read it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hfshard.commit.transaction import KnownFile
from hfshard.distributed.rank_writer import WriteTask
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
