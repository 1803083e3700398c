"""Engines of DeepSpeed ZeRO-3 whose modules are saved and loaded from the ranks' parts, on the ranks of a gloo group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hfshard
from tests.foreign.producers.models import build
from tests.foreign.producers.truth import assert_same, read_truth, write_truth
from tests.foreign.producers.zero import train_zero

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("bf16", {"stage3_param_persistence_threshold": 0}),
    "some-whole": ("fp16", {"stage3_param_persistence_threshold": 10}),
    "all-whole": ("bf16", {}),
    "fp32-sub-groups": ("fp32", {"stage3_param_persistence_threshold": 0, "sub_group_size": 40}),
    "offloaded": (
        "bf16",
        {
            "stage3_param_persistence_threshold": 7,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
        },
    ),
    "within-nodes": ("bf16", {"stage3_param_persistence_threshold": 0, "zero_hpz_partition_size": 2}),
}
"""Name -> the precision and DeepSpeed's "zero_optimization"."""
_GATHERS = ("all_gather", "all_gather_into_tensor", "_all_gather_base", "all_gather_coalesced", "gather", "broadcast")


def variants(ranks: int) -> list[str]:
    """List what a number of ranks can run."""
    return [name for name in VARIANTS if name != "within-nodes" or ranks == 4]


def engine_of(rank: int, variant: str) -> Any:
    """Train the model with everything that can be got wrong."""
    precision, options = VARIANTS[variant]
    return train_zero(rank, build("nasty"), 3, precision, options)


def gathered(engine: Any) -> dict[str, torch.Tensor]:
    """Return copies of a module's tensors, complete on each rank."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    with GatheredParameters(list(engine.module.parameters())):
        return {name: tensor.detach().clone() for name, tensor in engine.module.state_dict().items()}


def masters(engine: Any) -> dict[str, torch.Tensor]:
    """Gather what the optimizer steps on."""
    from deepspeed.utils import safe_get_full_fp32_param

    trained = [(name, one) for name, one in engine.module.named_parameters() if one.requires_grad]
    return {name: safe_get_full_fp32_param(one).view(one.ds_shape).clone() for name, one in trained}


@contextmanager
def counted_gathers() -> Iterator[Counter[str]]:
    """Count the collectives of the block that give a rank what others have."""
    found: Counter[str] = Counter()
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name in _GATHERS:
            patch.setattr(dist, name, _counting(name, getattr(dist, name), found))
        yield found


def _counting(name: str, call: Any, found: Counter[str]) -> Any:
    def counting(*args: Any, **kwargs: Any) -> Any:
        found[name] += 1
        return call(*args, **kwargs)

    return counting


def save_all(rank: int, place: Path) -> None:
    """Save in three ways, each rank its part; the test compares with what was gathered."""
    for variant in variants(dist.get_world_size()):
        engine = engine_of(rank, variant)
        truth = gathered(engine)
        with counted_gathers() as found:
            hfshard.save_model(engine.module, place / variant / "module", max_shard_size=200)
            hfshard.save_model(engine, place / variant / "engine")
            hfshard.save_state_dict(engine.module.state_dict(), place / variant / "state dict", max_shard_size=200)
        assert not found
        if rank == 0:
            write_truth(place / variant, truth)
        assert_same(gathered(engine), truth)


def other_weights() -> dict[str, torch.Tensor]:
    """Weights of float32 that no 16 bits hold, for the model that was trained otherwise."""
    torch.manual_seed(99)
    whole = build("nasty")
    return {
        name: torch.randn_like(tensor) if tensor.is_floating_point() else tensor + 5 * (tensor.dtype != torch.bool)
        for name, tensor in whole.state_dict().items()
        if name != "head.weight"
    }


def load_all(rank: int, place: Path) -> None:
    """Load into engines that have trained: each rank its part, and the next step begins with what was loaded."""
    weights = read_truth(place)
    for variant in variants(dist.get_world_size()):
        engine = engine_of(rank, variant)
        before = gathered(engine)
        with counted_gathers() as found:
            hfshard.load_model(engine, place / "saved")
        assert not found
        expected = {**weights, "head.weight": weights["embed.weight"]}
        assert_same(gathered(engine), _cast(expected, before))
        trained = masters(engine)
        assert_same(trained, {name: expected[name] for name in trained})
        _step(engine)
        stepped = gathered(engine)
        assert not stepped["up.weight"].equal(expected["up.weight"].to(stepped["up.weight"].dtype))
        assert (stepped["up.weight"].float() - expected["up.weight"]).abs().max() < 0.1


def _cast(tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(like[name].dtype) for name, tensor in tensors.items()}


def _step(engine: Any) -> None:
    from tests.foreign.producers.models import losses

    loss = next(iter(losses(engine, seed=5)))
    engine.backward(loss)
    engine.step()
