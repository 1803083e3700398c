"""Tensors of which each rank has an interval of the elements: saved as by one process, and read back into the parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hfshard
from hfshard.checkpoint.open_checkpoint import open_checkpoint
from hfshard.distributed.read_parts import read_parts
from hfshard.distributed.spread_tensor import SpreadTensor
from hfshard.errors import UnstorableTensorError
from hfshard.tensors.flat_tensor import FlatLayout, FlatTensor
from tests.distributed.gloo import check_ranks
from tests.distributed.test_save_on_ranks_state_dicts import contents

RANKS = 4
SHAPES: dict[str, tuple[int, ...]] = {"matrix": (3, 5), "one": (1,), "cube": (2, 3, 7), "vector": (9,)}
FLAT_SIZE = 70
"""Elements of a flat tensor of all of them, with three of padding."""


def whole_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def own_part(
    rank: int, flat: torch.Tensor, shape: tuple[int, ...], ranks: tuple[int, ...], first: int = 0
) -> FlatTensor:
    """Cut a flat tensor over ranks, copy this one's interval, and return its part of a tensor in it."""
    own = [*flat.chunk(len(ranks)), *[flat[:0]] * len(ranks)][ranks.index(rank)].clone()
    return FlatTensor.within(own, shape, FlatLayout(ranks, is_cut=True, elements=flat.numel(), first=first), rank)


def parts_of(rank: int, whole: dict[str, torch.Tensor]) -> dict[str, SpreadTensor]:
    """Each tensor cut alone: over all ranks, and over two of them; and all cut over two as one flat tensor."""
    found = {}
    two = (0, 1) if rank < 2 else (2, 3)
    for prefix, ranks in (("even.", (0, 1, 2, 3)), ("replicated.", two)):
        for name, tensor in whole.items():
            found[prefix + name] = own_part(rank, tensor.flatten(), tuple(tensor.shape), ranks)
    together = torch.cat([*(tensor.flatten() for tensor in whole.values()), torch.full((3,), torch.nan)])
    first = 0
    for name, tensor in whole.items():
        found[f"flat.{name}"] = own_part(rank, together, tuple(tensor.shape), two, first)
        first += tensor.numel()
    return {name: SpreadTensor.of(part, name) for name, part in found.items()}


def expected_state() -> dict[str, torch.Tensor]:
    whole = whole_state()
    found = {f"{prefix}.{name}": whole[name].clone() for prefix in ("even", "replicated", "flat") for name in whole}
    rows = {"flat.rows": whole["cube"][1, 1:].clone(), "even.end": whole["vector"][4:].clone()}
    return found | {"tied": found["even.cube"]} | rows


def save_and_read(rank: int, place: Path) -> None:
    parts = parts_of(rank, whole_state())
    rows = parts["flat.cube"].view(((1, 2), (1, 3), (0, 7)), (2, 7))
    end = parts["even.vector"].view(((4, 9),), (5,))
    assert end.part().tolist() == whole_state()["vector"][max(4, 3 * rank) : 3 * rank + 3].tolist()
    with pytest.raises(UnstorableTensorError, match=r"Cannot store columns \[\(0, 2\), \(0, 3\), \(1, 7\)\]"):
        parts["flat.cube"].view(((0, 2), (0, 3), (1, 7)), (2, 3, 6))

    state: Any = {**parts, "tied": parts["even.cube"], "flat.rows": rows, "even.end": end}
    hfshard.save_state_dict(state, place / "ranks", max_shard_size=300)

    assert contents(place / "ranks") == contents(place / "alone")
    empty = parts_of(rank, {name: torch.zeros(shape) for name, shape in SHAPES.items()})
    with open_checkpoint(str(place / "alone")) as checkpoint:
        read_parts(checkpoint, empty.items())
        alone = {name: part.with_part(torch.empty_like(part.part())) for name, part in parts.items()}
        read_parts(checkpoint, alone.items())
    for name, part in parts.items():
        assert empty[name].part().equal(part.part()), name
        assert alone[name].part().equal(part.part()), name


def test_intervals_are_saved_and_read(tmp_path: Path) -> None:
    hfshard.save_state_dict(expected_state(), tmp_path / "alone", max_shard_size=300)

    check_ranks(tmp_path / "gloo", RANKS, save_and_read, tmp_path)


def describe_wrongly(rank: int) -> None:
    with pytest.raises(UnstorableTensorError, match=r"a part of shape \[3\], but its placements say \[2\]") as caught:
        SpreadTensor.of(
            FlatTensor(torch.zeros(3), (2, 2), FlatLayout((0, 1), is_cut=True, elements=4, first=0)), "weight"
        )
    assert caught.value.fqn == "weight"


def test_a_part_of_another_size_is_refused(tmp_path: Path) -> None:
    check_ranks(tmp_path, 2, describe_wrongly)
