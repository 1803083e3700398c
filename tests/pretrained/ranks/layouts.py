"""Ways to spread a transformers model over ranks, as users write them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.zoo.models import ZOO


def spread(model: Any, layout: str) -> Any:
    """Spread a model over all ranks: "fsdp", "hsdp", "tp" (of rows and columns by turns) or "fsdp_tp"."""
    if layout == "fsdp":
        return shard_fully(model, init_device_mesh("cpu", (2,)))
    if layout == "hsdp":
        return shard_fully(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
    if layout == "tp":
        return distribute(model, init_device_mesh("cpu", (2,)))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    return shard_fully(distribute(model, mesh["model"]), mesh["data"])


def shard_fully(model: Any, mesh: DeviceMesh) -> Any:
    """FSDP2, layer by layer."""
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def layers_of(model: Any) -> list[nn.Module]:
    """The decoder's layers."""
    return list(model.get_decoder().layers)


def distribute(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Make each matrix a DTensor of rows or of columns, and each vector one that every rank has; ties are kept."""
    made: dict[int, nn.Parameter] = {}
    for number, module in enumerate(list(model.modules())):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                placement = Shard(number % parameter.dim()) if parameter.dim() > 1 else Replicate()
                made[id(parameter)] = nn.Parameter(
                    distribute_tensor(parameter.data, mesh, [placement]), requires_grad=parameter.requires_grad
                )
            setattr(module, name, made[id(parameter)])
    return model


def _even(name: str) -> Any:
    """The sizes that transformers' own tensor parallelism takes in its oldest version, too."""
    config = ZOO[name].make_config()
    config.vocab_size = 64
    config.num_key_value_heads = 2
    return config


def _six_experts() -> Any:
    config = ZOO["qwen3_moe"].make_config()
    config.num_experts = 6
    return config


EVEN = {
    f"{name}_even": replace(ZOO[name], name=f"{name}_even", make_config=partial(_even, name))
    for name in ("llama_untied", "llama_tied", "qwen3_moe")
}
SIX_EXPERTS = "qwen3_moe_six"
"""Four ranks have two, two, two and none of the experts."""
SPECIMENS = {**ZOO, **EVEN, SIX_EXPERTS: replace(ZOO["qwen3_moe"], name=SIX_EXPERTS, make_config=_six_experts)}
"""The models of the zoo, and some of other sizes."""
