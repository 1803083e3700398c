"""Which part of a tensor a rank holds: worked out by hand, and compared with what torch gives each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from hfshard.distributed.layout import (
    Box,
    MeshLayout,
    Placement,
    box_elements,
    box_shape,
    clip_box,
    held_box,
    local_slices,
    ranks_by_box,
    single_run,
    whole_box,
)
from hfshard.distributed.spread_tensor import SpreadTensor
from hfshard.errors import UnstorableTensorError
from tests.helpers import processes

# (shape, shape of the mesh, placements) -> what the ranks hold, in row-major order of the mesh.
BY_HAND: list[tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...], list[Box]]] = [
    # FSDP of 5 rows over 2 ranks: the first part is the longer one.
    ((5, 2), (2,), (Placement(0),), [(((0, 3),), ((0, 2),)), (((3, 5),), ((0, 2),))]),
    # 4 rows over 3 ranks: parts of 2, and nothing is left for the last one.
    ((4,), (3,), (Placement(0),), [(((0, 2),),), (((2, 4),),), ((),)]),
    # Tensor parallel columns.
    ((2, 4), (2,), (Placement(1),), [(((0, 2),), ((0, 2),)), (((0, 2),), ((2, 4),))]),
    # HSDP: two copies of two parts.
    (
        (4,),
        (2, 2),
        (Placement(None), Placement(0)),
        [(((0, 2),),), (((2, 4),),), (((0, 2),),), (((2, 4),),)],
    ),
    # The earlier dimension of the mesh first: 8 rows in halves, and each half in halves.
    (
        (8,),
        (2, 2),
        (Placement(0), Placement(0)),
        [(((0, 2),),), (((2, 4),),), (((4, 6),),), (((6, 8),),)],
    ),
    # FSDP over tensor parallelism: the later one first.
    (
        (8,),
        (2, 2),
        (Placement(0, groups=2), Placement(0)),
        [(((0, 2),),), (((4, 6),),), (((2, 4),),), (((6, 8),),)],
    ),
    # Gate and up in one weight of 8 rows: half of each for either rank.
    ((8,), (2,), (Placement(0, groups=2),), [(((0, 2), (4, 6)),), (((2, 4), (6, 8)),)]),
    # The same under FSDP of 4: each takes 2 of the 6 rows, one part has a gap, and nothing is left for the last.
    (
        (12,),
        (4, 2),
        (Placement(0, groups=2), Placement(0, groups=2)),
        [
            (((0, 2),),),
            (((3, 5),),),
            (((2, 3), (6, 7)),),
            (((5, 6), (9, 10)),),
            (((7, 9),),),
            (((10, 12),),),
            ((),),
            ((),),
        ],
    ),
    # A scalar, and a tensor of nothing.
    ((), (2,), (Placement(None),), [(), ()]),
    ((0, 3), (2,), (Placement(0),), [((), ((0, 3),)), ((), ((0, 3),))]),
]


@pytest.mark.parametrize(("shape", "mesh_shape", "placements", "expected"), BY_HAND)
def test_boxes_are_those_worked_out_by_hand(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], expected: list[Box]
) -> None:
    layout = MeshLayout(mesh_shape, tuple(range(prod(mesh_shape))), placements)

    assert [held_box(shape, layout, coordinate) for _, coordinate in layout.coordinates()] == expected


def test_part_of_a_box_within_a_window() -> None:
    box: Box = (((0, 2), (4, 6)), ((0, 3),))
    local = torch.arange(12).view(4, 3)  # rows 0, 1, 4 and 5

    assert clip_box(box, ((1, 5), (2, 3))) == (((0, 1), (3, 4)), ((0, 1),))
    assert local[local_slices(box, ((1, 5), (2, 3)))].tolist() == [[5], [8]]
    assert clip_box(box, ((2, 4), (0, 3))) == ((), ((0, 3),))
    assert local[local_slices(box, ((2, 4), (0, 3)))].shape == (0, 3)
    assert clip_box(whole_box((6, 3)), ((1, 5), (2, 3))) == (((0, 4),), ((0, 1),))
    assert box_shape(box) == (4, 3)
    assert box_elements(box) == 12


@pytest.mark.parametrize(
    ("shape", "box", "run"),
    [
        ((5, 2), (((3, 5),), ((0, 2),)), (6, 10)),
        ((5, 2), (((3, 4),), ((1, 2),)), (7, 8)),
        ((5, 2), (((3, 5),), ((1, 2),)), None),
        ((8, 2), (((0, 2), (4, 6)), ((0, 2),)), None),
        ((2, 4, 3), (((1, 2),), ((1, 3),), ((0, 3),)), (15, 21)),
        ((2, 4, 3), (((0, 2),), ((1, 3),), ((0, 3),)), None),
        ((1, 4), (((0, 1),), ((1, 3),)), (1, 3)),
        ((4, 1, 3), (((1, 3),), ((0, 1),), ((0, 3),)), (3, 9)),
        ((4,), ((),), None),
        ((), (), (0, 1)),
    ],
)
def test_elements_of_a_box_that_are_one_run(shape: tuple[int, ...], box: Box, run: tuple[int, int] | None) -> None:
    elements = torch.arange(prod(shape)).view(shape)
    found = [elements]
    for dim, intervals in enumerate(box):
        found = [part.narrow(dim, start, stop - start) for part in found for start, stop in intervals]

    assert single_run(shape, box) == run
    if run is not None:
        assert torch.cat([part.flatten() for part in found]).tolist() == list(range(*run))


def test_ranks_are_grouped_by_what_they_hold() -> None:
    copies = MeshLayout((2, 3), (5, 4, 3, 2, 1, 0), (Placement(None), Placement(1)))

    assert ranks_by_box((7, 4), copies) == {
        (((0, 7),), ((0, 2),)): (5, 2),
        (((0, 7),), ((2, 4),)): (4, 1),
    }
    assert ranks_by_box((), MeshLayout((2,), (0, 1), (Placement(None),))) == {(): (0, 1)}
    assert ranks_by_box((0, 3), copies) == {}


class Case(NamedTuple):
    """One parameter, and how it is parallelized."""

    mesh_shape: tuple[int, ...]
    names: tuple[str, ...]
    shape: tuple[int, ...]
    tensor_parallel: tuple[int, int] | None
    """The dimension that "tp" splits, or -1 for a copy, and the number of weights in the one; None: no such mesh."""
    fsdp_dim: int | None
    """The dimension that `fully_shard` splits over "dp"; None: it is not called."""


SHAPES = (
    (8,), (11,), (3,), (1, 5), (8, 6), (11, 7), (13, 5, 3), (6, 4, 5), (2, 9), (16, 16), (5, 1), (4, 8, 6), (12, 5)
)  # fmt: skip
"""Even and uneven, fewer rows than ranks, and experts in one parameter: (expert, row, column)."""


def _cases(shape: tuple[int, ...]) -> Iterator[Case]:
    dims = range(len(shape))
    mesh_shape: tuple[int, ...]
    for mesh_shape in [(2,), (4,)]:
        yield Case(mesh_shape, ("dp",), shape, None, 0)
        yield from (Case(mesh_shape, ("dp",), shape, None, dim) for dim in dims[1:] if shape[dim] % mesh_shape[0] == 0)
    for dim in (-1, *dims):
        yield Case((3,), ("tp",), shape, (dim, 1), None)
    yield Case((2, 2), ("rep", "dp"), shape, None, 0)
    for mesh_shape in [(2, 2), (3, 3), (2, 4), (4, 2)]:
        for dim in (-1, *dims):
            yield Case(mesh_shape, ("dp", "tp"), shape, (dim, 1), 0)
            # torch refuses an uneven split of any dimension but the first one
            parts = mesh_shape[0] * (mesh_shape[1] if dim == 1 else 1)
            if len(shape) > 1 and shape[1] % parts == 0:
                yield Case(mesh_shape, ("dp", "tp"), shape, (dim, 1), 1)
    for dim in (-1, *dims):
        yield Case((2, 2, 2), ("rep", "dp", "tp"), shape, (dim, 1), 0)
    for groups in (2, 3):
        if shape[0] % groups == 0:
            yield Case((2,), ("tp",), shape, (0, groups), None)
            for mesh_shape in [(2, 2), (2, 4), (3, 3)]:
                yield Case(mesh_shape, ("dp", "tp"), shape, (0, groups), 0)


def _parallelized(case: Case, meshes: dict[Any, Any]) -> Any:
    """What torch makes of a parameter, whose values are their own places."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    key = case.mesh_shape, case.names
    if key not in meshes:
        meshes[key] = init_device_mesh("cpu", case.mesh_shape, mesh_dim_names=case.names)
    whole = torch.arange(prod(case.shape)).float().view(case.shape)
    module = nn.Module()
    if case.tensor_parallel is not None:
        dim, groups = case.tensor_parallel
        placement = Replicate() if dim < 0 else _StridedShard(dim, split_factor=groups) if groups > 1 else Shard(dim)
        whole = distribute_tensor(whole, meshes[key]["tp"], [placement], src_data_rank=None)
    module.weight = nn.Parameter(whole)
    if case.fsdp_dim is not None:
        split = case.fsdp_dim
        mesh = meshes[key]["rep", "dp"] if "rep" in case.names else meshes[key]["dp"]
        fully_shard(module, mesh=mesh, shard_placement_fn=lambda parameter: Shard(split))
    return module.weight


def _play(cases: list[Case], world_size: int, rank: int) -> None:
    """Be one rank of a group that has no others: no collective is needed to cut a tensor."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    meshes: dict[Any, Any] = {}
    counts = Counter[str]()
    for case in cases:
        tensor = _parallelized(case, meshes)
        if torch.__version__ < "2.13" and case.fsdp_dim == 0 and (case.tensor_parallel or (0, 1))[1] > 1:
            with pytest.raises(UnstorableTensorError, match=r"it fuses several weights, .* torch 2\.13 or newer"):
                SpreadTensor.of(tensor, "weight")
            counts["refused"] += 1
            continue
        spread = SpreadTensor.of(tensor, "weight")
        runs = spread.runs()
        places = [
            place
            for offset, length in zip(runs.offsets.tolist(), runs.lengths.tolist(), strict=True)
            for place in range(offset // 4, (offset + length) // 4)
        ]
        assert places == tensor.to_local().reshape(-1).long().tolist(), (case, rank, tensor.placements)
        box = spread.stored_box
        assert not places or rank in ranks_by_box(case.shape, spread.mesh)[box], (case, rank)
        counts["equal"] += 1
        counts["empty"] += not places
        counts["with a gap"] += any(len(intervals) > 1 for intervals in box)
        counts["strided"] += "_Strided" in repr(tensor.placements)
    print(*(f"{count} {kind}" for kind, count in counts.items() if count), sep="\n")


def _play_all(shapes: tuple[tuple[int, ...], ...]) -> None:
    """Be every rank of every group, one after another: torch keeps what it knows of a rank, so each is a process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    _parallelized(Case((1,), ("dp",), (2,), None, 0), {})  # imports what torch imports late, once for all
    torch.distributed.destroy_process_group()
    cases = [case for shape in shapes for case in _cases(shape)]
    for world_size in sorted({prod(case.mesh_shape) for case in cases}):
        for rank in range(world_size):
            ours = [case for case in cases if prod(case.mesh_shape) == world_size]
            assert processes.exit_of_fork(partial(_play, ours, world_size, rank), processes.PATIENCE_SECONDS) == 0


def _compare_with_torch(place: Path, shapes: tuple[tuple[int, ...], ...]) -> dict[str, int]:
    end = processes.end_of(place / "words.txt", _play_all, shapes)
    assert end.status == 0, end.words
    total = Counter[str]()
    for line in end.words.splitlines():
        count, _, kind = line.partition(" ")
        total[kind] += int(count)
    return dict(total)


def test_boxes_are_what_torch_gives_each_rank(tmp_path: Path) -> None:
    # Fewer rows than ranks; uneven rows, or two or three weights in one. Experts are among the many shapes.
    shapes = ((3,), (12, 5))

    counts = _compare_with_torch(tmp_path, shapes)

    assert counts["equal"] + counts.get("refused", 0) == 289
    if torch.__version__ >= "2.13":
        assert counts == {"equal": 289, "empty": 52, "strided": 143, "with a gap": 12}


@pytest.mark.slow
def test_boxes_of_many_shapes_are_what_torch_gives_each_rank(tmp_path: Path) -> None:
    counts = _compare_with_torch(tmp_path, SHAPES)

    assert counts["equal"] + counts.get("refused", 0) == 2215
    if torch.__version__ >= "2.13":
        assert counts == {"equal": 2215, "empty": 339, "strided": 764, "with a gap": 30}
