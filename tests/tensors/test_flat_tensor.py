"""Tensors of which a rank has an interval: what it has, and what torch must not do with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hfshard.errors import InvalidArgumentError
from hfshard.tensors.flat_tensor import FlatLayout, FlatTensor


def test_flat_tensors_are_cut_as_torch_chunks_them() -> None:
    elements = torch.arange(11)
    parts = elements.chunk(4)
    for first, count in ((0, 11), (2, 5), (9, 2), (3, 0)):
        layout = FlatLayout(ranks=(4, 5, 6, 7), is_cut=True, elements=11, first=first)
        whole = elements[first : first + count]
        for rank, part in zip(layout.ranks, parts, strict=True):
            start, stop = layout.held(count, rank)
            held = [one for one in part.tolist() if first <= one < first + count]
            assert whole[start:stop].tolist() == held
            assert FlatTensor.within(part, (count, 1), layout, rank).local.tolist() == held
    assert FlatLayout((0, 1), is_cut=False, elements=11, first=2).held(5, 1) == (0, 5)


def test_torch_sees_the_whole_shape_and_computes_nothing() -> None:
    layout = FlatLayout(ranks=(0, 1), is_cut=True, elements=6, first=0)
    part: Any = FlatTensor(torch.tensor([1.0, 2.0, 3.0]), (2, 3), layout)

    assert issubclass(FlatTensor, torch.Tensor)
    assert tuple(part.shape) == (2, 3)
    assert part.detach().local.tolist() == [1, 2, 3]
    assert part.to(torch.float64).local.dtype == torch.float64
    assert "local=3 elements" in repr(part)
    with pytest.raises(InvalidArgumentError, match=r"shape \[2, 3\], of which this rank has only an interval"):
        part.sum()
