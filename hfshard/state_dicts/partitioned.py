"""Refuse parameters that DeepSpeed ZeRO-3 has partitioned: this process has an empty tensor in place of each."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import torch
from torch import nn

from hfshard.errors import HfshardError, InvalidArgumentError, UnstorableTensorError
from hfshard.state_dicts.wrappers import strip_wrappers, without_wrappers, wrapped_prefixes
from hfshard.storage.tensors.tensor_bytes import is_plain_type

Purpose = Literal["save", "load", "run"]
"""What the parameters are needed for: a save, a load into them, or a save or restore of a training run."""

RUN_REMEDY: Final = (
    "Save and restore this run with engine.save_checkpoint(directory) and engine.load_checkpoint(directory), which "
    "keep every rank's part; or shard the model with torch.distributed.fsdp.fully_shard, whose runs hfshard saves."
)

_WORDS: Final[dict[Purpose, tuple[type[HfshardError], str, str]]] = {
    "save": (
        UnstorableTensorError,
        "save",
        "Nothing was written. Gather the parameters on every rank during the save: with "
        "deepspeed.zero.GatheredParameters(list(model.parameters())): hfshard.save_model(model, directory). Or pass "
        "state_dict=accelerator.get_state_dict(model), which gathers them if the DeepSpeed config sets "
        "stage3_gather_16bit_weights_on_model_save to true; Trainer does the same. Without hfshard, "
        "engine.save_16bit_model(directory) saves them. ZeRO stages 1 and 2 do not partition parameters.",
    ),
    "load": (
        InvalidArgumentError,
        "load into",
        "Nothing was loaded. Load before deepspeed.initialize() and outside of deepspeed.zero.Init(). Or gather the "
        "parameters on every rank during the load: with deepspeed.zero.GatheredParameters(list(model.parameters()), "
        "modifier_rank=0): hfshard.load_model(model, path); then, if there is an engine, call "
        "engine.optimizer.refresh_fp32_params(), or its next step brings the old weights back.",
    ),
    "run": (InvalidArgumentError, "save or restore a run with", f"Nothing was changed. {RUN_REMEDY}"),
}
"""The error, the verb, and what to do."""


def is_partitioned(value: object) -> bool:
    """Return whether a tensor belongs to ZeRO-3 and cannot be read now. A parameter that is gathered can be.

    Source: DeepSpeed `runtime/zero/partition_parameters.py`, `ZeroParamStatus`. The flat tensors by which a partitioned
    optimizer knows its parameters have a `ds_id` and no `ds_status`.
    """
    if not isinstance(value, torch.Tensor) or not hasattr(value, "ds_id"):
        return False
    status = getattr(getattr(value, "ds_status", None), "name", None)
    return status != "AVAILABLE" and getattr(value, "ds_numel", None) != 0


def has_partitioned(model: nn.Module) -> bool:
    """Return whether a parameter of a model cannot be read now."""
    return any(map(is_partitioned, model.parameters()))


def refuse_partitioned(held: nn.Module | Mapping[str, Any], purpose: Purpose = "save") -> None:
    """Refuse a module or a state dict with parameters that ZeRO-3 has partitioned.

    `state_dict()` of such a module returns empty tensors without DeepSpeed's attributes. They are recognized by the
    memory or the name that they share with a partitioned parameter of any module in this process.

    Args:
        held: Not changed.
        purpose: What the parameters are needed for.

    Raises:
        UnstorableTensorError: To save, one cannot be read.
        InvalidArgumentError: For any other purpose, one cannot be read.
    """
    names = _names_in_module(held) if isinstance(held, nn.Module) else _names_in_state_dict(held)
    if not names:
        return
    kind, verb, remedy = _WORDS[purpose]
    more = len(names) - 1
    others = f" and {more} more parameter{'' if more == 1 else 's'}" if more else ""
    raise kind(
        f"Cannot {verb} {names[0]!r}{others}: DeepSpeed ZeRO-3 has partitioned {'them' if more else 'it'} across the "
        f"ranks, and this process has an empty tensor in place of {'each' if more else 'it'}. {remedy}",
        fqn=names[0],
    )


def _empty_copies(tensors: Mapping[str, Any]) -> list[str]:
    """Find the empty tensors that a state dict has in place of partitioned parameters.

    One that `state_dict()` returned shares the parameter's storage. A copy of it (`.cpu()`, `.clone()`, a description
    on the meta device) has the parameter's name, maybe with another prefix.
    """
    if "deepspeed" not in sys.modules:
        return []
    empty = {name: value for name, value in tensors.items() if _is_empty(value)}
    if not empty:
        return []
    storages: set[int] = set()
    full_names: set[str] = set()
    for name, parameter in _partitioned_in_process():
        full_names |= {name, strip_wrappers(name)}
        storages.add(_storage(parameter))
    endings = {ending for name in full_names for ending in _endings(name)}
    return [
        name
        for name, tensor in empty.items()
        if _storage(tensor) in storages or name in endings or not full_names.isdisjoint(_endings(name))
    ]


def _names_in_module(model: nn.Module) -> list[str]:
    found = [name for name, parameter in model.named_parameters() if is_partitioned(parameter)]
    wrapped = wrapped_prefixes(model) if found else set[str]()
    return [without_wrappers(name, wrapped) for name in found]


def _names_in_state_dict(tensors: Mapping[str, Any]) -> list[str]:
    return [name for name, value in tensors.items() if is_partitioned(value)] or _empty_copies(tensors)


def _is_empty(value: Any) -> bool:
    """Return whether a value is what DeepSpeed leaves of a partitioned parameter: a plain tensor of shape (0,)."""
    return is_plain_type(value) and not value.is_nested and value.layout is torch.strided and tuple(value.shape) == (0,)


def _partitioned_in_process() -> Iterator[tuple[str, torch.Tensor]]:
    """Each partitioned parameter of the process, by its name in the outermost module."""
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    children = {id(child) for module in modules for child in (vars(module).get("_modules") or {}).values()}
    for module in modules:
        if id(module) not in children and "_modules" in vars(module):
            yield from (named for named in module.named_parameters() if is_partitioned(named[1]))


def _endings(name: str) -> Iterator[str]:
    """A dotted name, and what is left of it without its first parts."""
    while name:
        yield name
        name = name.partition(".")[2]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # without elements it has no address
