"""Models and meshes on paper: names, shapes and placements of a model of 1 TB, of which no byte is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Final

import torch

from hfshard.distributed.layout import Coordinate, MeshLayout, Placement, box_shape, held_box
from hfshard.distributed.spread_tensor import SpreadTensor

EXPERTS: Final = 256


@dataclass(frozen=True)
class PaperTensor:
    """One stored tensor."""

    name: str
    shape: tuple[int, ...]
    kind: str
    """How tensor parallelism splits it: "column", "row", "expert" or "" (not at all)."""
    source_shape: tuple[int, ...] = ()
    """Of the parameter in which an expert's matrix lies; () where it is its own."""
    window: tuple[tuple[int, int], ...] | None = None
    """Where it lies there."""


@dataclass(frozen=True)
class PaperMesh:
    """A mesh of ranks, and what it does to a kind of tensor."""

    shape: tuple[int, ...]
    placements: Callable[[str], tuple[Placement, ...]]

    def coordinate(self, rank: int) -> Coordinate:
        """Where a rank stands."""
        found: list[int] = []
        for size in reversed(self.shape):
            rank, index = divmod(rank, size)
            found.insert(0, index)
        return tuple(found)


def dense(layers: int = 156, hidden: int = 16384, inner: int = 53248, vocabulary: int = 128256) -> list[PaperTensor]:
    """A Llama: wide as that of 405 billion parameters, and with 156 layers as large as 1 TB."""
    return list(_decoder(layers, hidden, vocabulary, lambda prefix: _mlp(f"{prefix}mlp.", hidden, inner)))


def mixture(layers: int = 61, hidden: int = 7168, inner: int = 1536, vocabulary: int = 129280) -> list[PaperTensor]:
    """A mixture of 256 experts a layer, fused in the model's parameters and stored one by one: 47,278 tensors."""
    return list(_decoder(layers, hidden, vocabulary, lambda prefix: _experts(f"{prefix}mlp.", hidden, inner)))


def meshes(ranks: int, nodes_of: int = 8) -> dict[str, PaperMesh]:
    """FSDP; FSDP over tensor and expert parallelism within a node; FSDP with copies."""
    groups = ranks // nodes_of
    within_node = {
        "column": (Placement(0, nodes_of), Placement(0)),
        "row": (Placement(0), Placement(1)),
        "expert": (Placement(1), Placement(0)),
        "": (Placement(0), Placement(None)),
    }
    return {
        "fsdp": PaperMesh((ranks,), lambda kind: (Placement(0),)),
        "2-d": PaperMesh((groups, nodes_of), within_node.__getitem__),
        "hsdp": PaperMesh((nodes_of, groups), lambda kind: (Placement(None), Placement(0))),
    }


def held_by(rank: int, tensors: list[PaperTensor], mesh: PaperMesh) -> dict[str, SpreadTensor]:
    """What a rank has of the tensors; its local tensors take no memory."""
    ranks = tuple(range(prod(mesh.shape)))
    coordinate = mesh.coordinate(rank)
    element = torch.empty((), dtype=torch.bfloat16)
    found = {}
    for tensor in tensors:
        layout = MeshLayout(mesh.shape, ranks, mesh.placements(tensor.kind))
        source = tensor.source_shape or tensor.shape
        local = element.expand(box_shape(held_box(source, layout, coordinate)))
        found[tensor.name] = SpreadTensor(
            tensor.shape, torch.bfloat16, layout, source, tensor.window, coordinate, local
        )
    return found


def _decoder(
    layers: int, hidden: int, vocabulary: int, feed_forward: Callable[[str], Iterator[PaperTensor]]
) -> Iterator[PaperTensor]:
    yield PaperTensor("model.embed_tokens.weight", (vocabulary, hidden), "column")
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, rows, kind in (("q", hidden, "column"), ("k", 1024, "column"), ("v", 1024, "column")):
            yield PaperTensor(f"{prefix}self_attn.{name}_proj.weight", (rows, hidden), kind)
        yield PaperTensor(f"{prefix}self_attn.o_proj.weight", (hidden, hidden), "row")
        yield from feed_forward(prefix)
        yield PaperTensor(f"{prefix}input_layernorm.weight", (hidden,), "")
        yield PaperTensor(f"{prefix}post_attention_layernorm.weight", (hidden,), "")
    yield PaperTensor("model.norm.weight", (hidden,), "")
    yield PaperTensor("lm_head.weight", (vocabulary, hidden), "column")


def _mlp(prefix: str, hidden: int, inner: int) -> Iterator[PaperTensor]:
    yield PaperTensor(f"{prefix}gate_proj.weight", (inner, hidden), "column")
    yield PaperTensor(f"{prefix}up_proj.weight", (inner, hidden), "column")
    yield PaperTensor(f"{prefix}down_proj.weight", (hidden, inner), "row")


def _experts(prefix: str, hidden: int, inner: int) -> Iterator[PaperTensor]:
    yield PaperTensor(f"{prefix}gate.weight", (EXPERTS, hidden), "")
    for number in range(EXPERTS):
        one = f"{prefix}experts.{number}."
        for name, rows in (("gate_proj", (0, inner)), ("up_proj", (inner, 2 * inner))):
            window = ((number, number + 1), rows, (0, hidden))
            yield PaperTensor(f"{one}{name}.weight", (inner, hidden), "expert", (EXPERTS, 2 * inner, hidden), window)
        window = ((number, number + 1), (0, hidden), (0, inner))
        yield PaperTensor(f"{one}down_proj.weight", (hidden, inner), "expert", (EXPERTS, hidden, inner), window)
