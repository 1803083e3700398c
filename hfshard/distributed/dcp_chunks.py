"""Chunks of torch.distributed.checkpoint, which are rectangles of tensors: their boxes, and how they cover a tensor."""

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
"""The offsets at which a rectangle begins, and its shape."""


def chunk_box(chunk: Chunk) -> Box:
    """Return a rectangle as a box.

    Example:
        >>> chunk_box(((2, 0), (3, 4)))
        (((2, 5),), ((0, 4),))
    """
    return tuple(((offset, offset + size),) if size else () for offset, size in zip(*chunk, strict=True))


def cover_problem(shape: Sequence[int], chunks: Sequence[Chunk]) -> str | None:
    """Describe why chunks do not cover a tensor, each element once; None if they do.

    Args:
        shape: Of the tensor.
        chunks: Of all ranks; empty ones are ignored.

    Example:
        >>> cover_problem((4,), [((0,), (2,)), ((2,), (1,))])
        '1 of its 4 elements are in no chunk'
    """
    parts = [chunk for chunk in chunks if prod(chunk[1])]
    for offsets, sizes in parts:
        if len(offsets) != len(shape) or not all(
            0 <= offset <= offset + size <= most for offset, size, most in zip(offsets, sizes, shape)
        ):
            return f"a chunk at {list(offsets)} of shape {list(sizes)} is outside the tensor"
    if not prod(shape):
        return None
    missing = prod(shape) - sum(prod(sizes) for _, sizes in parts)
    if missing > 0:
        return f"{missing} of its {prod(shape)} elements are in no chunk"
    return "some of its elements are in several chunks" if missing < 0 or _do_overlap(shape, parts) else None


def check_held(name: str, value: object, box: Box, doing: str) -> None:
    """Reject a DTensor of which this rank has another part than torch.distributed.checkpoint says.

    torch describes a rank's part as one rectangle, which it computes by a rule that is wrong for some layouts.

    Args:
        name: The tensor's name.
        value: From the state dict; anything but a DTensor is accepted.
        box: What torch.distributed.checkpoint says.
        doing: "save" or "load", for the message.

    Raises:
        UnstorableTensorError: The parts differ; the error names the tensor.
    """
    if not is_dtensor(value):
        return
    held = SpreadTensor.of(value, name).stored_box
    if held == box or not (box_elements(held) or box_elements(box)):
        return
    raise UnstorableTensorError(
        f"torch.distributed.checkpoint cannot {doing} {name!r}: it describes a rank's part as one rectangle, here "
        f"{_words(box)}, but under the placements {value.placements} this rank has {_words(held)}. Use "
        f"hfshard.{doing}_state_dict, which supports them, or redistribute the tensor first.",
        fqn=name,
        expected=held,
        actual=box,
    )


def state_dict_of(planner: object) -> Mapping[str, Any]:
    """Return the flat state dict of a planner; empty if it is not where torch's own planners have it."""
    found = getattr(planner, "state_dict", None)
    return found if isinstance(found, Mapping) else {}


def _do_overlap(shape: Sequence[int], chunks: Sequence[Chunk]) -> bool:
    """Return whether any element is in two chunks, given that the chunks' element counts add up to the tensor's.

    The tensor is cut wherever a chunk begins or ends, so that each chunk consists of complete cells.
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
