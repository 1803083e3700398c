"""A tensor that is spread over ranks, as one of them sees it: the whole one's shape, and this rank's part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Self

import torch

from hfshard.distributed.layout import (
    Box,
    Coordinate,
    Interval,
    MeshLayout,
    box_shape,
    clip_box,
    held_box,
    local_slices,
    mesh_layout_of,
)
from hfshard.distributed.runs import Runs
from hfshard.errors import UnstorableTensorError
from hfshard.tensors.state_dict import is_dtensor, local_tensor, refuse_sharded_tensors
from hfshard.tensors.stored_tensor import check_storable

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, eq=False)
class SpreadTensor:
    """A tensor to store of which this rank has a part, or a copy, or nothing.

    It may be a rectangle of the tensor that the ranks hold, as one expert is of all experts in one parameter. Then its
    bytes are those of the rectangle, and its shape may lack dimensions in which the rectangle has one element.
    """

    shape: tuple[int, ...]
    """Of what is stored."""
    dtype: torch.dtype
    mesh: MeshLayout
    """How the source is spread."""
    source_shape: tuple[int, ...]
    """Of the whole tensor that the ranks hold."""
    window: tuple[Interval, ...] | None
    """The rectangle of the source that is stored, an interval per dimension; None: all of it."""
    coordinate: Coordinate | None
    """Where this rank stands in the mesh; None: it has no part."""
    local: torch.Tensor
    """This rank's part of the source, on its device; it shares the model's memory."""

    @classmethod
    def of(cls, tensor: DTensor, name: str) -> Self:
        """Describe a DTensor, without asking another rank.

        Args:
            tensor: On any device.
            name: For errors.

        Raises:
            UnstorableTensorError: Its placements can't be stored, or its local tensor can't.
        """
        shape = tuple(tensor.shape)
        mesh = mesh_layout_of(tensor, name)
        coordinate = tensor.device_mesh.get_coordinate()
        spread = cls(
            shape=shape,
            dtype=tensor.dtype,
            mesh=mesh,
            source_shape=shape,
            window=None,
            coordinate=None if coordinate is None else tuple(coordinate),
            local=local_tensor(tensor),
        )
        spread._check(name)
        return spread

    def view(self, window: Sequence[Interval], shape: tuple[int, ...]) -> Self:
        """A rectangle of the source, to be stored under a name of its own.

        Args:
            window: One interval per dimension of the source.
            shape: Of what is stored: the rectangle's, maybe without dimensions of one element.
        """
        return type(self)(shape, self.dtype, self.mesh, self.source_shape, tuple(window), self.coordinate, self.local)

    @property
    def stored_box(self) -> Box:
        """What this rank has, within the rectangle that is stored."""
        if self.coordinate is None:
            return tuple(() for _ in self.stored_sizes)
        box = held_box(self.source_shape, self.mesh, self.coordinate)
        return box if self.window is None else clip_box(box, self.window)

    @property
    def stored_sizes(self) -> tuple[int, ...]:
        """The shape that boxes and runs refer to: of what is stored, with all dimensions of the source.

        Of a scalar that this rank lacks it is (1,), as only a box that has a dimension can be empty.
        """
        if self.coordinate is None and not self.source_shape:
            return (1,)
        return window_sizes(self.source_shape, self.window)

    def runs(self) -> Runs:
        """Where the bytes of this rank's part lie among those that are stored."""
        return Runs.of_box(self.stored_sizes, self.dtype.itemsize, self.stored_box)

    def part(self) -> torch.Tensor:
        """This rank's part of what is stored: a view of the local tensor. An empty one may have any shape."""
        if self.window is None or self.coordinate is None or not self.local.numel():
            return self.local
        box = held_box(self.source_shape, self.mesh, self.coordinate)
        return self.local[local_slices(box, self.window)]

    def _check(self, name: str) -> None:
        """Refuse a local tensor that can't be stored, or is not what the placements say."""
        check_storable(name, self.local)
        if self.coordinate is None:
            return
        expected = box_shape(self.stored_box)
        if tuple(self.local.shape) != expected and (self.local.numel() or prod(expected)):
            raise UnstorableTensorError(
                f"Can't store {name!r}: this rank has a part of shape {list(self.local.shape)}, and its placements say "
                f"{list(expected)}. Make the DTensor by distribute_tensor, or pass from_local its shape and stride.",
                fqn=name,
                expected=expected,
                actual=tuple(self.local.shape),
            )


def window_sizes(source_shape: tuple[int, ...], window: Sequence[Interval] | None) -> tuple[int, ...]:
    """The shape that boxes and runs of a rectangle refer to; None: the source's own."""
    return source_shape if window is None else tuple(stop - start for start, stop in window)


def has_spread(tensors: Mapping[str, Any]) -> bool:
    """Whether any of the values is spread over ranks, and a save must be called by all of them."""
    return any(isinstance(value, SpreadTensor) or is_dtensor(value) for value in tensors.values())


def with_spread_tensors(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Put a `SpreadTensor` into the place of each DTensor; the other values stay.

    Args:
        tensors: Not changed.

    Raises:
        UnstorableTensorError: One can't be stored. No other rank was asked.
    """
    refuse_sharded_tensors(tensors)
    return {name: SpreadTensor.of(value, name) if is_dtensor(value) else value for name, value in tensors.items()}
