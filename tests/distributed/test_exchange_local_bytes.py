"""Stretches of a tensor's bytes."""

from __future__ import annotations

import pytest
import torch

from hfshard.distributed.exchange import byte_range
from hfshard.tensors.stored_tensor import RawTensor, TensorLayout, iter_blocks

BASE = torch.arange(5 * 6 * 4, dtype=torch.int16).view(5, 6, 4)


@pytest.mark.parametrize(
    "tensor",
    [
        BASE,
        BASE.transpose(0, 2),
        BASE[:, 1:4, ::2],
        BASE[2, :, 3],
        BASE[:1].expand(3, 6, 4),
        torch.tensor(2.5, dtype=torch.float64),
        torch.complex(BASE[0].double(), BASE[1].double()),
        torch.complex(BASE[0].float(), BASE[1].float()).t().conj(),
        torch.arange(32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).view(4, 8).t(),
        RawTensor(TensorLayout("U8", (9,), 9), lambda _: iter([memoryview(b"01234"), memoryview(b"5678")])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_stretch_is_that_of_the_whole(tensor: torch.Tensor) -> None:
    everything = b"".join(bytes(block) for block in iter_blocks(tensor, 64))
    step = max(1, len(everything) // 9)
    for start in range(0, len(everything), step):
        for stop in range(start + 1, len(everything) + 1, step):
            assert byte_range(tensor, start, stop).tobytes() == everything[start:stop]


def test_a_contiguous_tensor_is_not_copied() -> None:
    tensor = torch.zeros(4, 4, dtype=torch.uint8)
    stretch = byte_range(tensor, 4, 12)
    tensor[1, 2] = 7
    assert stretch.tolist() == [0, 0, 7, 0, 0, 0, 0, 0]


def test_of_a_strided_tensor_only_some_rows_are_copied() -> None:
    peak: list[int] = []

    class Watched(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if getattr(func, "__name__", "") == "contiguous":
                peak.append(result.numel())
            return result

    columns = torch.zeros(1000, 100).t()
    with Watched():
        byte_range(columns, 4000 * 50 + 4, 4000 * 51 + 4)
        byte_range(columns, 4000 * 50 + 4, 4000 * 50 + 8)

    assert peak == [2000, 1]
