"""A state dict, by the readers of safetensors, pickles and torch.distributed.checkpoint that there are."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness.inputs import shards_of
from bench.harness.models import make_tensors
from bench.harness.question import Context, Job, SkipPeer
from bench.readers.job import loading

if TYPE_CHECKING:
    from torch import Tensor


def pickle_of(context: Context) -> Path:
    """The same tensors as one file of torch.save."""
    return context.directory / "pytorch_model.bin"


def dcp_source_of(context: Context) -> Path:
    """The same tensors as a checkpoint of torch.distributed.checkpoint."""
    return context.directory / "source-dcp"


def make_others(context: Context) -> None:
    """Write both, once."""
    import torch

    if not pickle_of(context).exists():
        torch.save(make_tensors(context.specs), pickle_of(context))
    if not dcp_source_of(context).exists():
        dcp: Any = import_module("torch.distributed.checkpoint")
        warnings.simplefilter("ignore")
        dcp.save(make_tensors(context.specs), storage_writer=dcp.FileSystemWriter(dcp_source_of(context)), no_dist=True)


def with_safetensors(context: Context) -> Job:
    """A state dict, mapped."""
    from safetensors.torch import load_file

    return _state_dict(
        lambda: {name: one for path in shards_of(context.source) for name, one in load_file(path).items()}
    )


def with_torch(context: Context) -> Job:
    """A state dict, mapped, of a pickle."""
    import torch

    return _state_dict(lambda: torch.load(pickle_of(context), mmap=True, weights_only=True))


def with_dcp(context: Context, reader: str = "HuggingFaceStorageReader") -> Job:
    """torch.distributed.checkpoint into tensors that it is given; making them is in the time, as for the others.

    Args:
        context: Where.
        reader: HuggingFaceStorageReader for safetensors, FileSystemReader for DCP's own format.
    """
    import torch

    dcp: Any = import_module("torch.distributed.checkpoint")
    warnings.simplefilter("ignore")
    shapes = json.loads(context.specs.read_text())
    where = dcp_source_of(context) if reader == "FileSystemReader" else context.source

    def load() -> dict[str, Tensor]:
        tensors = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes}
        dcp.load(tensors, storage_reader=getattr(dcp, reader)(str(where)), no_dist=True)
        return tensors

    return _state_dict(load)


def with_fastsafetensors(context: Context) -> Job:
    """Its loader without a GPU."""
    import torch

    fastsafetensors = import_module("fastsafetensors")

    def load() -> dict[str, Tensor]:
        loader = fastsafetensors.SafeTensorsFileLoader(fastsafetensors.SingleGroup(), torch.device("cpu"), nogds=True)
        loader.add_filenames({0: [str(path) for path in shards_of(context.source)]})
        buffers = loader.copy_files_to_device()
        kept.append((loader, buffers))
        return {name: buffers.get_tensor(name) for name in loader.get_keys()}

    kept: list[Any] = []
    return _state_dict(load)


def with_runai(context: Context) -> Job:
    """Its tensors are views of a buffer that it uses again, so each is cloned."""
    streamer_class = import_module("runai_model_streamer").SafetensorsStreamer

    def load() -> dict[str, Tensor]:
        with streamer_class() as streamer:
            streamer.stream_files([str(path) for path in shards_of(context.source)])
            return {name: tensor.clone() for name, tensor in streamer.get_tensors()}

    return _state_dict(load)


def with_instanttensor(context: Context) -> Job:
    """It loads to GPUs alone, and says so."""
    instanttensor = import_module("instanttensor")
    paths = [str(path) for path in shards_of(context.source)]
    try:
        opened = instanttensor.safe_open(paths, framework="pt", device="cpu")
    except ValueError as error:
        raise SkipPeer(str(error)) from error

    def load() -> dict[str, Tensor]:
        with opened as file:
            return dict(file.tensors())

    return _state_dict(load)


def _state_dict(load: Callable[[], dict[str, Tensor]]) -> Job:
    return loading(load, lambda tensors: tensors.values())
