"""Ways to spread a transformers model over ranks, as users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers.distributed.configuration_utils import DistributedConfig


def spread(model: Any, layout: str) -> Any:
    """Spread a model over all ranks, in one of `LAYOUTS`; returns it, or what is wrapped around it."""
    return LAYOUTS[layout](model)


def shard_fully(model: Any, mesh: DeviceMesh) -> Any:
    """FSDP2, layer by layer."""
    for layer in layers_of(model):
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def layers_of(model: Any) -> list[nn.Module]:
    """The decoder's layers."""
    return list(model.get_decoder().layers)


def split_by_turns(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
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


def split_layers(model: Any, mesh: DeviceMesh) -> Any:
    """Tensor parallel attention, where its heads can be shared out, and MLPs; experts and embeddings stay whole."""
    for layer in layers_of(model):
        if isinstance(layer, Passed):
            continue
        plan: dict[str, Any] = {}
        if getattr(model.config, "num_key_value_heads", 1) % mesh.size() == 0:
            plan |= dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ColwiseParallel())
            plan["self_attn.o_proj"] = RowwiseParallel()
        if hasattr(getattr(layer, "mlp", None), "gate_proj"):
            plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
            plan["mlp.down_proj"] = RowwiseParallel()
        parallelize_module(layer, mesh, plan, src_data_rank=None)
    return model


def share_out_experts(model: Any, mesh: DeviceMesh) -> Any:
    """Give each rank some of the experts, where there are any; each has all of the rest."""
    for name, parameter in list(model.named_parameters()):
        path, _, attribute = name.rpartition(".")
        if path.endswith(".experts"):
            part = nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(0)]), parameter.requires_grad)
            setattr(model.get_submodule(path), attribute, part)
    return model


class Passed(nn.Module):
    """In the place of what another stage of a pipeline has."""

    def forward(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return value


def take_stage(model: Any, rank: int, stages: int) -> Any:
    """Leave the model the layers of one stage; one whose embedding is tied is left that in the last one, too."""
    body = model.model
    count = len(body.layers)
    mine = range(count * rank // stages, count * (rank + 1) // stages)
    for number in set(range(count)).difference(mine):
        body.layers[number] = Passed()
    is_last = rank == stages - 1
    if rank and not (is_last and model.config.tie_word_embeddings):
        body.embed_tokens = Passed()
    if not is_last:
        body.norm = Passed()
        model.lm_head = Passed()
    return model


def replicate(model: Any) -> Any:
    """DistributedDataParallel."""
    return nn.parallel.DistributedDataParallel(model)


def compute(model: Any, layout: str, tokens: torch.Tensor) -> torch.Tensor | None:
    """The logits, computed by all ranks together; None: this layout computes nothing by itself, or on another rank."""
    if layout in LAYOUTS and _only_holds(model, layout):
        return None
    if layout in LAYOUTS and layout.startswith("pp"):
        return _through_stages(model, tokens, dist.get_world_size() if layout == "pp" else 2)
    logits: torch.Tensor = model(tokens).logits
    return logits


def _only_holds(model: Any, layout: str) -> bool:
    """Whether it is not meant to compute: of torch's tensor parallel layers, those whose features can't be halved."""
    if layout.endswith("ep"):
        return any(name.endswith(".experts") for name, _ in model.named_modules())
    return "by_turns" in layout or (layout.endswith("tp") and model.config.intermediate_size % 2 == 1)


def _through_stages(model: Any, tokens: torch.Tensor, stages: int) -> torch.Tensor | None:
    ranks = dist.get_world_size() // stages
    rank = dist.get_rank()
    inputs: dict[str, torch.Tensor] = {"input_ids": tokens}
    if rank >= ranks:
        hidden = torch.empty(*tokens.shape, model.config.hidden_size, dtype=model.dtype)
        dist.recv(hidden, rank - ranks)
        inputs = {"inputs_embeds": hidden}
    given: torch.Tensor = model(**inputs).logits
    if rank < dist.get_world_size() - ranks:
        dist.send(given.contiguous(), rank + ranks)
        return None
    return given


_MESHES: dict[tuple[int, ...], DeviceMesh] = {}


def mesh_of(*shape: int) -> DeviceMesh:
    """A mesh of all ranks, with dimensions "a" and "b"; the groups of one are made once."""
    if shape not in _MESHES:
        _MESHES[shape] = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    return _MESHES[shape]


def forget_meshes() -> None:
    """Begin in a new process group."""
    _MESHES.clear()


def _all() -> DeviceMesh:
    return mesh_of(dist.get_world_size())


def _of_two(model: Any, inner: Callable[[Any, DeviceMesh], Any]) -> Any:
    mesh = mesh_of(2, dist.get_world_size() // 2)
    return shard_fully(inner(model, mesh["b"]), mesh["a"])


def _of_stages(model: Any, inner: Callable[[Any, DeviceMesh], Any]) -> Any:
    mesh = mesh_of(2, dist.get_world_size() // 2)
    return inner(take_stage(model, mesh.get_local_rank("a"), 2), mesh["b"])


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda model: model,
    "ddp": replicate,
    "fsdp": lambda model: shard_fully(model, _all()),
    "tp": lambda model: split_layers(model, _all()),
    "by_turns": lambda model: split_by_turns(model, _all()),
    "ep": lambda model: share_out_experts(model, _all()),
    "pp": lambda model: take_stage(model, dist.get_rank(), dist.get_world_size()),
    "hsdp": lambda model: shard_fully(model, mesh_of(2, dist.get_world_size() // 2)),
    "fsdp_tp": lambda model: _of_two(model, split_layers),
    "fsdp_by_turns": lambda model: _of_two(model, split_by_turns),
    "fsdp_ep": lambda model: _of_two(model, share_out_experts),
    "pp_fsdp": lambda model: _of_stages(model, shard_fully),
    "pp_tp": lambda model: _of_stages(model, split_layers),
}
"""What users do with a model; those of two words need four ranks."""

_FIELDS = DistributedConfig.__dataclass_fields__
_EP = {"ep_size": 2} if "ep_size" in _FIELDS else {"enable_expert_parallel": True}
CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "their_fsdp": (2, {"fsdp_size": 2}),
    "their_tp": (2, {"tp_size": 2}),
    "their_pp": (2, {"pp_size": 2}),
    "their_ep": (2, {"tp_size": 2, **_EP}),
    "their_fsdp_4": (4, {"fsdp_size": 4}),
}
"""What transformers spreads by itself: ranks, and the arguments of a DistributedConfig."""
if "dp_replicate_size" in _FIELDS:
    CONFIGS["their_hsdp"] = 4, {"fsdp_size": 2, "dp_replicate_size": 2}
    CONFIGS["their_fsdp_tp"] = 4, {"tp_size": 2, "fsdp_size": 2}
if "ep_size" in _FIELDS:
    CONFIGS["their_fsdp_ep"] = 4, {"fsdp_size": 4, "ep_size": 2}
