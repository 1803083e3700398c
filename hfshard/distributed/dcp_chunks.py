"""What torch.distributed.checkpoint calls chunks, rectangles of tensors: whether they are whole, and where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from hfshard.distributed.layout import Box, box_elements
from hfshard.distributed.spread_tensor import SpreadTensor
from hfshard.errors import UnstorableTensorError
from hfshard.tensors.state_dict import is_dtensor

Chunk = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a rectangle begins, and its shape."""


def chunk_box(chunk: Chunk) -> Box:
    """The box that is a rectangle.

    Example:
        >>> chunk_box(((2, 0), (3, 4)))
        (((2, 5),), ((0, 4),))
    """
    return tuple(((offset, offset + size),) if size else () for offset, size in zip(*chunk, strict=True))


def cover_problem(shape: Sequence[int], chunks: Sequence[Chunk]) -> str | None:
    """Say why chunks are not the whole of a tensor, each element once; None where they are.

    Args:
        shape: The tensor's.
        chunks: Of all ranks; empty ones count for nothing.

    Example:
        >>> cover_problem((4,), [((0,), (2,)), ((2,), (1,))])
        '1 of its 4 elements are in no chunk'
    """
    parts = [chunk for chunk in chunks if prod(chunk[1])]
    for offsets, sizes in parts:
        if len(offsets) != len(shape) or not all(
            0 <= offset <= offset + size <= most for offset, size, most in zip(offsets, sizes, shape)
        ):
            return f"a chunk at {list(offsets)} of shape {list(sizes)} lies outside of it"
    if not prod(shape):
        return None
    missing = prod(shape) - sum(prod(sizes) for _, sizes in parts)
    if missing > 0:
        return f"{missing} of its {prod(shape)} elements are in no chunk"
    return "some of its elements are in several chunks" if missing < 0 or _do_overlap(shape, parts) else None


def check_held(name: str, value: object, box: Box, doing: str) -> None:
    """Refuse a DTensor of which this rank holds something else than torch.distributed.checkpoint says.

    It describes what a rank holds as one rectangle, which it computes by a rule that is wrong for some layouts.

    Args:
        name: Its own.
        value: From the state dict; anything but a DTensor is accepted.
        box: What it says.
        doing: "save" or "load", for the message.

    Raises:
        UnstorableTensorError: It names the tensor.
    """
    if not is_dtensor(value):
        return
    held = SpreadTensor.of(value, name).stored_box
    if held == box or not (box_elements(held) or box_elements(box)):
        return
    raise UnstorableTensorError(
        f"torch.distributed.checkpoint can't {doing} {name!r}: it describes what a rank holds as one rectangle, here "
        f"{_words(box)}, but under the placements {value.placements} this rank holds {_words(held)}. "
        f"Use hfshard.{doing}_state_dict, which knows them, or redistribute the tensor first.",
        fqn=name,
        expected=held,
        actual=box,
    )


def state_dict_of(planner: object) -> Mapping[str, Any]:
    """The flat state dict of a planner; nothing where it does not have it as torch's own planners do."""
    found = getattr(planner, "state_dict", None)
    return found if isinstance(found, Mapping) else {}


def _do_overlap(shape: Sequence[int], chunks: Sequence[Chunk]) -> bool:
    """Whether chunks that together have as many elements as the tensor have one of them twice.

    The tensor is cut wherever a chunk begins or ends, so that each chunk is some whole cells.
    """
    if len(chunks) == 1:
        return False
    numbers: list[dict[int, int]] = []
    for dim in range(len(shape)):
        cuts = {offsets[dim] for offsets, _ in chunks} | {offsets[dim] + sizes[dim] for offsets, sizes in chunks}
        numbers.append({cut: number for number, cut in enumerate(sorted(cuts))})
    is_taken = np.zeros([len(found) - 1 for found in numbers], np.bool_)
    for offsets, sizes in chunks:
        cells = is_taken[
            tuple(
                slice(found[offset], found[offset + size])
                for found, offset, size in zip(numbers, offsets, sizes, strict=True)
            )
        ]
        if cells.any():
            return True
        cells[...] = True
    return False


def _words(box: Box) -> str:
    if not box_elements(box):
        return "nothing"
    return "[" + ", ".join(" and ".join(f"{start}:{stop}" for start, stop in intervals) for intervals in box) + "]"
