"""Saves of torch.distributed.checkpoint by hfshard's writer: plain Hugging Face checkpoints, all or nothing."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import resource
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import hfshard
from hfshard.commit.directory_commit import save_session
from hfshard.distributed import StorageWriter
from hfshard.errors import (
    InvalidArgumentError,
    InvalidPathError,
    RankFailedError,
    SaveDirectoryError,
    UnstorableTensorError,
)
from hfshard.format.file_names import WeightNames
from tests.distributed.gloo import check_ranks, run_ranks
from tests.distributed.test_save_on_ranks_state_dicts import SIZES, contents, spread, whole_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

OLD = {"weight": torch.full((3,), 7.0)}


def separate_state() -> dict[str, torch.Tensor]:
    """Tensors of many kinds; none shares another one's memory, because DCP stores them one by one."""
    state = whole_state()
    del state["tied"]
    return state


def save_on_rank(rank: int, mesh_shape: tuple[int, ...], place: Path) -> None:
    state = spread(mesh_shape, separate_state())
    for name, options in SIZES.items():
        save(state, storage_writer=StorageWriter(place / name, **options))  # type: ignore[arg-type]
        if rank == 0:
            assert contents(place / name) == contents(place / f"{name}-alone")
    if len(mesh_shape) == 1:
        for checksum in ("xxh3", None):
            save(state, storage_writer=StorageWriter(checksum=checksum), checkpoint_id=place / str(checksum))
        async_save(state, storage_writer=StorageWriter(place / "later")).result()  # type: ignore[union-attr]
    else:
        group = dist.new_group([2, 3])
        if rank >= 2:
            save(OLD, storage_writer=StorageWriter(place / "group"), process_group=group)


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_files_are_those_of_a_single_process(tmp_path: Path, mesh_shape: tuple[int, ...]) -> None:
    state = separate_state()
    for name, options in SIZES.items():
        hfshard.save_state_dict(state, tmp_path / f"{name}-alone", **options)  # type: ignore[arg-type]

    check_ranks(tmp_path / "ranks", torch.Size(mesh_shape).numel(), save_on_rank, mesh_shape, tmp_path)

    if len(mesh_shape) == 1:
        hfshard.save_state_dict(state, tmp_path / "xxh3-alone", checksum="xxh3")
        hfshard.save_state_dict(state, tmp_path / "None-alone", checksum=None)
        assert contents(tmp_path / "xxh3") == contents(tmp_path / "xxh3-alone")
        assert contents(tmp_path / "None") == contents(tmp_path / "None-alone")
        assert contents(tmp_path / "later") == contents(tmp_path / "single-alone")
    else:
        assert torch.equal(load_file(tmp_path / "group" / "model.safetensors")["weight"], OLD["weight"])


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 10)
        self.down = torch.nn.Linear(10, 6)
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.down(self.up(inputs).relu())
        return outputs


def make_block() -> Block:
    torch.manual_seed(5)
    return Block()


def parallelized_block(data: int, tensor: int) -> Block:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
    block = make_block()
    if tensor > 1:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if data > 1:
        fully_shard(block, mesh=mesh["data"])
    return block


def save_blocks(rank: int, meshes: list[tuple[int, int]], place: Path) -> None:
    for data, tensor in meshes:
        block = parallelized_block(data, tensor)
        writer = StorageWriter(place / f"{data}x{tensor}", max_shard_size=500)
        save({"model": block.state_dict()}, storage_writer=writer)


@pytest.mark.parametrize("meshes", [[(2, 1), (1, 2)], [(2, 2)]])
def test_parallelized_modules_are_read_by_safetensors(tmp_path: Path, meshes: list[tuple[int, int]]) -> None:
    check_ranks(tmp_path / "ranks", meshes[0][0] * meshes[0][1], save_blocks, meshes, tmp_path)

    expected = {f"model.{name}": tensor for name, tensor in make_block().state_dict().items()}
    for data, tensor in meshes:
        place = tmp_path / f"{data}x{tensor}"
        found = {name: value for file in sorted(place.glob("*.safetensors")) for name, value in load_file(file).items()}
        assert len(list(place.glob("*.safetensors"))) == 5
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert json.loads((place / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == 552
        assert hfshard.verify_checkpoint(place).ok


def failing_state() -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    return {"weight": distribute_tensor(torch.arange(100_000.0), mesh, [Shard(0)], src_data_rank=None)}


def fail_on_rank(rank: int, place: Path) -> None:
    state = failing_state()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for failing in (1, 0):
        if rank == failing:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        writer = StorageWriter(place)
        with pytest.raises(CheckpointException) as raised:
            save(state, storage_writer=writer)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        error = raised.value.failures[0][0]
        assert "File too large" in str(error)
        if failing:
            assert isinstance(error, RankFailedError)
            assert error.rank == 1
            assert "rank 1 failed with FileError" in str(error)
        dist.barrier()
        assert sorted(os.listdir(place)) == ["model.safetensors"]
        assert torch.equal(load_file(place / "model.safetensors")["weight"], OLD["weight"])
        dist.barrier()
    save(state, storage_writer=StorageWriter(place))
    assert torch.equal(load_file(place / "model.safetensors")["weight"], torch.arange(100_000.0))


def test_rank_whose_disk_fails_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    hfshard.save_state_dict(OLD, tmp_path / "out")

    check_ranks(tmp_path / "ranks", 2, fail_on_rank, tmp_path / "out")


class FailingPlanner(DefaultSavePlanner):
    """Does something else than give a tensor, on one rank."""

    def __init__(self, fail: Callable[[], None]) -> None:
        super().__init__()
        self._fail = fail

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        self._fail()
        return super().resolve_data(write_item)


def interrupt() -> None:
    raise KeyboardInterrupt


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose_on_rank(rank: int, place: Path) -> None:
    state = failing_state()
    with pytest.raises(CheckpointException, match="rank 1 failed with KeyboardInterrupt"):
        save(state, storage_writer=StorageWriter(place), planner=FailingPlanner(interrupt) if rank else None)
    dist.barrier()
    assert os.listdir(place) == ["model.safetensors"]
    dist.barrier()

    with contextlib.suppress(RuntimeError):  # of the process group
        save(state, storage_writer=StorageWriter(place), planner=FailingPlanner(die) if rank else None)
    assert os.listdir(place) == ["model.safetensors"]
    with save_session(str(place), WeightNames(None), wait_seconds=0):
        pass
    os._exit(0)  # the group is gone


def test_rank_that_is_killed_leaves_the_old_checkpoint_and_no_lock(tmp_path: Path) -> None:
    hfshard.save_state_dict(OLD, tmp_path / "out")

    ends = run_ranks(tmp_path / "ranks", 2, lose_on_rank, tmp_path / "out")

    assert [end.status for end in ends] == [0, -signal.SIGKILL], ends[0].words
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["weight"], OLD["weight"])


def refuse_on_rank(rank: int, place: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2,))
    fused = DTensor.from_local(torch.ones(4), mesh, [_StridedShard(0, split_factor=2)], run_check=False)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"fused": fused}, "fused"),
        ({"weight": torch.ones(2 + rank)}, "weight"),
        ({"epoch": 3} if rank else {"weight": torch.ones(2)}, "epoch"),
    ]
    for state, name in cases:
        # torch 2.11 does not say which tensor's chunks overlap.
        with pytest.raises(CheckpointException, match=f"{name}|Failed to validate global plan"):
            save(state, storage_writer=StorageWriter(place))
        dist.barrier()
        assert not place.exists()


def test_what_dcp_describes_wrongly_is_refused_by_name_on_every_rank(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, refuse_on_rank, tmp_path / "out")


class PlannerOfChunks(DefaultSavePlanner):
    """Says that there are other chunks than there are."""

    def __init__(self, chunks: list[tuple[int, int]], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._chunks = chunks

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        [plan] = all_plans
        [item] = plan.items
        assert item.tensor_data is not None
        parts = [ChunkStorageMetadata(torch.Size([start]), torch.Size([size])) for start, size in self._chunks]
        items = [replace(item, tensor_data=replace(item.tensor_data, chunk=part)) for part in parts]
        return [replace(plan, items=items)], Metadata({})


@pytest.mark.parametrize(
    ("state_dict", "planner", "kind", "words"),
    [
        ({"step": 3, "weight": OLD["weight"]}, None, UnstorableTensorError, "contains only tensors.*'step'"),
        ({"thin": torch.eye(3).to_sparse()}, None, UnstorableTensorError, "'thin'.*to_dense"),
        ({"__metadata__": torch.ones(2)}, None, UnstorableTensorError, "'__metadata__'"),
        (OLD, partial(PlannerOfChunks, [(0, 2)]), UnstorableTensorError, "1 of its 3 elements are in no chunk"),
        (OLD, partial(PlannerOfChunks, [(0, 2), (1, 2)]), UnstorableTensorError, "in several chunks"),
        (OLD, partial(PlannerOfChunks, [(0, 4)]), UnstorableTensorError, "is outside the tensor"),
        (OLD, partial(PlannerOfChunks, [(0, 2), (2, 1)]), UnstorableTensorError, r"shape \[3\], but its plan says"),
        (OLD, partial(DefaultSavePlanner, enable_plan_caching=True), InvalidArgumentError, "enable_plan_caching"),
    ],
)
def test_what_it_cannot_carry_is_refused_by_name(
    tmp_path: Path, state_dict: dict[str, Any], planner: Any, kind: type[Exception], words: str
) -> None:
    with pytest.raises(CheckpointException, match=words) as raised:
        save(state_dict, storage_writer=StorageWriter(tmp_path / "new" / "out"), planner=planner and planner())

    assert isinstance(raised.value.failures[0][0], kind)
    assert os.listdir(tmp_path) == []


def test_a_writer_needs_a_directory_and_all_ranks() -> None:
    with pytest.raises(CheckpointException, match="Pass a path to StorageWriter"):
        save(OLD, storage_writer=StorageWriter())
    with pytest.raises(InvalidArgumentError, match="use_collectives=False"):
        save(OLD, storage_writer=StorageWriter("out"), use_collectives=False)
    assert StorageWriter.validate_checkpoint_id("out")
    assert not StorageWriter.validate_checkpoint_id("s3://bucket/out")


def test_saves_follow_each_other_with_one_writer(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path, max_shard_size=200, metadata={"by": "me"})
    for value in (1.0, 2.0, 3.0):
        save({"a": torch.full((30,), value), "b": torch.full((30,), value)}, storage_writer=writer)

        assert {
            name: tensor[0].item() for name, tensor in hfshard.load_state_dict(tmp_path, verify="full").items()
        } == {
            "a": value,
            "b": value,
        }
        assert json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]["by"] == "me"


@pytest.mark.compat
def test_transformers_loads_what_is_saved(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
    )
    model = transformers.LlamaForCausalLM(config)
    model.config.save_pretrained(tmp_path)

    writer = StorageWriter(tmp_path, max_shard_size=4000)
    save(model.state_dict(), storage_writer=pickle.loads(pickle.dumps(writer)))  # as to another process

    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded: Any
    info: Any
    loaded, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)  # type: ignore[misc]
    assert not any(info.values())
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())


def begun_save(writer: StorageWriter) -> SavePlan:
    """What the ranks are told of a save that then breaks off."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(OLD), is_coordinator=True)
    writer.set_up_storage_writer(True)
    [plan] = writer.prepare_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    return plan


def test_a_save_that_breaks_off_is_undone_with_its_writer(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path)
    begun_save(writer)
    assert os.listdir(tmp_path) == [".cache"]

    del writer

    assert os.listdir(tmp_path) == []
    again = StorageWriter(tmp_path)
    begun_save(again)
    save(OLD, storage_writer=again)  # it undoes what it had begun
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_directory_that_is_not_shared_is_refused(tmp_path: Path) -> None:
    coordinator = StorageWriter(tmp_path)
    plan = begun_save(coordinator)
    places = plan.storage_data.places
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(OLD))

    elsewhere = {"weight": places["weight"]._replace(path=str(tmp_path / "gone"))}
    for storage_data in (plan.storage_data._replace(token=b"\0" * 16), plan.storage_data._replace(places=elsewhere)):
        [written] = StorageWriter(tmp_path).write_data(replace(plan, storage_data=storage_data), planner).value()
        assert "directory that the machines of all ranks share" in written.storage_data.problem
        assert SaveDirectoryError.__name__ in written.storage_data.problem


def test_an_address_of_a_store_is_refused() -> None:
    for make in (StorageWriter, StorageWriter().reset):
        with pytest.raises(InvalidPathError, match="is a store address, but StorageWriter saves into directories"):
            make("s3://models/bert")
