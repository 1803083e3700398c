"""Tensors of which each rank has a part: what a rank says of its own, and those that are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import prod
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hfshard
from hfshard.checkpoint.open_checkpoint import open_checkpoint
from hfshard.distributed import layout
from hfshard.distributed.layout import Box, Interval, MeshLayout, Placement
from hfshard.distributed.read_parts import read_parts
from hfshard.distributed.spread_tensor import (
    BoxRuns,
    Runs,
    SpreadTensor,
    gather_into,
    scatter_into,
    with_spread_tensors,
)
from hfshard.errors import UnstorableTensorError
from hfshard.tensors.flat_tensor import FlatLayout, FlatTensor
from hfshard.tensors.state_dict import has_spread
from hfshard.tensors.stored_tensor import check_storable
from tests.distributed.gloo import check_ranks
from tests.distributed.test_save_on_ranks_state_dicts import contents


def _values(spread: SpreadTensor) -> Any:
    return spread.part().flatten().tolist()


def _runs(spread: SpreadTensor) -> list[tuple[int, int]]:
    runs = spread.runs()
    return list(zip(runs.offsets.tolist(), runs.lengths.tolist(), strict=True))


def _check_parts(rank: int) -> None:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    matrix = torch.arange(12.0).view(3, 4)

    columns = SpreadTensor.of(distribute_tensor(matrix, mesh, [Shard(-1)]), "weight")
    assert columns.mesh == MeshLayout((2,), (0, 1), (Placement(1),))
    assert (columns.shape, columns.dtype, columns.coordinate) == ((3, 4), torch.float32, (rank,))
    assert _values(columns) == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]][rank]
    assert _runs(columns) == [[(0, 8), (16, 8), (32, 8)], [(8, 8), (24, 8), (40, 8)]][rank]

    # A transpose has columns, and its rows come one after another.
    rows = distribute_tensor(matrix, mesh, [Shard(0)])
    turned: Any = rows.t()
    assert _values(SpreadTensor.of(turned, "weight")) == [[0, 4, 1, 5, 2, 6, 3, 7], [8, 9, 10, 11]][rank]
    assert SpreadTensor.of(rows, "weight").part().data_ptr() == rows.to_local().data_ptr() != 0

    # A rectangle of the source: the second and third row, without the first column.
    part = SpreadTensor.of(rows, "weight").view(((1, 3), (1, 4)), (2, 3))
    assert (part.shape, part.stored_sizes) == ((2, 3), (2, 3))
    assert part.stored_box == [(((0, 1),), ((0, 3),)), (((1, 2),), ((0, 3),))][rank]
    assert _values(part) == [[5, 6, 7], [9, 10, 11]][rank]
    assert _runs(part) == [[(0, 12)], [(12, 12)]][rank]
    # One that only the first rank has, stored without a dimension.
    first_row = SpreadTensor.of(rows, "weight").view(((0, 1), (0, 4)), (4,))
    assert (first_row.shape, first_row.stored_sizes) == ((4,), (1, 4))
    assert _values(first_row) == [[0, 1, 2, 3], []][rank]
    assert _runs(first_row) == [[(0, 16)], []][rank]

    # A conjugate is a bit of the tensor, not of its memory.
    complex_rows = DTensor.from_local(torch.tensor([1 + 2j, 3 - 4j]).conj(), mesh, [Shard(0)])
    assert _values(SpreadTensor.of(complex_rows, "weight")) == [1 - 2j, 3 + 4j]

    # What is still on its way is waited for.
    gathered = distribute_tensor(matrix, mesh, [Shard(0)]).redistribute(mesh, [Replicate()], async_op=True)
    assert _values(SpreadTensor.of(gathered, "weight")) == list(range(12))

    # A mesh without this rank.
    wholes: list[tuple[torch.Tensor, list[float]]] = [
        (torch.tensor(7.0), [7.0]),
        (torch.arange(4.0).view(2, 2), [0, 1, 2, 3]),
    ]
    for whole, expected in wholes:
        alone = DeviceMesh("cpu", [0])
        elsewhere = SpreadTensor.of(distribute_tensor(whole, alone, [Replicate()]), "weight")
        assert elsewhere.coordinate == [(0,), None][rank]
        assert elsewhere.mesh == MeshLayout((1,), (0,), (Placement(None),))
        assert _values(elsewhere) == [expected, []][rank]
        assert _runs(elsewhere) == [[(0, whole.nbytes)], []][rank]
        window = [(0, 1)] * whole.dim()
        assert _runs(elsewhere.view(window, ())) == [[(0, 4)], []][rank]
        assert _values(elsewhere.view(window, ())) == [expected[:1], []][rank]

    assert has_spread({"a": matrix, "b": rows})
    assert not has_spread({"a": matrix, "b": 3})
    kept = with_spread_tensors({"a": matrix, "b": rows})
    assert list(kept) == ["a", "b"]
    assert kept["a"] is matrix
    assert has_spread(kept)


def _refused(tensor: Any) -> str:
    with pytest.raises(UnstorableTensorError) as caught:
        with_spread_tensors({"layers.0.weight": tensor})
    assert caught.value.fqn == "layers.0.weight"
    assert str(caught.value).startswith("Cannot store 'layers.0.weight': ")
    return str(caught.value)


def _check_refusals(rank: int) -> None:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard

    class Unknown(Placement):
        pass

    mesh = init_device_mesh("cpu", (2,))
    whole = torch.ones(4, 4)
    rows = distribute_tensor(whole, mesh, [Shard(0)])

    assert "its ranks have summands of it" in _refused(DTensor.from_local(whole, mesh, [Partial()]))
    assert "tensor.redistribute(" in _refused(DTensor.from_local(whole, mesh, [Partial("avg")]))
    # A placement of somebody else's: no function of torch makes a tensor with it.
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    unknown = DTensor(whole, DTensorSpec(mesh, (Unknown(),), meta), requires_grad=False)
    assert "hfshard does not know which part" in _refused(unknown)
    assert "meta device" in _refused(rows.to("meta"))
    wrong = DTensor.from_local(whole, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())
    assert "has a part of shape [4, 4], but its placements say [2, 4]" in _refused(wrong)
    freed = distribute_tensor(whole.clone(), mesh, [Shard(0)])
    freed.to_local().untyped_storage().resize_(0)
    assert "its memory was freed" in _refused(freed)

    # torch can cut a dimension by the mesh's second dimension first; the placements do not say so.
    square = init_device_mesh("cpu", (1, 2))
    order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    spec = DTensorSpec(square, (Shard(0), Shard(0)), meta, shard_order=order)
    assert "[1, 0] in this order" in _refused(DTensor(whole[:2], spec, requires_grad=False))

    # torch scatters by the places in a group, whose ranks it sorts, and cuts a copy by those in the mesh.
    turned = DeviceMesh("cpu", [[1, 0]])
    refused = _refused(distribute_tensor(whole, turned, [Replicate(), Shard(0)]))
    assert "the ranks [1, 0], which do not ascend along dimension 1" in refused
    assert SpreadTensor.of(distribute_tensor(whole, turned, [Shard(0), Replicate()]), "weight").mesh.ranks == (1, 0)

    # Which of the two came first, torch 2.11 does not say; newer ones do.
    fused = distribute_tensor(whole, square, [Shard(0), _StridedShard(0, split_factor=2)])
    layout._FSDP_MARKS_FUSED_WEIGHTS = True
    assert SpreadTensor.of(fused, "weight").stored_box[0] == [((0, 1), (2, 3)), ((1, 2), (3, 4))][rank]
    layout._FSDP_MARKS_FUSED_WEIGHTS = False
    assert "it fuses several weights" in _refused(fused)
    assert SpreadTensor.of(rows, "weight").coordinate == (rank,)

    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state_dict = model.state_dict()
    assert "it is a ShardedTensor of FSDP1" in _refused(state_dict["weight"])
    assert "fully_shard" in _refused(state_dict["weight"])

    # Who has not converted them gets an error, and not the part of one rank.
    with pytest.raises(UnstorableTensorError, match="a wrapper around other tensors"):
        check_storable("weight", rows)
    assert isinstance(distribute_tensor(whole, mesh, [Replicate()]), DTensor)


@pytest.mark.parametrize("check", [_check_parts, _check_refusals])
def test_what_a_rank_has(tmp_path: Path, check: Callable[[int], None]) -> None:
    check_ranks(tmp_path, 2, check)


# Where the bytes of a box lie: worked out by hand, compared with numpy's indexing, and within bounds of time.


def _listed(runs: Runs) -> list[tuple[int, int, int]]:
    return list(zip(runs.offsets.tolist(), runs.lengths.tolist(), runs.positions.tolist(), strict=True))


def test_runs_are_those_worked_out_by_hand() -> None:
    columns: Box = (((0, 2),), ((1, 3),))
    gaps: Box = (((0, 1), (2, 3)), ((0, 4),))
    experts: Box = (((1, 3),), ((0, 1),), ((0, 2),))

    assert _listed(Runs.of_box((2, 4), 2, columns)) == [(2, 4, 0), (10, 4, 4)]
    assert _listed(Runs.of_box((3, 4), 1, gaps)) == [(0, 4, 0), (8, 4, 4)]
    assert _listed(Runs.of_box((3, 2, 2), 4, experts)) == [(16, 8, 0), (32, 8, 8)]
    assert _listed(Runs.of_box((3, 4), 2, (((0, 3),), ((0, 4),)))) == [(0, 24, 0)]
    assert _listed(Runs.of_box((), 8, ())) == [(0, 8, 0)]
    assert _listed(Runs.of_box((0, 3), 8, ((), ((0, 3),)))) == []
    assert _listed(Runs.of_box((2, 4), 2, (((0, 2),), ()))) == []


def test_clip_keeps_the_places_in_the_local_tensor() -> None:
    runs = Runs.of_box((3, 4), 2, (((0, 3),), ((1, 3),)))  # bytes 2 to 6, 10 to 14 and 18 to 22

    assert _listed(runs.clip(4, 20)) == [(4, 2, 2), (10, 4, 4), (18, 2, 8)]
    assert _listed(runs.clip(11, 13)) == [(11, 2, 5)]
    assert _listed(runs.clip(6, 10)) == []
    assert _listed(runs.clip(0, 99)) == [(2, 4, 0), (10, 4, 4), (18, 4, 8)]
    assert runs.clip(4, 20).total == 8


def _random_intervals(size: int, numbers: random.Random) -> tuple[Interval, ...]:
    if numbers.random() < 0.4:
        return ((0, size),)
    cuts = sorted(numbers.sample(range(size + 1), min(size + 1, numbers.choice([0, 2, 2, 2, 4])) // 2 * 2))
    return tuple(zip(cuts[::2], cuts[1::2], strict=True))


def test_runs_of_random_boxes_are_what_indexing_gives() -> None:
    numbers = random.Random(13)
    for _ in range(400):
        shape = tuple(numbers.randint(1, 7) for _ in range(numbers.randint(0, 4)))
        box = tuple(_random_intervals(size, numbers) for size in shape)
        itemsize = numbers.choice([1, 2, 8])
        nbytes = prod(shape) * itemsize
        part = np.arange(nbytes).reshape(*shape, itemsize)
        for dim, intervals in enumerate(box):
            part = np.take(part, [index for start, stop in intervals for index in range(start, stop)], axis=dim)
        expected = part.ravel().tolist()
        start = numbers.randint(0, nbytes)
        stop = numbers.randint(start, nbytes + 2)
        within = [(place, place_in_local) for place_in_local, place in enumerate(expected) if start <= place < stop]

        runs = Runs.of_box(shape, itemsize, box)
        clipped = BoxRuns(shape, itemsize, box).clip(start, stop)

        assert [offset + i for offset, length, _ in _listed(runs) for i in range(length)] == expected
        assert runs.total == BoxRuns(shape, itemsize, box).total == len(expected)
        assert _listed(clipped) == _listed(runs.clip(start, stop))
        assert [(offset + i, at + i) for offset, length, at in _listed(clipped) for i in range(length)] == within
        _check_copies(nbytes, clipped)


def _check_copies(nbytes: int, runs: Runs) -> None:
    source = np.arange(nbytes, dtype=np.int64).astype(np.uint8)
    pieces = [source[offset : offset + length] for offset, length, _ in _listed(runs)]
    expected = np.concatenate([source[:0], *pieces])
    packed = np.zeros(runs.total, np.uint8)
    spread = np.full(nbytes, 255, np.uint8)

    gather_into(packed, source, runs.offsets, runs.lengths)
    scatter_into(spread, runs.offsets, runs.lengths, packed)

    assert packed.tolist() == expected.tolist()
    for offset, length, _ in _listed(runs):
        assert spread[offset : offset + length].tolist() == source[offset : offset + length].tolist()
        spread[offset : offset + length] = 255
    assert (spread == 255).all()


def test_windows_of_a_column_shard_cost_what_they_hold() -> None:
    # Rank 3 of 8 of a matrix of 50,000 x 20,000 in bf16: 50,000 runs; a window of 4 MiB has 105 rows.
    shape = (50_000, 20_000)
    part = BoxRuns(shape, 2, (((0, 50_000),), ((7_500, 10_000),)))
    window = 4 << 20
    begin = process_time()

    clips = [part.clip(start, start + window) for start in range(0, 2 * prod(shape), window)]

    assert process_time() - begin < 1  # 0.02 s of an idle core
    assert sum(clip.total for clip in clips) == part.total == 250_000_000
    assert max(len(clip.offsets) for clip in clips) == 105


# Tensors of which each rank has an interval of the elements: saved as by one process, and read back into the parts.

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
