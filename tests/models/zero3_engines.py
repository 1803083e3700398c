"""Engines of DeepSpeed ZeRO-3 whose modules are saved and loaded from the parts, on the ranks of a gloo group."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hfshard
from hfshard.errors import InvalidArgumentError, UnstorableTensorError
from tests.distributed.test_save_on_ranks_costs import number_in
from tests.flows.resume_trainings import as_launched
from tests.foreign.producers.models import build, losses
from tests.foreign.producers.truth import read_truth, write_truth
from tests.foreign.producers.zero import reordered_masters, train_zero, zero_engine
from tests.helpers.tensor_bytes import assert_same

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
LARGE_LAYERS = 24
LAYER_BYTES = 4 << 20
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

    if engine.zero_round_robin_gradients():  # which DeepSpeed's function does not know
        reordered = reordered_masters(engine)
        return {
            name: reordered[id(one)].view(one.shape)
            for name, one in engine.module.named_parameters()
            if one.requires_grad
        }
    trained = [(name, one) for name, one in engine.module.named_parameters() if one.requires_grad]
    shapes = {name: getattr(one, "ds_shape", one.shape) for name, one in trained}
    return {name: safe_get_full_fp32_param(one).view(shapes[name]).clone() for name, one in trained}


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


def check_all(rank: int, place: Path) -> None:
    """Do everything on the ranks of one group."""
    with as_launched(rank, dist.get_world_size()):
        save_all(rank, place)
        load_all(rank, place)
        refuse_all(rank, place)
        load_into_stage_2(rank, place)
        if dist.get_world_size() == 2:
            save_llama(rank, place)
            save_large(rank, place)


def refuse_all(rank: int, place: Path) -> None:
    """Refuse, by name and before a file is written, what cannot be told from the parts."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    engine = engine_of(rank, "bf16")
    weight = engine.module.up.weight
    for attribute, value, owner, words in (
        ("final_location", "nvme", weight.ds_tensor, "has moved parts of it to NVMe"),
        ("ds_quant_scale", torch.ones(1), weight.ds_tensor, "has quantized it"),
        ("comm", None, weight, "within groups of ranks"),
        ("ds_numel", weight.ds_numel + 50, weight, "elements"),
    ):
        before = getattr(owner, attribute, None)
        setattr(owner, attribute, value)
        with pytest.raises(UnstorableTensorError, match=f"Cannot save 'up.weight': DeepSpeed ZeRO-3 .*{words}"):
            hfshard.save_model(engine.module, place / "refused")
        with pytest.raises(InvalidArgumentError, match=f"Cannot load into 'up.weight': DeepSpeed ZeRO-3 .*{words}"):
            hfshard.load_model(engine.module, place / "other" / "saved")
        if attribute == "comm":
            with GatheredParameters([weight]):
                hfshard.save_state_dict({"weight": weight}, place / "gathered")
        if attribute in ("final_location", "ds_numel"):
            setattr(owner, attribute, before)
        else:
            delattr(owner, attribute)
    assert not (place / "refused").exists()


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
        assert gc.get_freeze_count()  # as this process began; without it, each collection takes a second
        if rank == 0:
            write_truth(place / variant, truth)
        assert_same(gathered(engine), truth)


def save_llama(rank: int, place: Path) -> None:
    """Save a transformers model through its own method while hfshard is installed, and through that of the mixin."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 12, "intermediate_size": 10, "num_hidden_layers": 2, "vocab_size": 9}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True))
    engine = zero_engine(model, 3, "bf16", {"stage3_param_persistence_threshold": 12})
    truth = gathered(engine)
    with hfshard.install(quiet=True), counted_gathers() as found:
        engine.module.save_pretrained(place / "llama", max_shard_size=500)
        hfshard.save_model(engine.module, place / "llama at once")
    assert not found
    if rank == 0:
        write_truth(place / "llama", truth)
    dist.barrier()
    # Accelerate's way: the first rank has gathered everything, and the others have nothing to add.
    with hfshard.install(quiet=True):
        engine.module.save_pretrained(place / "given", is_main_process=rank == 0, state_dict=None if rank else truth)


def save_large(rank: int, place: Path) -> None:
    """Save more than a rank may need memory for."""
    layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(LARGE_LAYERS)))
    engine = zero_engine(layers, 3, "fp32", {"stage3_param_persistence_threshold": 0})
    hfshard.save_state_dict({"w": next(iter(engine.module.state_dict().values()))}, place / "warm")
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = number_in("/proc/self/status", "VmRSS")
    wrote = number_in("/proc/self/io", "wchar")

    hfshard.save_model(engine, place / "large", max_shard_size="5MiB")

    growth = (number_in("/proc/self/status", "VmHWM") - before) * 1024
    assert growth < 0.3 * LARGE_LAYERS * LAYER_BYTES
    wrote = number_in("/proc/self/io", "wchar") - wrote
    assert 0.74 < wrote / (LARGE_LAYERS * LAYER_BYTES) < 0.76  # half of the files, and half of the other half sent


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
    weights = read_truth(place / "other")
    for variant in variants(dist.get_world_size()):
        engine = engine_of(rank, variant)
        before = gathered(engine)
        with counted_gathers() as found:
            hfshard.load_model(engine, place / "other" / "saved")
        assert not found
        expected = {**weights, "head.weight": weights["embed.weight"]}
        assert_same(gathered(engine), _cast(expected, before))
        trained = masters(engine)
        assert_same(trained, {name: expected[name] for name in trained})
        _step(engine)
        stepped = gathered(engine)
        assert not stepped["up.weight"].equal(expected["up.weight"].to(stepped["up.weight"].dtype))
        assert (stepped["up.weight"].float() - expected["up.weight"]).abs().max() < 0.1


def load_into_stage_2(rank: int, place: Path) -> None:
    """Load into an engine that partitions its masters alone; they follow."""
    engine = train_zero(rank, build("nasty"), 2, "bf16", {})
    before = gathered(engine)
    weights = read_truth(place / "other")

    hfshard.load_model(engine, place / "other" / "saved")

    expected = _cast({**weights, "head.weight": weights["embed.weight"]}, before)
    assert_same(gathered(engine), expected)
    found = masters(engine)
    assert_same(found, {name: expected[name].float() for name in found})


def _cast(tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(like[name].dtype) for name, tensor in tensors.items()}


def _step(engine: Any) -> None:
    loss = next(iter(losses(engine, seed=5)))
    engine.backward(loss)
    engine.step()
