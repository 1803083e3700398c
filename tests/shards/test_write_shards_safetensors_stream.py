"""A stream of a shard reads like the file of the same header and tensors, wherever reading begins."""

from __future__ import annotations

import io
import os
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

import hfshard
from hfshard.shards.write_shards import SafetensorsStream

MIB = 1024 * 1024


def of_bytes(count: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + count).to(torch.uint8)


@given(
    sizes=st.lists(st.integers(0, 9), max_size=6),
    header=st.binary(max_size=9),
    steps=st.lists(st.tuples(st.integers(0, 70), st.one_of(st.none(), st.integers(-1, 70))), max_size=12),
)
def test_reads_and_seeks_like_a_file(sizes: list[int], header: bytes, steps: list[tuple[int, int | None]]) -> None:
    tensors = [of_bytes(size, 10 * number) for number, size in enumerate(sizes)]
    raw = header + b"".join(bytes(tensor.tolist()) for tensor in tensors)
    stream, file = SafetensorsStream(header, tensors), io.BytesIO(raw)
    for position, size in steps:
        if position % 2:
            assert stream.seek(position) == file.seek(position)
        assert stream.tell() == file.tell()
        assert stream.read(size) == file.read(size)
    assert stream.seek(0, os.SEEK_END) == len(raw)
    assert stream.read() == b""
    assert stream.seek(-len(raw), os.SEEK_CUR) == 0
    assert stream.read() == raw


def test_large_and_transposed_tensors_are_read_in_any_blocks() -> None:
    tensors = [
        torch.randn(1000, 1500).t(),
        torch.empty(0),
        torch.tensor(1.5),
        torch.randn(7 * MIB // 4),
        torch.empty(3, 0),
    ]
    header = b"h" * 4096
    raw = header + b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)
    stream, file, choice = SafetensorsStream(header, tensors), io.BytesIO(raw), random.Random(3)
    for _ in range(300):
        if choice.random() < 0.3:
            position = choice.choice([0, 4096, file.tell(), choice.randrange(len(raw)), len(raw), len(raw) + 5])
            stream.seek(position), file.seek(position)
        size = choice.choice([1, 10, 65_536, 5 * MIB])
        assert stream.read(size) == file.read(size)
    stream.seek(0)
    assert stream.read() == raw


def test_stream_is_a_file_object_of_bytes() -> None:
    stream = SafetensorsStream(b"head", [of_bytes(4)])
    assert isinstance(stream, io.BufferedIOBase)
    assert (stream.readable(), stream.seekable(), stream.writable()) == (True, True, False)
    assert (stream.read(0), stream.tell()) == (b"", 0)
    assert (stream.read(6), stream.tell()) == (b"head\x00\x01", 6)
    with pytest.raises(ValueError, match="negative seek position -1"):
        stream.seek(-1)
    assert (stream.tell(), stream.read()) == (6, b"\x02\x03")
    assert (SafetensorsStream(b"head", []).read(), SafetensorsStream(b"", []).read()) == (b"head", b"")


def test_stream_of_a_saved_shards_header_is_the_shard(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(3, dtype=torch.int64)}
    hfshard.save_state_dict(tensors, tmp_path)
    raw = (tmp_path / "model.safetensors").read_bytes()
    stored = load(raw)
    at = raw.index(tensors["b"].numpy().tobytes())  # the widest dtype comes first
    stream = SafetensorsStream(raw[:at], [stored["b"], stored["a"]])
    assert stream.read() == raw
