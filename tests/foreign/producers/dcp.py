"""What torch.distributed.checkpoint saves: FSDP1, FSDP2, tensor parallel and plain states; and verl, per rank."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Replicate

from tests.foreign.producers.models import MILESTONES, Norm, build, optimizer_of, train
from tests.foreign.producers.truth import checkpoint_of, gathered, write_optimizer, write_truth

Layout = Callable[[nn.Module, torch.optim.Optimizer], dict[str, Any]]


class App(Stateful):
    """The model and its optimizer as torch's tutorial saves them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Both states."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing here loads it."""
        raise NotImplementedError


def _torchtitan(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The model's names at the top, the optimizer's flat, and counters as tensors and as bytes."""
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    rank = torch.distributed.get_rank()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, MILESTONES)
    return {
        **get_model_state_dict(model),
        "optimizer": flat,
        "train_state": {"step": torch.tensor(2, dtype=torch.int32), "losses": io.BytesIO(b"seen")},
        "lr_scheduler": scheduler.state_dict(),
        "dataloader": {f"dp_rank_{rank}": {"position": rank}},
    }


LAYOUTS: dict[str, Layout] = {
    "top": lambda model, _: get_model_state_dict(model),
    "model": lambda model, _: {"model": get_model_state_dict(model)},
    "nested": lambda model, optimizer: {
        "model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)
    },
    "app": lambda model, optimizer: {"app": App(model, optimizer)},
    "torchtitan": _torchtitan,
}  # fmt: skip
"""What users give to `dcp.save`."""


def _fsdp2(model: nn.Module, ranks: int, places: Callable[[nn.Parameter], Shard | None] | None = None) -> nn.Module:
    mesh = init_device_mesh("cpu", (ranks,))
    for child in model.children():
        if child is not getattr(model, "head", None) and child is not getattr(model, "embed", None):
            fully_shard(child, mesh=mesh, shard_placement_fn=places)
    fully_shard(model, mesh=mesh, shard_placement_fn=places)
    return model


def _fsdp2_of_columns(model: nn.Module, ranks: int) -> nn.Module:
    """FSDP2 with parts of columns where the ranks have equally many, as it asks for."""
    return _fsdp2(model, ranks, lambda one: Shard(1) if one.dim() > 1 and one.shape[1] % ranks == 0 else None)


def _hybrid(model: nn.Module, ranks: int) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicas", "shards")))
    return model


def _tensor_parallel(model: nn.Module, ranks: int) -> nn.Module:
    """Columns, rows, and, with more than two ranks, FSDP over them."""
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
    plan = {
        "up": ColwiseParallel(output_layouts=Replicate()),
        "down": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tensor"], plan)
    if ranks > 2:
        fully_shard(model, mesh=mesh["data"])
    return model


def _fsdp1(model: nn.Module, ranks: int) -> nn.Module:
    policy = ModuleWrapPolicy({Norm})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


SHARDINGS: dict[str, Callable[[nn.Module, int], nn.Module]] = {
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "columns": _fsdp2_of_columns,
    "hybrid": _hybrid,
    "tensor-parallel": _tensor_parallel,
    "alone": lambda model, _: model,
}
"""How a model is cut over the ranks."""


def save_model(
    rank: int,
    place: Path,
    ranks: int,
    sharding: str,
    layout: str,
    model_name: str = "nasty",
    dtype: str = "float32",
    trains: bool = True,
    writer: Mapping[str, Any] = {},
) -> None:
    """Shard a model, train it on the same data on each rank, and save.

    Args:
        rank, place, ranks: This rank, where to save, and the number of all.
        sharding: One of `SHARDINGS`.
        layout: One of `LAYOUTS`.
        model_name: One of `models.MODELS`.
        dtype: Of the parameters.
        trains: False: save what was built; not all layers compute with parts of tensors.
        writer: Arguments of torch's FileSystemWriter.
    """
    whole = build(model_name)
    for parameter in whole.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    model = SHARDINGS[sharding](whole, ranks)
    optimizer = optimizer_of(model, build(model_name))
    if trains:
        train(model, optimizer)
        write_optimizer(place, model, optimizer)
    _save(rank, place, model, LAYOUTS[layout](model, optimizer), writer)


def _save(rank: int, place: Path, model: nn.Module, state: dict[str, Any], options: Mapping[str, Any]) -> None:
    save(state, storage_writer=FileSystemWriter(checkpoint_of(place), **options))
    truth = whole_state(model)
    if rank == 0:
        write_truth(place, truth)


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gather a model's tensors; every rank must call."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            return dict(model.state_dict())
    return gathered(model.state_dict())


def save_safetensors(rank: int, place: Path, ranks: int, is_consolidated: bool) -> None:
    """Save FSDP2 by torch's Hugging Face writer, or by the plain one whose files are safetensors.

    Args:
        rank, place, ranks: This rank, where to save, and the number of all.
        is_consolidated: Whether torch also merges the ranks' files.
    """
    model = _fsdp2(build("nasty"), ranks)
    train(model, optimizer_of(model))
    state: dict[str, Any] = dict(get_model_state_dict(model))
    path = checkpoint_of(place)
    del state["head.weight"]  # safetensors refuses tied names
    if is_consolidated:
        # torch's consolidation fails for integers, and writes zeros for tensors without a dimension.
        state = {name: one for name, one in state.items() if one.is_floating_point() and one.dim()}
        save(
            state, storage_writer=HuggingFaceStorageWriter(str(path), save_distributed=True, enable_consolidation=True)
        )
    else:
        save(state, storage_writer=FileSystemWriter(path, serialization_format=SerializationFormat.SAFETENSORS))
    truth = gathered(state)
    if rank == 0:
        write_truth(place, truth)


def save_rank_files(
    rank: int, place: Path, ranks: int, sharding: str, model_name: str = "nasty", trains: bool = True
) -> None:
    """Save a file of each rank as verl's FSDPCheckpointManager does.

    Args:
        rank, place, ranks: This rank, where to save, and the number of all.
        sharding: One of `SHARDINGS`; FSDP1 without a mesh saves ShardedTensors, which verl's older versions have.
        model_name: One of `models.MODELS`.
        trains: False: save what was built.
    """
    model = SHARDINGS[sharding](build(model_name), ranks)
    optimizer = optimizer_of(model, build(model_name))
    if trains:
        train(model, optimizer)
    folder = checkpoint_of(place)
    folder.mkdir(exist_ok=True)
    is_fsdp1 = isinstance(model, FullyShardedDataParallel)
    sharded = FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    context: AbstractContextManager[Any] = sharded if is_fsdp1 else nullcontext()
    with context:
        torch.save(model.state_dict(), folder / f"model_world_size_{ranks}_rank_{rank}.pt")
    torch.save({"state": {}}, folder / f"optim_world_size_{ranks}_rank_{rank}.pt")
    torch.save({"rng": torch.get_rng_state()}, folder / f"extra_state_world_size_{ranks}_rank_{rank}.pt")
    truth = whole_state(model)
    if rank == 0:
        (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2 - is_fsdp1, "world_size": ranks}))
        (folder / "huggingface").mkdir(exist_ok=True)
        (folder / "huggingface" / "config.json").write_text('{"model_type": "llama"}')
        write_truth(place, truth)


def save_state(rank: int, place: Path) -> None:
    """Save tensors of every dtype and memory layout, without a group."""
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(4, 6, generator=generator)
    state = {
        "transposed": matrix.t(),
        "columns": matrix[:, 1:4],
        "rows": matrix[1:3],
        "channels last": torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last),
        "expanded": matrix[0, :1].expand(5),
        "scalar": torch.tensor(-0.0),
        "empty": torch.empty(0, 3),
        "not a number": torch.tensor([float("nan"), float("inf"), 1e-45]),
        "complex": torch.randn(3, dtype=torch.complex64, generator=generator),
        "bool": torch.tensor([True, False]),
        "int8": torch.tensor([-128, 127], dtype=torch.int8),
        "uint16": torch.tensor([0, 65535], dtype=torch.uint16),
        "float64": torch.randn(3, dtype=torch.float64, generator=generator),
        "bfloat16": matrix.bfloat16(),
        "float8": matrix.to(torch.float8_e4m3fn),
        "a.b": torch.ones(2),
        "a": {"c": torch.zeros(2)},
    }
    save({"model": state}, checkpoint_id=checkpoint_of(place), no_dist=True)
    nested = cast("dict[str, torch.Tensor]", state.pop("a"))
    tensors = cast("dict[str, torch.Tensor]", state)
    write_truth(place, {**tensors, "a.c": nested["c"]})
