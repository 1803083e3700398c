"""Loads of torch.distributed.checkpoint by hfshard's reader, from checkpoints of any library into any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import hfshard
from hfshard.distributed import StorageReader, StorageWriter
from hfshard.distributed.dcp_chunks import check_held
from hfshard.errors import CheckpointChangedError, CheckpointNotFoundError, InvalidArgumentError, UnstorableTensorError
from tests.distributed.gloo import check_ranks
from tests.distributed.test_dcp_writer import parallelized_block
from tests.distributed.test_save_on_ranks_state_dicts import spread, whole_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def blank(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    raw = [torch.atleast_1d(tensor).contiguous().view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and torch.equal(*raw)


def load_on_rank(rank: int, mesh_shape: tuple[int, ...], places: list[Path]) -> None:
    expected = spread(mesh_shape, {name: tensor.clone() for name, tensor in whole_state().items()})
    for place in places:
        state = spread(mesh_shape, blank(whole_state()))
        load(state, storage_reader=StorageReader(place, verify="full"))
        assert all(same_bits(part(state[name]), part(expected[name])) for name in expected)


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_any_layout_is_filled_bit_for_bit(tmp_path: Path, mesh_shape: tuple[int, ...]) -> None:
    hfshard.save_state_dict(whole_state(), tmp_path / "single")
    hfshard.save_state_dict(whole_state(), tmp_path / "sharded", max_shard_size=9000)
    places = [tmp_path / "single", tmp_path / "sharded"]

    check_ranks(tmp_path / "ranks", torch.Size(mesh_shape).numel(), load_on_rank, mesh_shape, places)


def save_block(rank: int, place: Path) -> None:
    save({"model": parallelized_block(2, 2).state_dict()}, storage_writer=StorageWriter(place))


def load_block(rank: int, place: Path) -> None:
    for mesh in ((2, 1), (1, 2)):
        block = parallelized_block(*mesh)
        for parameter in block.parameters():
            torch.nn.init.zeros_(parameter)
        state = {"model": block.state_dict()}
        load(state, storage_reader=StorageReader(), checkpoint_id=place)
        block.load_state_dict(state["model"])
        for name, tensor in parallelized_block(*mesh).state_dict().items():
            assert same_bits(part(block.state_dict()[name]), part(tensor))


def test_a_module_is_loaded_into_another_layout_on_fewer_ranks(tmp_path: Path) -> None:
    check_ranks(tmp_path / "saving", 4, save_block, tmp_path / "out")
    check_ranks(tmp_path / "loading", 2, load_block, tmp_path / "out")


def refuse_on_rank(rank: int, place: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2,))
    fused = DTensor.from_local(torch.zeros(4), mesh, [_StridedShard(0, split_factor=2)], run_check=False)
    with pytest.raises(CheckpointException, match="under the placements") as raised:
        load({"fused": fused}, storage_reader=StorageReader(place))
    assert sorted(raised.value.failures) == [0, 1]
    for failure in raised.value.failures.values():
        assert isinstance(failure[0], UnstorableTensorError)
        assert failure[0].fqn == "fused"
    assert not fused.to_local().any()
    with pytest.raises(UnstorableTensorError, match="Use hfshard"):
        check_held("fused", fused, (((4 * rank, 4 * rank + 4),),), "save")

    other = place / "other" if rank else place
    with pytest.raises(CheckpointException, match="different checkpoints") as raised:
        load({"fused": torch.zeros(8)}, storage_reader=StorageReader(other))
    assert isinstance(raised.value.failures[0][0], CheckpointChangedError)
    if rank:
        (place / "other" / "model.safetensors").write_bytes(b"damaged")
    dist.barrier()
    with pytest.raises(CheckpointException, match="/other/model") as raised:
        load({"fused": torch.zeros(8)}, storage_reader=StorageReader(other))
    assert list(raised.value.failures) == [1]


def test_refusals_reach_every_rank(tmp_path: Path) -> None:
    hfshard.save_state_dict({"fused": torch.arange(8.0)}, tmp_path)
    hfshard.save_state_dict({"fused": torch.arange(8.0) + 1}, tmp_path / "other")

    check_ranks(tmp_path / "ranks", 2, refuse_on_rank, tmp_path)


def test_checkpoints_of_other_libraries_are_loaded_without_a_group(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).view(3, 4)
    save_file({"a": matrix.bfloat16(), "b": torch.tensor([True, False])}, tmp_path / "model.safetensors")
    transposed = torch.zeros(4, 3).t()
    state: dict[str, Any] = {"a": transposed, "b": torch.zeros(2, dtype=torch.bool), "c": torch.ones(1)}

    load(state, storage_reader=StorageReader(tmp_path), planner=DefaultLoadPlanner(allow_partial_load=True))

    assert state["a"] is transposed
    assert torch.equal(transposed, matrix)
    assert state["b"].tolist() == [True, False]
    assert state["c"].tolist() == [1.0]


def test_pickled_checkpoints_are_loaded(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(3)}, tmp_path / "pytorch_model.bin")
    state = {"a": torch.zeros(3, dtype=torch.int64)}

    load(state, storage_reader=StorageReader(tmp_path))

    assert state["a"].tolist() == [0, 1, 2]

    torch.save({"model": {"a": torch.zeros(3)}, "ema": {"a": torch.arange(3) + 1}}, tmp_path / "last.pt")
    load(state, storage_reader=StorageReader(tmp_path / "last.pt", key="ema"))

    assert state["a"].tolist() == [1, 2, 3]


def test_metadata_describes_the_tensors(tmp_path: Path) -> None:
    shared = torch.zeros(2, 3, dtype=torch.complex128)
    hfshard.save_state_dict({"one": shared, "two": shared}, tmp_path)

    metadata = StorageReader(tmp_path).read_metadata()

    assert sorted(metadata.state_dict_metadata) == ["one", "two"]
    described: Any = metadata.state_dict_metadata["two"]
    assert described.properties.dtype == torch.complex128
    assert described.size == torch.Size([2, 3])
    assert [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in described.chunks] == [((0, 0), (2, 3))]


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    hfshard.save_state_dict({"a": torch.ones(3)}, tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()

    with pytest.raises(CheckpointException, match="There is no checkpoint in") as raised:
        load({"a": torch.ones(3)}, storage_reader=StorageReader(), checkpoint_id=empty)
    assert isinstance(raised.value.failures[0][0], CheckpointNotFoundError)
    with pytest.raises(CheckpointNotFoundError):
        StorageReader(empty).read_metadata()
    with pytest.raises(CheckpointException, match="Pass a path to StorageReader"):
        load({"a": torch.ones(3)}, storage_reader=StorageReader())
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: b"):
        load({"b": torch.ones(3)}, storage_reader=StorageReader(tmp_path))
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load({"a": torch.ones(4)}, storage_reader=StorageReader(tmp_path))
    with pytest.raises(InvalidArgumentError, match="verify"):
        StorageReader(tmp_path, verify="all")  # type: ignore[arg-type]
    assert StorageReader.validate_checkpoint_id(tmp_path)
    assert StorageReader.validate_checkpoint_id("s3://bucket/out")
    assert not StorageReader.validate_checkpoint_id("file:///out")
