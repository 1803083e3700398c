"""What one rank says of its tensors to the others: names, shapes and placements, without any bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch

from hfshard.distributed.layout import Interval, MeshLayout, Placement
from hfshard.distributed.spread_tensor import SpreadTensor
from hfshard.format.digests import sha256_of
from hfshard.saving.save_request import SaveRequest
from hfshard.tensors.stored_tensor import TensorLayout, TensorLike, check_storable, tensor_layout

HeldTensor = TensorLike | SpreadTensor
"""What a rank has for one name: all of a tensor, or a part."""


class TensorEntry(NamedTuple):
    """One tensor of a rank. It is the same on all ranks that hold parts of the tensor in the same way."""

    layout: TensorLayout
    """Of what is stored."""
    itemsize: int
    """Bytes of an element."""
    source_shape: tuple[int, ...]
    """Of the whole tensor that the ranks hold."""
    window: tuple[Interval, ...] | None
    """The rectangle of it that is stored; None: all."""
    mesh: int | None
    """Number of the mesh over which it is spread, among the rank's meshes; None: the rank has all of it."""
    placements: tuple[Placement, ...]

    @classmethod
    def from_json(cls, value: list[Any]) -> Self:
        """Parse what JSON made of an entry."""
        layout, itemsize, source_shape, window, mesh, placements = value
        dtype, shape, nbytes, complex_as_real = layout
        return cls(
            TensorLayout(dtype, tuple(shape), nbytes, complex_as_real),
            itemsize,
            tuple(source_shape),
            None if window is None else tuple((start, stop) for start, stop in window),
            mesh,
            tuple(Placement(*placement) for placement in placements),
        )


class Mesh(NamedTuple):
    """The ranks of a mesh, in row-major order."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def layout(self, placements: tuple[Placement, ...]) -> MeshLayout:
        """How a tensor with these placements is spread over it."""
        return MeshLayout(self.shape, self.ranks, placements)


@dataclass(frozen=True, slots=True)
class Listing:
    """The tensors of one rank, and what its request says of their names."""

    entries: dict[str, TensorEntry]
    """In the order in which they are stored."""
    tied_names: dict[str, str]
    undeclared_ties: tuple[str, ...]
    separate_names: tuple[str, ...]

    def to_json(self) -> bytes:
        """Encode it; equal listings give equal bytes."""
        parts = list(self.entries.items()), self.tied_names, self.undeclared_ties, self.separate_names
        return json.dumps(parts, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """Decode what another rank has told."""
        entries, tied_names, undeclared_ties, separate_names = json.loads(raw)
        parsed = {name: TensorEntry.from_json(value) for name, value in entries}
        return cls(parsed, tied_names, tuple(undeclared_ties), tuple(separate_names))


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks whose listings are the same, and whose meshes are."""

    ranks: tuple[int, ...]
    digest: str
    """Of the listing."""
    meshes: tuple[Mesh, ...]

    @classmethod
    def from_json(cls, value: list[Any]) -> Self:
        """Parse what JSON made of a group."""
        ranks, digest, meshes = value
        return cls(tuple(ranks), digest, tuple(Mesh(tuple(shape), tuple(inside)) for shape, inside in meshes))


def list_tensors(request: SaveRequest, tensors: Mapping[str, HeldTensor]) -> tuple[Listing, tuple[Mesh, ...]]:
    """Describe the tensors of this rank.

    Args:
        request: What it says of the names.
        tensors: To be stored, by name.

    Returns:
        The listing, and the meshes that its entries number.

    Raises:
        UnstorableTensorError: The format can't store one.
    """
    numbers: dict[Mesh, int] = {}
    entries = {name: _entry(name, tensor, numbers) for name, tensor in tensors.items()}
    listing = Listing(
        entries,
        dict(request.tied_names),
        tuple(request.undeclared_ties),
        tuple(sorted(request.separate_names & entries.keys())),
    )
    return listing, tuple(numbers)


def _entry(name: str, tensor: HeldTensor, numbers: dict[Mesh, int]) -> TensorEntry:
    if not isinstance(tensor, SpreadTensor):
        check_storable(name, tensor)
        layout = tensor_layout(tensor)
        return TensorEntry(layout, 1, (layout.nbytes,), None, None, ())
    layout = tensor_layout(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
    mesh = Mesh(tensor.mesh.shape, tensor.mesh.ranks)
    number = numbers.setdefault(mesh, len(numbers))
    return TensorEntry(
        layout, tensor.dtype.itemsize, tensor.source_shape, tensor.window, number, tensor.mesh.placements
    )


def digest_of(listing_json: bytes) -> str:
    """What tells two listings apart."""
    return sha256_of(listing_json)
