"""The producers' models under FSDP1, in each of its ways, and what torch itself gathers of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.foreign.producers.dcp import whole_state
from tests.foreign.producers.models import Norm, build, losses

WAYS: dict[str, dict[str, Any]] = {
    "parts": {"use_orig_params": True},
    "flat": {"use_orig_params": False, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "whole": {"use_orig_params": True, "sharding_strategy": ShardingStrategy.NO_SHARD},
    "bits": {"use_orig_params": True, "mixed_precision": MixedPrecision(torch.bfloat16, torch.float32, torch.float32)},
    "flat and full": {"use_orig_params": False},
    "hybrid": {"use_orig_params": True, "sharding_strategy": ShardingStrategy.HYBRID_SHARD},
}
"""Arguments of the wrapper."""


def wrapped(way: str, model: nn.Module | None = None) -> nn.Module:
    """Wrap the nasty model, or another one, and its layers of statistics."""
    model = build("nasty") if model is None else model
    options = dict(WAYS[way])
    if not options["use_orig_params"]:  # then torch trains all of a flat parameter, or nothing
        options["ignored_modules"] = [one for name, one in model.named_children() if name == "frozen"]
    if way == "hybrid":
        options["process_group"] = groups_of_two()
    with warnings.catch_warnings(action="ignore"):  # FSDP1 is deprecated
        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Norm}), device_id=torch.device("cpu"), **options
        )


def groups_of_two() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The group that shares a model, and the one that has copies of a part."""
    world = dist.get_world_size()
    sharing = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    copies = [dist.new_group(list(range(first, world, 2))) for first in range(2)]
    return sharing[dist.get_rank() // 2], copies[dist.get_rank() % 2]


def trained_by(model: nn.Module, way: str) -> torch.optim.Optimizer:
    """Two groups, by name, where parameters have names of their own."""
    if way == "plain" or WAYS[way]["use_orig_params"]:
        trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        decayed = [one for name, one in trained.items() if name.endswith("weight")]
        others = [one for name, one in trained.items() if not name.endswith("weight")]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.03)
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.03)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> list[float]:
    """Take a few steps; return their losses."""
    found = []
    for loss in losses(model, seed):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole model, as torch gathers it."""
    with warnings.catch_warnings(action="ignore"):  # its way to do that is deprecated, too
        return {name: tensor.clone() for name, tensor in whole_state(model).items()}


@contextmanager
def counted_gathers() -> Iterator[list[str]]:
    """Note each collective in the block that brings the parts of all ranks to each of them."""
    names = ("all_gather", "all_gather_into_tensor", "all_gather_object", "gather")
    held = {name: getattr(dist, name) for name in names}
    calls: list[str] = []

    def noting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return held[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, noting(name))
    try:
        yield calls
    finally:
        for name, function in held.items():
            setattr(dist, name, function)
