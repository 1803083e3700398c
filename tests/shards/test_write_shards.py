"""Files written by the shard writer, in literal bytes and with digests made without it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import struct
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

import hfshard
from hfshard.shards.write_shards import SafetensorsStream, WriteJob, file_order, write_shards

METADATA = {"hfshard": "1", "format": "pt"}


def job(path: Path, tensors: dict[str, torch.Tensor], **more: object) -> WriteJob:
    return WriteJob(str(path), file_order(tensors), METADATA, **more)  # type: ignore[arg-type]


def test_the_bytes_of_a_shard(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {"small": torch.tensor([7], dtype=torch.uint8), "w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t()}
    (digest,) = write_shards([job(path, tensors)], checksum="sha256")
    header = (
        b'{"__metadata__":{"hfshard":"1","format":"pt"},"w":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},'
        b'"small":{"dtype":"U8","shape":[1],"data_offsets":[16,17]}}'
    )
    data = struct.pack("<4f", 1, 3, 2, 4) + b"\x07"
    raw = struct.pack("<Q", 4088) + header.ljust(4088) + data
    assert path.read_bytes() == raw
    assert digest.size == 4096 + 17
    assert digest.sha256 == hashlib.sha256(raw).hexdigest()
    assert digest.fingerprint == xxhash.xxh3_128_hexdigest(raw)  # all of it
    assert digest.tensor_digests == xxhash.xxh3_64_hexdigest(data[:16]) + xxhash.xxh3_64_hexdigest(b"\x07")


def test_the_sample_has_the_first_4_kib_of_each_tensor_whatever_its_strides(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    wide = torch.arange(3000.0).reshape(300, 10).t()  # rows of 1,200 bytes: three and a bit
    long = torch.arange(5000.0)
    (digest,) = write_shards([job(path, {"wide": wide, "long": long})], checksum=None)
    raw = path.read_bytes()
    chosen = raw[: 4096 + 4096] + raw[4096 + 12_000 : 4096 + 12_000 + 4096]
    assert digest.fingerprint == xxhash.xxh3_128_hexdigest(chosen)
    assert (digest.sha256, digest.xxh3, digest.tensor_digests) == (None, None, None)


def test_of_many_tensors_1024_are_sampled(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {f"t{i}": torch.tensor([i % 256], dtype=torch.uint8) for i in range(2048)}
    (digest,) = write_shards([job(path, tensors)], checksum=None)
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    assert digest.fingerprint == xxhash.xxh3_128_hexdigest(raw[:start] + raw[start::2])


def test_a_single_file_states_its_own_digests_which_are_of_it_with_zeros_in_their_place(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    metadata = {"format": 1, "files": {}, "tied_names": {}}
    (digest,) = write_shards([job(path, {"a": torch.ones(2)}, hfshard_metadata=metadata)], checksum="sha256")
    raw = path.read_bytes()
    stated = json.loads(json.loads(raw[8:4096])["__metadata__"]["hfshard"])
    assert stated == {
        "fingerprint": digest.fingerprint,
        "sha256": digest.sha256,
        "tensor_digests": digest.tensor_digests,
        **metadata,
    }
    blank = raw
    for digits in (digest.fingerprint, digest.sha256, digest.tensor_digests):
        assert digits is not None and blank.count(digits.encode()) == 1
        blank = blank.replace(digits.encode(), b"0" * len(digits))
    assert hashlib.sha256(blank).hexdigest() == digest.sha256


def test_a_file_that_exists_is_never_written_to(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write_shards([job(path, {"a": torch.ones(2)})], checksum=None)
    assert path.read_bytes() == b"mine"


@pytest.mark.parametrize("count", [1, 2, 9])
def test_records_come_in_the_order_of_the_jobs_and_progress_adds_up(count: int, tmp_path: Path) -> None:
    seen: list[int] = []
    jobs = [job(tmp_path / f"{i}", {"a": torch.zeros(i + 1, 1000)}) for i in range(count)]
    records = write_shards(jobs, checksum="xxh3", progress_callback=seen.append)
    assert [digest.size for digest in records] == [4096 + 4000 * (i + 1) for i in range(count)]
    assert sum(seen) == sum(digest.size or 0 for digest in records)


def test_the_first_error_of_any_file_is_raised(tmp_path: Path) -> None:
    jobs = [job(tmp_path / f"{i}", {"a": torch.zeros(10)}) for i in range(6)]
    jobs[3] = job(tmp_path / "missing" / "x", {"a": torch.zeros(10)})
    with pytest.raises(FileNotFoundError, match="missing"):
        write_shards(jobs, checksum=None)


def test_tensors_with_larger_elements_come_first_and_so_all_are_aligned() -> None:
    dtypes = {"i8": torch.int8, "f32": torch.float32, "c64": torch.complex64, "bool": torch.bool, "f16": torch.float16}
    tensors = {name: torch.zeros(3, dtype=dtype) for name, dtype in dtypes.items()}
    assert list(file_order(tensors)) == ["c64", "f32", "f16", "i8", "bool"]


# A stream of a shard reads like the file of the same header and tensors, wherever reading begins.

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
