"""What each of several processes of one node loads, by whom: the whole checkpoint, some names, or parts of all."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bench.harness.inputs import shards_of
from bench.harness.question import Context

if TYPE_CHECKING:
    from torch import Tensor

READERS = 4

Load = Callable[[], Iterable["Tensor"]]
"""Loads, and gives the tensors that this process has then, or its parts of them."""

MakeLoad = Callable[..., Load]
"""Prepares the load of one process, by its number."""


def whole_by_transformers(context: Context, rank: int, **arguments: Any) -> Load:
    """`from_pretrained` of the class."""
    import torch
    from transformers import LlamaForCausalLM

    return lambda: _parts_of(LlamaForCausalLM.from_pretrained(context.source, dtype=torch.bfloat16, **arguments))


def whole_by_hfshard(context: Context, rank: int, **arguments: Any) -> Load:
    """The same class, by `hfshard.load_model`."""
    import torch
    from transformers import LlamaForCausalLM

    import hfshard

    load = hfshard.load_model
    return lambda: _parts_of(load(LlamaForCausalLM, context.source, dtype=torch.bfloat16, **arguments))


def whole_by_safetensors(context: Context, rank: int) -> Load:
    """State dicts, mapped."""
    from safetensors.torch import load_file

    return lambda: [one for path in shards_of(context.source) for one in load_file(path).values()]


def names_by_safetensors(context: Context, rank: int) -> Load:
    """A quarter of the names, mapped."""
    from safetensors import safe_open

    names = names_of(context, rank)

    def load() -> list[Tensor]:
        found = []
        for path in shards_of(context.source):
            with safe_open(path, framework="pt") as file:
                found += [file.get_tensor(name) for name in file.keys() if name in names]  # noqa: SIM118  it is no dict
        return found

    return load


def names_by_hfshard(context: Context, rank: int, **arguments: Any) -> Load:
    """A quarter of the names, by `hfshard.load_state_dict`."""
    import hfshard

    names = sorted(names_of(context, rank))
    load = hfshard.load_state_dict
    return lambda: load(context.source, keys=names, **arguments).values()


def rows_by_safetensors(context: Context, rank: int) -> Load:
    """A quarter of the rows of each tensor."""
    from safetensors import safe_open

    def load() -> list[Tensor]:
        found = []
        for path in shards_of(context.source):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  it is no dict
                    one = file.get_slice(name)
                    rows = one.get_shape()[0]
                    found.append(one[rank * rows // READERS : (rank + 1) * rows // READERS])
        return found

    return load


def spread_by_transformers(size: str) -> MakeLoad:
    """`from_pretrained` with a `distributed_config` of the name of a size."""
    return partial(_spread, whole_by_transformers, size)


def spread_by_hfshard(size: str) -> MakeLoad:
    """The same by `hfshard.load_model`."""
    return partial(_spread, whole_by_hfshard, size)


def _spread(make: MakeLoad, size: str, context: Context, rank: int, **arguments: Any) -> Load:
    from transformers.distributed.configuration_utils import DistributedConfig

    sizes: dict[str, Any] = {size: READERS}
    return make(context, rank, distributed_config=DistributedConfig(**sizes), **arguments)


def spread_by_dcp(context: Context, rank: int) -> Load:
    """torch.distributed.checkpoint into the rows of tensors, as FSDP2 has them; making them is in the time."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    dcp: Any = import_module("torch.distributed.checkpoint")
    api: Any = import_module("torch.distributed.tensor")
    mesh = init_device_mesh("cpu", (READERS,))
    shapes = json.loads(context.specs.read_text())

    def load() -> list[Tensor]:
        tensors = {
            name: api.empty(shape, dtype=torch.bfloat16, device_mesh=mesh, placements=[api.Shard(0)])
            for name, shape in shapes
        }
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(context.source)))
        return [tensor.to_local() for tensor in tensors.values()]

    return load


def names_of(context: Context, rank: int) -> set[str]:
    """A quarter of the names, in the model's order and by their bytes, as a stage of a pipeline has them."""
    shapes = json.loads(context.specs.read_text())
    total = sum(math.prod(shape) for _, shape in shapes)
    found, before = set(), 0
    for name, shape in shapes:
        if before * READERS // total == rank:
            found.add(name)
        before += math.prod(shape)
    return found


def _parts_of(model: Any) -> Iterable[Tensor]:
    return [getattr(one, "_local_tensor", one).detach() for one in model.parameters()]
