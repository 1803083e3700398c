"""Tensors of which each rank has a part: what a rank says of its own, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hfshard.distributed import layout
from hfshard.distributed.layout import MeshLayout, Placement
from hfshard.distributed.spread_tensor import SpreadTensor, with_spread_tensors
from hfshard.errors import UnstorableTensorError
from hfshard.tensors.state_dict import has_spread
from hfshard.tensors.stored_tensor import check_storable
from tests.distributed.gloo import check_ranks


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
    from torch.distributed.device_mesh import init_device_mesh
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
