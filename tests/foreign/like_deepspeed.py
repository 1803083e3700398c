"""Files as DeepSpeed writes them, by torch.save and without DeepSpeed: small, and open to changes.

`contents` cuts parameters as DeepSpeed's sources do: by `torch.cat`, zeros at the end, and `torch.chunk`.
"""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from math import prod
from pathlib import Path
from typing import Any

import torch

from hfshard.foreign.byte_runs import ForeignTable

Tensors = Mapping[str, torch.Tensor]
VERSION = "0.19.8"

TRAINED: Sequence[Tensors] = (
    {"embed": torch.arange(15.0).view(5, 3) + 0.1, "up": torch.arange(7.0) + 100.1},
    {"gain": torch.tensor([0.7])},
    {"norm": torch.arange(6.0).view(1, 2, 3) - 50.3},
)
"""Groups of sizes that no number of ranks divides; the second one is smaller than its padding."""
FROZEN: Tensors = {"fixed": (torch.arange(10.0).view(2, 5) + 1000).bfloat16()}
BUFFERS: Tensors = {"count": torch.tensor(3), "mask": torch.tensor([True, False]), "mean": torch.tensor([0.5, 0.25])}
SHARED = {"head": "embed"}


class ZeroStageEnum(int, Enum):
    """A class of DeepSpeed."""

    optimizer_states = 1
    gradients = 2
    weights = 3


class DynamicLossScaler:
    """A class of DeepSpeed."""

    def __init__(self) -> None:
        self.cur_scale = 65536
        self.scale_factor = 2.0
        self.scale_window = 3
        self.cur_iter = 12
        self.last_overflow_iter = 4


class fragment_address:
    """A class of DeepSpeed."""

    def __init__(self, numel: int, start: int) -> None:
        self.numel = numel
        self.start = start


_MODULES = {
    ZeroStageEnum: "deepspeed.runtime.zero.config",
    DynamicLossScaler: "deepspeed.runtime.fp16.loss_scaler",
    fragment_address: "deepspeed.utils.tensor_fragment",
}


@contextmanager
def _named_like_deepspeed() -> Iterator[None]:
    """Give the classes above the modules of DeepSpeed's own, by which pickle names them."""
    before = {name: sys.modules.get(name) for name in ("deepspeed", *_MODULES.values())}
    try:
        sys.modules["deepspeed"] = types.ModuleType("deepspeed")
        for one, name in _MODULES.items():
            module = types.ModuleType(name)
            setattr(module, one.__name__, one)
            one.__module__ = name
            sys.modules[name] = module
        yield
    finally:
        for name, module_before in before.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before


def write(folder: Path, files: Mapping[str, Any]) -> None:
    """Write files by torch.save."""
    with _named_like_deepspeed():
        for name, value in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(value, path)


def contents(stage: int, ranks: int, groups: Sequence[Tensors] = TRAINED, **options: Any) -> dict[str, Any]:
    """Return file -> content of a save under ZeRO 1, 2 or 3 in bfloat16; `options` are those of the functions below."""
    return _zero_3(ranks, groups, **options) if stage == 3 else _zero_1_2(stage, ranks, groups, **options)


def expected(*, masters: bool = True, groups: Sequence[Tensors] = TRAINED) -> dict[str, torch.Tensor]:
    """Return what is read of `contents`."""
    trained = {name: tensor for group in groups for name, tensor in group.items()}
    if not masters:
        trained = {name: tensor.bfloat16() for name, tensor in trained.items()}
    shared = {alias: trained[name] for alias, name in SHARED.items()}
    return {**trained, **FROZEN, **BUFFERS, **shared}


def state_of_model(groups: Sequence[Tensors] | None, weights: Tensors | None, **other: Any) -> dict[str, Any]:
    """Return the content of a file of weights."""
    shapes = None if groups is None else [{name: one.shape for name, one in group.items()} for group in groups]
    return {
        "module": None if weights is None else OrderedDict(weights),
        "buffer_names": list(BUFFERS),
        "optimizer": None,
        "param_shapes": None if shapes is None else [OrderedDict(one) for one in shapes],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": None if groups is None else dict(SHARED),
        "lr_scheduler": {"last_epoch": 2, "lr_lambdas": [{}]},
        "dp_world_size": 1,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {"zero_optimization": {"stage": 1}},
        "ds_version": VERSION,
        **other,
    }


def zero_partitions(
    stage: int | None,
    ranks: int,
    groups: Sequence[Tensors],
    *,
    alignment: int = 2,
    gap: int = 0,
    keeps_padding: bool = False,
    model_rank: int = 0,
) -> dict[str, Any]:
    """Return the files of the optimizer under ZeRO 1, 2 or (None) BF16_Optimizer.

    Args:
        stage, ranks, groups: As in `contents`.
        alignment: A partition's size is a multiple of it.
        gap: Zeros after each parameter but a group's last.
        keeps_padding: Whether the masters are saved with the padding at the end.
        model_rank: The pipeline's stage.
    """
    files: dict[str, Any] = {}
    for rank in range(ranks):
        masters, moments, slices = [], {}, []
        for number, group in enumerate(groups):
            flat, begins = _flattened(group, gap)
            total = len(flat)
            padded = torch.cat([flat, torch.zeros(-total % (alignment * ranks))])
            part = padded.chunk(ranks)[rank].clone()
            size = len(part)
            kept = size if keeps_padding else max(0, min(size, total - rank * size))
            masters.append(part[:kept])
            moments[number] = {"step": torch.tensor(2.0), "exp_avg": -part}
            fragments = OrderedDict()
            for name, tensor in group.items():
                low, high = max(begins[name], rank * size), min(begins[name] + tensor.numel(), (rank + 1) * size)
                if low < high:
                    fragments[name] = fragment_address(high - low, low - rank * size)
            slices.append(fragments)
        state = {
            "loss_scaler": DynamicLossScaler(),
            "base_optimizer_state": {"state": moments, "param_groups": _options([[one] for one in range(len(groups))])},
            "single_partition_of_fp32_groups": masters,
            "zero_stage": ZeroStageEnum(stage) if stage else None,
            "param_alignment_paddings": [
                [gap if left else 0 for left in reversed(range(len(group)))] for group in groups
            ],
            "partition_count": [ranks] * len(groups),
            "param_slice_mappings": slices,
        }
        if stage is None:
            del state["zero_stage"], state["param_alignment_paddings"]
        files[f"bf16_zero_pp_rank_{rank}_mp_rank_{model_rank:02d}_optim_states.pt"] = {
            "optimizer_state_dict": state,
            "ds_config": {},
            "ds_version": VERSION,
        }
    return files


def _flattened(group: Tensors, gap: int) -> tuple[torch.Tensor, dict[str, int]]:
    pieces, begins, at = [], {}, 0
    for number, (name, tensor) in enumerate(group.items()):
        begins[name] = at
        zeros = 0 if number == len(group) - 1 else gap
        pieces += [tensor.flatten(), torch.zeros(zeros)]
        at += tensor.numel() + zeros
    return torch.cat([*pieces, torch.zeros(0)]), begins


def _zero_1_2(stage: int, ranks: int, groups: Sequence[Tensors], **options: Any) -> dict[str, Any]:
    trained = {name: tensor.bfloat16() for group in groups for name, tensor in group.items()}
    weights = {**BUFFERS, **trained, **FROZEN, **{alias: trained[name] for alias, name in SHARED.items()}}
    files = {"mp_rank_00_model_states.pt": state_of_model(groups, weights)}
    return files | zero_partitions(stage, ranks, groups, **options)


def _zero_3(ranks: int, groups: Sequence[Tensors], sub_group: int | None = None) -> dict[str, Any]:
    """Cut parameters for each rank.

    Args:
        ranks: Their number.
        groups: Groups of trained parameters.
        sub_group: Elements of a rank's part of a sub-group, wherever a parameter ends; None: a sub-group is a group.
    """
    names = [*(name for group in groups for name in group), *FROZEN, *SHARED]
    emptied = {name: torch.zeros(0, dtype=torch.bfloat16) for name in names}
    files: dict[str, Any] = {}
    for rank in range(ranks):
        flats = [torch.cat([torch.zeros(0), *(_part(one, rank, ranks) for one in group.values())]) for group in groups]
        if sub_group is not None:
            flats = list(torch.cat(flats).split(sub_group))
        files[f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {
            "optimizer_state_dict": {
                "zero_stage": ZeroStageEnum.weights,
                "loss_scaler": DynamicLossScaler(),
                "partition_count": ranks,
                "optimizer_state_dict": {
                    "state": {at: {"step": torch.tensor(2.0), "exp_avg": -flat} for at, flat in enumerate(flats)},
                    "param_groups": _options(
                        [[one] for one in range(len(groups))]
                        if sub_group is None
                        else [[*range(len(flats))], *([] for _ in groups[1:])]
                    ),
                },
                "fp32_flat_groups": [flat.clone() for flat in flats],
            },
            "ds_config": {},
            "ds_version": VERSION,
        }
        files[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = state_of_model(
            groups,
            {**emptied, **BUFFERS},
            frozen_param_shapes=OrderedDict((name, one.shape) for name, one in FROZEN.items()),
            frozen_param_fragments=OrderedDict((name, _part(one, rank, ranks)) for name, one in FROZEN.items()),
            shared_params=dict(SHARED) if rank == 0 else {},
        )
    return files


def _options(numbers: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    return [{"params": list(own), "lr": 0.1, "momentum": 0.5 + at} for at, own in enumerate(numbers)]


def _part(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    padding = torch.full((-tensor.numel() % ranks,), 7777.0, dtype=tensor.dtype)
    return torch.cat([tensor.flatten(), padding]).chunk(ranks)[rank].clone()


def universal(weights: Tensors, trained: Tensors) -> dict[str, Any]:
    """Return the files of a universal checkpoint: everything is float32 there, even a count."""
    files: dict[str, Any] = {"mp_rank_00_model_states.pt": state_of_model([trained], weights, shared_params={})}
    for name in dict.fromkeys([*weights, *trained]):
        value = {"param": trained[name].float() if name in trained else weights[name].float() + 0.125, "cat_dim": 0}
        files[f"zero/{name}/fp32.pt"] = value
        if name in trained:
            files[f"zero/{name}/exp_avg.pt"] = {"param": -trained[name].float(), "cat_dim": 0}
            files[f"zero/{name}/step.pt"] = torch.tensor(2.0)
    return files | {"zero/optimizer_state.pt": {"param_groups": _options([[0]]), "loss_scaler": DynamicLossScaler()}}


def values(table: ForeignTable) -> dict[str, torch.Tensor]:
    """Read the tensors of a table, byte by byte, and give aliases their data."""
    found = {}
    for name, tensor in table.tensors.items():
        raw = bytearray(b"\xff" * prod(tensor.shape) * tensor.dtype.itemsize)
        for run in tensor.runs:
            with open(Path(table.directory) / run.file, "rb") as file:
                file.seek(run.offset)
                raw[run.start : run.start + run.size] = file.read(run.size)
        flat = torch.frombuffer(raw, dtype=tensor.dtype) if raw else torch.empty(0, dtype=tensor.dtype)
        found[name] = flat.view(tensor.shape)
    return found | {alias: found[name] for alias, name in table.aliases.items()}
