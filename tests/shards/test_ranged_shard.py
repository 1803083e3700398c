"""Which ranges are requested of a file, in what order its bytes may arrive, and what is compared on the way."""

from __future__ import annotations

import hashlib
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import hfshard
from hfshard.errors import IntegrityError
from hfshard.format.index import FileDigest
from hfshard.shards.ranged_shard import (
    Piece,
    RangedShard,
    UnorderedDigest,
    _read_ahead,
    read_full_tensors,
    read_pieces,
)

CPU = torch.device("cpu")
CONTENT = bytes(range(251)) * 20_000  # no window of a power of two repeats it


class Ranges:
    """A file that is read by ranges, each of which is noted as its start and length."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.asked: list[tuple[int, int]] = []

    def list_objects(self, folder: str = "") -> dict[str, Any]:
        return {"x": self.find("x")}

    def folders(self, folder: str = "") -> list[str]:
        return []

    def find(self, name: str) -> Any:
        return SimpleNamespace(name=name, size=len(self.content), etag="1")

    def read_into(self, found: Any, begin: int, target: memoryview) -> None:
        self.asked.append((begin, len(target)))
        target[:] = self.content[begin : begin + len(target)]


def open_shard(path: Path) -> tuple[RangedShard, Ranges]:
    ranges = Ranges(path.read_bytes())
    return RangedShard(ranges, ranges.find("x"), "far/x"), ranges


def test_data_that_came_with_the_header_is_not_requested_again(tmp_path: Path) -> None:
    hfshard.save_state_dict({"x": torch.arange(20_000.0)}, tmp_path)
    shard, ranges = open_shard(tmp_path / "model.safetensors")
    found = memoryview(bytearray(80_000))

    shard.read_into(4096, found)

    assert found == torch.arange(20_000.0).numpy().tobytes()
    assert ranges.asked == [(0, 32_768), (32_768, 51_328)]
    assert (shard.asked_bytes(4096, 84_096), shard.asked_bytes(40_000, 50_000)) == (51_328, 10_000)


@pytest.mark.parametrize("block_bytes", [4096, 65_536, 131_072])
def test_blocks_can_be_written_so_that_torch_takes_them_without_a_warning(block_bytes: int, tmp_path: Path) -> None:
    hfshard.save_state_dict({"x": torch.arange(100_000.0)}, tmp_path)
    shard, _ = open_shard(tmp_path / "model.safetensors")

    blocks = list(shard.blocks(shard.header.tensors["x"], block_bytes))

    assert not any(block.readonly for block in blocks)
    assert b"".join(blocks) == torch.arange(100_000.0).numpy().tobytes()


def test_pieces_with_at_most_128_kib_between_them_share_a_request(tmp_path: Path) -> None:
    hfshard.save_state_dict({"x": torch.arange(100_000, dtype=torch.int32)}, tmp_path)
    shard, ranges = open_shard(tmp_path / "model.safetensors")
    pieces = [Piece(start, 4, memoryview(bytearray(4))) for start in (40_000, 171_076, 302_153)]

    assert read_pieces([(shard, pieces[::-1])]) == 131_080 + 4
    assert sorted(ranges.asked[1:]) == [(40_000, 131_080), (302_153, 4)]
    assert [int.from_bytes(piece.target or b"", "little") for piece in pieces[:2]] == [8976, 41_745]


def test_a_thread_that_reads_on_requests_windows_of_twice_the_size() -> None:
    ranges = Ranges(CONTENT)
    file: Any = SimpleNamespace(size=5_020_000, read_into=lambda at, target: ranges.read_into(None, at, target))
    for start, count in ((0, 10), (10, 1000), ((1 << 20) - 5, 10), (5_019_993, 7)):
        assert _read_ahead(file, start, count) == CONTENT[start : start + count]
    RangedShard.close(file)

    assert ranges.asked == [(0, 1 << 20), (1 << 20, (2 << 20) - 5), (5_019_993, 7)]


def test_a_digest_takes_pieces_in_any_order_and_waits_for_none_that_was_given_up() -> None:
    digest, cancelled = UnorderedDigest(hashlib.sha256(), 10, 3), Event()
    digest.add(11, memoryview(b"b"), cancelled, stays=True)
    digest.add(12, memoryview(b"c"), cancelled, stays=True)
    is_whole_before = digest.is_whole
    digest.add(10, memoryview(b"a"), cancelled, stays=False)

    assert (is_whole_before, digest.is_whole, digest.head) == (False, True, b"a")
    assert digest.hexdigest() == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    cancelled.set()
    with pytest.raises(InterruptedError):
        UnorderedDigest(hashlib.sha256(), 0, 2).add(1, memoryview(b"x"), cancelled, stays=False)


def test_a_tensor_that_is_read_is_compared_with_its_own_digest(tmp_path: Path) -> None:
    hfshard.save_state_dict({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    shard = open_shard(path)[0]
    shard.recorded = shard.hfshard_metadata.digests

    assert read_full_tensors([(shard, ["a"])], CPU)["a"].tolist() == [1, 1]
    assert read_full_tensors([(shard, ["b"])], CPU, level="none")["b"].tolist() != [1, 1]
    with pytest.raises(IntegrityError, match=r"^Tensor 'b' of shard 'far/x' is not what was saved: its xxh3 is"):
        read_full_tensors([(shard, ["a", "b"])], CPU)


def test_without_digests_of_tensors_a_full_check_reads_the_others_too(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, path)
    saved = hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    shard, _ = open_shard(path)
    shard.recorded = FileDigest(sha256=saved)

    assert read_full_tensors([(shard, ["a"])], CPU)["a"].tolist() == [1, 1]
    with pytest.raises(IntegrityError, match=rf"^Shard 'far/x' is not what was saved: .* but was {saved}\. Read"):
        read_full_tensors([(shard, ["a"])], CPU, level="full")
