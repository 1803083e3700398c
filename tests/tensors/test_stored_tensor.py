"""The bytes of a tensor, block by block: those of its contiguous copy, whatever its strides and its way."""

from __future__ import annotations

import struct

import pytest
import torch

from hfshard.errors import UnstorableTensorError
from hfshard.tensors.stored_tensor import (
    bytes_view,
    check_storable,
    device_blocks,
    is_complete_tensor,
    iter_blocks,
    small_bytes,
)

BASE = torch.arange(5000, dtype=torch.int32)

TENSORS = {
    "whole": BASE,
    "part": BASE[1:4444],
    "matrix": BASE.reshape(50, 100),
    "turned": BASE.reshape(50, 100).t(),
    "long rows": BASE.reshape(2, 2500).t().reshape(2500, 2).t(),
    "every other": BASE[::2],
    "expanded": BASE[:10].reshape(10, 1).expand(10, 300),
    "deep": BASE.reshape(5, 10, 100).permute(2, 0, 1),
    "scalar": torch.tensor(7, dtype=torch.int16),
    "one": torch.tensor([1.5], dtype=torch.bfloat16),
    "flags": BASE.reshape(50, 100).t() > 2500,
}


def expected(tensor: torch.Tensor) -> bytes:
    return bytes(bytes_view(tensor.contiguous()))


@pytest.mark.parametrize("block_bytes", [16, 4096, 1024 * 1024])
@pytest.mark.parametrize("name", TENSORS)
def test_blocks_are_the_bytes_in_row_major_order(name: str, block_bytes: int) -> None:
    blocks = [bytes(block) for block in iter_blocks(TENSORS[name], block_bytes)]
    assert b"".join(blocks) == expected(TENSORS[name])
    assert max(map(len, blocks)) <= block_bytes


@pytest.mark.parametrize("block_bytes", [16, 4096, 1024 * 1024])
@pytest.mark.parametrize("name", TENSORS)
def test_the_way_of_a_gpu_gives_the_same_bytes_by_two_buffers(name: str, block_bytes: int) -> None:
    blocks, places = [], set()
    for block in device_blocks(TENSORS[name], block_bytes):
        blocks.append(bytes(block))
        places.add(memoryview(block).obj.owner.data_ptr())  # type: ignore[attr-defined]
    assert b"".join(blocks) == expected(TENSORS[name])
    assert len(places) <= 2


def test_the_way_of_a_gpu_uses_host_memory_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        assert b"".join(map(bytes, device_blocks(BASE, 4096))) == expected(BASE)


def test_an_empty_tensor_has_no_blocks() -> None:
    assert list(iter_blocks(torch.empty(0, 3), 4096)) == []


def test_a_tensor_that_its_view_negates_has_the_bytes_of_its_values() -> None:
    negated = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj().imag

    assert b"".join(map(bytes, iter_blocks(negated, 16))) == struct.pack("<2f", -2, 4)


PAIRS = torch.view_as_complex(torch.arange(8, dtype=torch.float64).reshape(4, 2))


@pytest.mark.parametrize("limit_bytes", [0, 2, 4, 20_000])
@pytest.mark.parametrize("name", TENSORS)
def test_a_small_contiguous_tensor_is_copied_at_once(name: str, limit_bytes: int) -> None:
    tensor = TENSORS[name]
    taken = tensor.is_contiguous() and tensor.nbytes <= limit_bytes
    assert small_bytes(tensor, limit_bytes) == (expected(tensor) if taken else None)


@pytest.mark.parametrize(
    ("tensor", "raw"),
    [
        (torch.empty(0, 3), b""),
        (torch.nn.Parameter(torch.ones(1)), b"\0\0\x80\x3f"),
        (PAIRS[:1], b"\0\0\0\0\0\0\0\0" + b"\0\0\0\0\0\0\xf0\x3f"),
        (PAIRS.conj(), None),
        (PAIRS.conj().imag, None),
        (torch._neg_view(torch.ones(1)), None),
        (torch.ones(1, device="meta"), None),
        (torch.ones(1).as_subclass(type("Other", (torch.Tensor,), {})), None),
    ],
)
def test_what_memory_does_not_hold_as_it_is_stored_is_not_copied(tensor: torch.Tensor, raw: bytes | None) -> None:
    assert small_bytes(tensor, 100) == raw


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch deprecates these dtypes
def test_a_packed_dtype_is_refused_as_such_not_as_freed_memory() -> None:
    with pytest.raises(UnstorableTensorError, match=r"Cannot store 'w': the format has no dtype torch\.quint4x2"):
        check_storable("w", torch.empty(4, dtype=torch.quint4x2))


def test_a_tensor_is_complete_unless_another_library_may_have_its_elements() -> None:
    marked = torch.ones(2)
    marked.ds_id = 1  # type: ignore[attr-defined]

    complete = [torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.ones(2, device="meta"), torch.ones(())]
    others = [torch.empty(0), marked, torch.ones(2).as_subclass(torch.nn.Buffer), "text", None]
    assert [is_complete_tensor(value) for value in complete] == [True] * 4
    assert [is_complete_tensor(value) for value in others] == [False] * 5
