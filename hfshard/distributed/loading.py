"""Loads into modules and state dicts that are spread over ranks: each rank reads its part, and all do so or none."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from hfshard.checkpoint.into_module import load_into_module
from hfshard.checkpoint.load_options import LoadOptions
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.distributed.agreement import LoadAgreement, load_together
from hfshard.distributed.reading import Target, prepare_reads, stored_tensors
from hfshard.distributed.spread_tensor import has_spread
from hfshard.errors import HfshardError, InvalidArgumentError, StateDictMismatchError
from hfshard.format.index import CheckpointIndex
from hfshard.places.source import CheckpointSource
from hfshard.shards.shard_file import SafetensorsFile
from hfshard.tensors.parameter_names import compare, without_wrappers, wrapped_prefixes
from hfshard.tensors.state_dict import (
    assign,
    collect_state_dict,
    is_dtensor,
    is_sharded_tensor,
    local_tensor,
    refuse_freed,
    refuse_partitioned,
)
from hfshard.tensors.stored_tensor import is_plain_type
from hfshard.tensors.tied import find_shared_tensors

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_FSDP: Final = "torch.distributed.fsdp."
"""Where the hooks are defined that shard the parameters before a load, as they do before `state_dict()` returns."""


def load_into_spread_module(model: nn.Module, source: CheckpointSource, options: LoadOptions) -> dict[str, Any]:
    """Load a checkpoint into a module that has DTensors. Every rank of the default process group must call.

    Each rank reads its part straight into its memory. What is on the meta device gets memory, on the device of the
    mesh. Modules with hooks or a `_load_from_state_dict` of their own get their tensors by these.

    Args:
        model: Changed, once every rank has found that the checkpoint fits.
        source: The same checkpoint on every rank, wherever each finds it.
        options: How.

    Returns:
        What `load_into_module` returns.

    Raises:
        RankFailedError: Another rank refused, failed, died, or did not come.
        Everything that `load_into_module` raises. The model is half loaded only where a file can't be read after all,
        or a hook of the model raises.
    """
    with load_together("load_model", is_collective=True) as agreement:
        return agreement.use(source, options, lambda checkpoint: _load_in_place(model, checkpoint, options, agreement))


def load_opened(model: nn.Module, checkpoint: OpenCheckpoint, options: LoadOptions) -> dict[str, Any]:
    """Load an open checkpoint into a module that is not spread over ranks.

    What is far away is read straight into the module's memory: then the module is half loaded where a request fails
    after all, or what comes is not what was saved.

    Args, returns, raises: As `load_into_module`.
    """
    if checkpoint.is_ranged:
        return _load_in_place(model, checkpoint, options, LoadAgreement(None))
    return load_into_module(model, checkpoint, options)


def _load_in_place(
    model: nn.Module, checkpoint: OpenCheckpoint, options: LoadOptions, agreement: LoadAgreement
) -> dict[str, Any]:
    """Read what a module takes straight into its memory, once every rank has found that the checkpoint fits."""
    mapped = _mapped_tensors(checkpoint)
    stored_names = {id(tensor): name for name, tensor in mapped.items()}

    def values_of(described: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        stored = {name: stored_names[id(tensor)] for name, tensor in described.items()}
        tied_names = checkpoint.index.tied_names
        values = checkpoint.read({tied_names.get(name, name) for name in stored.values()})
        return {name: values[tied_names.get(kept, kept)] for name, kept in stored.items()}

    fill = partial(_fill, checkpoint, stored_names, agreement)
    return load_into_module(model, checkpoint, options, mapped, fill, values_of if checkpoint.is_ranged else None)


def load_like(
    source: CheckpointSource, like: Mapping[str, torch.Tensor], device: torch.device, options: LoadOptions
) -> dict[str, torch.Tensor]:
    """Load tensors of the shapes, dtypes, devices and placements of others. With DTensors, every rank must call.

    Args:
        source: The same checkpoint on every rank, wherever each finds it.
        like: Checked by `check_like`; not changed.
        device: Where tensors go whose like is plain and on the meta device.
        options: How.

    Raises:
        RankFailedError: Another rank refused, failed, died, or did not come.
        StateDictMismatchError: The checkpoint lacks a name, or has it in another shape, or in a dtype whose values
            that of `like` can't have.
        Everything that `open_source` raises.
    """
    with load_together("load_state_dict", is_collective=has_spread(like)) as agreement:
        return agreement.use(source, options, lambda checkpoint: _read_like(checkpoint, like, device, agreement))


def _read_like(
    checkpoint: OpenCheckpoint, like: Mapping[str, torch.Tensor], device: torch.device, agreement: LoadAgreement
) -> dict[str, torch.Tensor]:
    _refuse_misfits(checkpoint, like)
    tied_names = checkpoint.index.tied_names
    made: dict[tuple[Any, ...], torch.Tensor] = {}
    keys: dict[str, tuple[Any, ...]] = {}
    for name, tensor in like.items():
        spread = (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None
        keys[name] = (tied_names.get(name, name), tensor.dtype, tensor.device, spread)
        if keys[name] not in made:
            made[keys[name]] = _empty_like(tensor, tensor.dtype, device, tensor.shape)
    read = prepare_reads(checkpoint, [(key[0], tensor) for key, tensor in made.items()])
    agreement.confirm(checkpoint)
    read()
    return {name: made[key] for name, key in keys.items()}


def has_spread_state(model: nn.Module) -> bool:
    """Whether a module has DTensors. Parameters of FSDP2 that are whole after a forward pass are sharded again.

    Raises:
        InvalidArgumentError: It gives ShardedTensors.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return False
    state_dict = model.state_dict()
    _refuse_sharded_tensors(state_dict)
    return has_spread(state_dict)


def files_of_names(index: CheckpointIndex, names: Collection[str]) -> set[str]:
    """The files that hold the tensors of these names, as far as there are such tensors."""
    stored = {index.tied_names.get(name, name) for name in names}
    return {index.weight_map[name] for name in stored if name in index.weight_map}


def check_like(like: Mapping[str, Any]) -> None:
    """Refuse what is no state dict.

    Raises:
        InvalidArgumentError: It does not map names to tensors, or there is a ShardedTensor, or a parameter that
            DeepSpeed has partitioned.
    """
    if not isinstance(like, Mapping):
        raise InvalidArgumentError(f"like must map names to tensors, got a {type(like).__name__}.")
    _refuse_sharded_tensors(like)
    refuse_partitioned(like, "load")
    for name, tensor in like.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(
                f"like must map names to tensors, and {name!r:.200} is mapped to a {type(tensor).__name__}.",
                fqn=str(name),
            )


def _refuse_sharded_tensors(state_dict: Mapping[str, Any]) -> None:
    name = next((name for name, value in state_dict.items() if is_sharded_tensor(value)), None)
    if name is not None:
        raise InvalidArgumentError(
            f"Can't load into {name!r}, and nothing was loaded: it is a ShardedTensor of FSDP1. Shard the model by "
            "fully_shard instead; or have FullyShardedDataParallel take whole tensors, on every rank: "
            "FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT).",
            fqn=name,
        )


def _mapped_tensors(checkpoint: OpenCheckpoint) -> dict[str, torch.Tensor]:
    """Each tensor of a checkpoint, tied names included. What is mapped is read where its values are touched."""
    found = {
        name: shard.tensor(name) if isinstance(shard, SafetensorsFile) else shard.described(name)
        for shard in checkpoint.shards.values()
        for name in shard.header.tensors
    }
    for pickled in checkpoint.pickles.values():
        found |= pickled.tensors
    return found | {name: found[kept] for name, kept in checkpoint.index.tied_names.items()}


def _fill(
    checkpoint: OpenCheckpoint,
    stored_names: Mapping[int, str],
    agreement: LoadAgreement,
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Read what a module's tensors are to be, most of it into their own memory.

    Args:
        checkpoint: Open.
        stored_names: Of its tensors, by their identities; what has none was read already.
        agreement: With the other ranks, before the first change.
        model: Unwrapped.
        tensors: Those that fit, by the model's names.
    """
    model_state = collect_state_dict(model)
    refuse_freed(model_state)
    by_modules = _loaded_by_modules(model, model_state)
    in_place = {name for name, own in model_state.items() if name not in by_modules and _has_own_memory(own)}
    tied = find_shared_tensors(model_state)
    device = _device_of_meshes(model_state)
    targets: dict[str, torch.Tensor] = {}
    wanted: list[tuple[str, Target]] = []
    fresh: dict[str, torch.Tensor] = {}
    for name in [name for name in tensors if name in model_state]:
        own = model_state[name]
        tensor = tensors[name]
        if id(tensor) not in stored_names:
            fresh[name] = tensor
            continue
        kept = tied.get(name, name)
        key = kept if kept in tensors and (kept in in_place) == (name in in_place) else name
        if key not in targets:
            dtype = own.dtype if getattr(own, "is_meta", False) else tensor.dtype
            targets[key] = own if name in in_place else _empty_like(own, dtype, device, tensor.shape)
            wanted.append((stored_names[id(tensor)], targets[key]))
        if name not in in_place:
            fresh[name] = targets[key]
    read = prepare_reads(checkpoint, wanted)
    agreement.confirm(checkpoint)
    try:
        read()
    except HfshardError as error:
        error.add_note("The module is half loaded: load it again before it is used.")
        raise
    assign(model, fresh, runs_hooks=True)


def _loaded_by_modules(model: nn.Module, names: Collection[str]) -> set[str]:
    """The names whose tensors a module takes in by itself: by hooks, or a `_load_from_state_dict` of its own."""
    wrapped = wrapped_prefixes(model)
    paths = {
        without_wrappers(f"{path}.", wrapped) if path else ""
        for path, module in model.named_modules(remove_duplicate=False)
        if _loads_by_itself(module) or (not path and type(module).load_state_dict is not nn.Module.load_state_dict)
    }
    if "" in paths:
        return set(names)
    return {name for name in names if not paths.isdisjoint(_prefixes(name))} if paths else set()


def _prefixes(name: str) -> Iterator[str]:
    return (name[: at + 1] for at, letter in enumerate(name) if letter == ".")


def _loads_by_itself(module: nn.Module) -> bool:
    is_own = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    return is_own or any(not getattr(hook, "__module__", "").startswith(_FSDP) for hook in hooks)


def _has_own_memory(value: Any) -> bool:
    """Whether it is a tensor with memory that can be read into, not a wrapper of another library's."""
    part = local_tensor(value) if is_dtensor(value) else value
    return is_plain_type(part) and not part.is_meta


def _device_of_meshes(model_state: Mapping[str, Any]) -> torch.device:
    """Where a module is, of which something may be on the meta device."""
    meshes = (_mesh_device(tensor) for tensor in model_state.values() if is_dtensor(tensor))
    return next(meshes, torch.device("cpu"))


def _mesh_device(tensor: DTensor) -> torch.device:
    return torch.device(tensor.device_mesh.device_type)


def _empty_like(own: Any, dtype: torch.dtype, device: torch.device, shape: torch.Size) -> torch.Tensor:
    """Memory for what another tensor is to be: spread over ranks, and on the device, as that is.

    Args:
        own: That tensor, or what else a module has by its name.
        dtype: Of the new one.
        device: For a plain one whose like is on the meta device.
        shape: For what is no tensor.
    """
    if is_dtensor(own):
        from torch.distributed.tensor import DTensor

        part = local_tensor(own)
        room = torch.empty_like(part, dtype=dtype, device=_mesh_device(own) if part.is_meta else part.device)
        return DTensor.from_local(
            room, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
        )
    if not is_plain_type(own):
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.empty_like(own, dtype=dtype, device=device if own.is_meta else own.device, requires_grad=False)


def _refuse_misfits(checkpoint: OpenCheckpoint, like: Mapping[str, torch.Tensor]) -> None:
    """Refuse names, shapes and dtypes of a state dict that are not the checkpoint's.

    Raises:
        StateDictMismatchError: It names all of them.
    """
    stored = stored_tensors(checkpoint)
    there = {name: stored[name] for name in like if name in stored}
    difference = compare(there, like)
    difference.raise_unless_allowed(strict=True, path=checkpoint.directory, matched=len(there))
    for name, tensor in there.items():
        wanted = like[name].dtype
        if not torch.can_cast(tensor.dtype, wanted):
            raise StateDictMismatchError(
                f"'{name}' of the checkpoint '{checkpoint.directory}' is {tensor.dtype}, whose values {wanted} can't "
                "have, and nothing was loaded. Give `like` a tensor of another dtype.",
                path=checkpoint.directory,
                fqn=name,
                expected=wanted,
                actual=tensor.dtype,
            )
