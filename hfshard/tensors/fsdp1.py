"""Modules under FullyShardedDataParallel (FSDP1): this rank's part of each parameter, from the flat ones.

torch has no public names for these parts: this module alone reads the private ones.
"""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn

from hfshard.errors import UnstorableTensorError
from hfshard.tensors.flat_tensor import FlatLayout, FlatTensor, PartOfParameter
from hfshard.tensors.parameter_names import unwrap, without_wrappers, wrapped_prefixes

_HOOKS: Final = (
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_FSDP: Final = "torch.distributed.fsdp."
FLATTENED: Final = "_fsdp_flattened"
"""The attribute by which torch marks flat parameters, and those in them."""
NAMES_KEPT: Final = "_fsdp_use_orig_params"
"""The attribute by which torch marks all modules in a wrapper: its `use_orig_params`."""

_KNOWN: Final[WeakSet[Any]] = WeakSet()
"""Wrappers found in this process: a module inside of one does not lead to it."""


_STAND_INS: Final[WeakKeyDictionary[Any, list[nn.Parameter]]] = WeakKeyDictionary()
"""Handle of a flat parameter -> variables that stand for those in it, the same ones at each call."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FlatMember(PartOfParameter):
    """A parameter in a flat one. With `use_orig_params=False`, a variable stands for it in an optimizer."""

    name: str
    """In its module, with that module's name in the wrapped one; for messages."""
    places: tuple[tuple[nn.Module, str], ...]
    """The modules that have it, and its names there; the first one is where torch flattened it."""
    variable: Any
    """The flat parameter."""


@dataclass(frozen=True, slots=True, eq=False)
class FlatParameter:
    """A flat parameter, and this rank's part of each parameter in it."""

    variable: nn.Parameter
    members: tuple[FlatMember, ...]
    offsets: tuple[int, ...]
    """Of each member's part in this rank's part of the flat parameter."""
    padded: int
    """Elements of this rank's part, with the padding."""
    is_trained: bool
    """True if an optimizer has the flat parameter, not those in it (`use_orig_params=False`)."""


def flat_parameters(model: nn.Module) -> list[FlatParameter]:
    """List the flat parameters that have parameters of a module; none if nothing of it is under FSDP1.

    Args:
        model: A wrapper, a module with wrappers in it, or one in a wrapper. Nothing is gathered or changed.

    Raises:
        UnstorableTensorError: A part is not a plain interval of its parameter, or is not known.
    """
    return [_described(unit) for unit in _units(model)]


def has_flat_parameters(model: nn.Module) -> bool:
    """Return whether parameters of a module are in flat ones."""
    return bool(_units(model))


def flat_members(model: nn.Module) -> dict[str, FlatMember]:
    """Return the parts of a module's parameters by their names without the prefixes of wrappers; tied names are one."""
    return dict(_named_members(model, flat_parameters(model)))


def flat_parameter_names(model: nn.Module) -> dict[int, list[str]]:
    """Map the ids of variables that optimizers have to the names of what they are: of flat ones, the first one's."""
    flats = flat_parameters(model)
    names: dict[int, list[str]] = {}
    for name, member in _named_members(model, flats):
        names.setdefault(id(member.parameter), []).append(name)
    for flat in flats:
        inside = [min(names[id(member.parameter)]) for member in flat.members if id(member.parameter) in names]
        if flat.is_trained and inside:
            names[id(flat.variable)] = inside[:1]
    return names


def _named_members(model: nn.Module, flats: Sequence[FlatParameter]) -> Iterator[tuple[str, FlatMember]]:
    if not flats:
        return
    model = unwrap(model)
    of_module: dict[int, dict[str, FlatMember]] = {}
    for member in chain.from_iterable(flat.members for flat in flats):
        for module, name in member.places:
            of_module.setdefault(id(module), {})[name] = member
    wrapped = wrapped_prefixes(model)
    for path, module in model.named_modules(remove_duplicate=False):
        for name, member in of_module.get(id(module), {}).items():
            yield without_wrappers(f"{path}.{name}" if path else name, wrapped), member


def with_flat_tensors(
    model: nn.Module, state_dict: Mapping[str, Any], tensors: Mapping[str, FlatTensor]
) -> dict[str, Any]:
    """Return a state dict in which the parts stand for the parameters, in the order of the modules.

    Args:
        model: Unwrapped.
        state_dict: What `without_gathering` lets it return, by names without the prefixes of wrappers.
        tensors: The parts, by the same names. A state dict under FSDP1 may lack these names.
    """
    flats = flat_parameters(model)
    if not flats:
        return {name: tensors.get(name, value) for name, value in state_dict.items()}
    wrapped = wrapped_prefixes(model)
    variables = {id(flat.variable) for flat in flats}
    order: dict[str, int] = {}
    dropped = set()
    for path, module in model.named_modules(remove_duplicate=False):
        order.setdefault(without_wrappers(f"{path}.", wrapped) if path else "", len(order))
        for name, parameter in module._parameters.items():
            if id(parameter) in variables:
                dropped.add(without_wrappers(f"{path}.{name}" if path else name, wrapped))
    found = {name: tensors.get(name, value) for name, value in state_dict.items() if name not in dropped}
    lacking = [name for name in tensors if name not in found]
    if not lacking:
        return found
    places: dict[str, tuple[int, bool]] = {}
    place = 0
    for name in found:
        place = order.get(_owner(name), place)
        places[name] = place, name not in tensors
    places |= {name: (order[_owner(name)], False) for name in lacking}
    values = {**{name: tensors[name] for name in lacking}, **found}
    return {name: values[name] for name in sorted(values, key=places.__getitem__)}


def _owner(name: str) -> str:
    path, dot, _ = name.rpartition(".")
    return path + dot


def reshard_parameters(model: nn.Module) -> None:
    """Release the complete parameters that a forward pass has left: they would be used again, whatever is loaded."""
    for unit in _units(model):
        handle = unit._handle
        if hasattr(handle.flat_param, "_local_shard"):
            handle.reshard(handle.uses_sharded_strategy)
            handle.post_reshard()
            handle._prefetched = False


@contextmanager
def without_gathering(model: nn.Module) -> Iterator[None]:
    """Let `state_dict` and `load_state_dict` of wrapped modules leave every rank's part as it is, in the block."""
    with ExitStack() as stack:
        for module in _wrappers_in(model):
            for name in _HOOKS:
                stack.callback(vars(module).__setitem__, name, vars(module)[name])
                hooks = vars(module)[name].items()
                vars(module)[name] = OrderedDict((key, hook) for key, hook in hooks if not _is_of_torch(hook))
        yield


def _is_of_torch(hook: Any) -> bool:
    return str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith(_FSDP)


def _wrappers_in(model: nn.Module) -> list[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [one for one in model.modules() if isinstance(one, fsdp.FullyShardedDataParallel)]


def _units(model: nn.Module) -> list[Any]:
    """List the wrappers whose flat parameters have some of a module's, except where they are complete on purpose."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    within = _wrappers_in(model)
    modules = set(model.modules())
    if not _left_over(modules, within, _may_be_flattened):
        around = within
    else:
        around = _wrappers_around(modules, within)
        if _left_over(modules, around, _is_flattened):
            raise UnstorableTensorError(
                f"Cannot read the parameters of {type(model).__name__}: FullyShardedDataParallel has flattened them, "
                "and that wrapper does not exist any more. Keep the wrapper, and pass it."
            )
    named = [one for one in around if one._handle is not None and one.module in modules]
    if any(map(_hides_parameters, modules.difference(*map(_modules_of, named)))):
        raise UnstorableTensorError(
            f"Cannot read the parameters of {type(model).__name__}: FullyShardedDataParallel(use_orig_params=False) "
            "has them only in the flat parameter of a module around it. Pass the wrapped root, or wrap it with "
            "use_orig_params=True."
        )
    return [one for one in around if one._handle is not None and not _is_summoned(one)]


def _hides_parameters(module: nn.Module) -> bool:
    """Return whether a module has views of a flat parameter in the places of its own: it does not know their names.

    A module may also keep such a view of another one's under a name of its own.
    """
    if vars(module).get(NAMES_KEPT) is not False:
        return False
    views: dict[str, Any] = {name: one._base for name, one in vars(module).items() if isinstance(one, torch.Tensor)}
    return any(
        info.module is module and info.param_name == name
        for name, flat in views.items()
        if _is_flattened(flat)
        for info in (*flat._param_infos, *flat._shared_param_infos)
    )


def _is_flattened(parameter: torch.Tensor | None) -> bool:
    return bool(getattr(parameter, FLATTENED, False))


def _may_be_flattened(parameter: torch.Tensor) -> bool:
    """Return whether torch has put a parameter into a flat one; during a pass, a plain view may be in its place."""
    return _is_flattened(parameter) or not isinstance(parameter, nn.Parameter)


def _left_over(modules: set[nn.Module], wrappers: Sequence[Any], kind: Callable[[torch.Tensor], bool]) -> bool:
    """Return whether a module has parameters of a kind that none of these wrappers has flattened."""
    known = {module for one in wrappers if one._handle is not None for module in _modules_of(one)}
    return any(kind(one) for module in modules - known for one in module._parameters.values() if one is not None)


def _modules_of(unit: Any) -> set[nn.Module]:
    """Return the modules that had the parameters, and the one that has the flat parameter."""
    return {*unit._handle.flat_param._modules, unit.module}


def _wrappers_around(modules: set[nn.Module], within: Sequence[Any]) -> list[Any]:
    """Find the wrappers of this process, also around a module, that have flattened parameters of these modules."""
    fsdp = sys.modules["torch.distributed.fsdp"]

    def found() -> list[Any]:
        others = [one for one in _KNOWN if one not in within and one._handle is not None]
        return [*(one for one in others if not modules.isdisjoint(one._handle.flat_param._modules)), *within]

    if _left_over(modules, found(), _may_be_flattened):
        if gc.get_freeze_count():
            gc.unfreeze()  # what gc.freeze() has put aside is in no list
        _KNOWN.update(one for one in gc.get_objects() if issubclass(type(one), fsdp.FullyShardedDataParallel))
    return found()


def _is_summoned(unit: Any) -> bool:
    return str(unit._handle._training_state.name) == "SUMMON_FULL_PARAMS"


def _described(unit: Any) -> FlatParameter:
    handle = unit._handle
    if handle._use_orig_params and handle._writeback_orig_params():  # a program has replaced `parameter.data`
        handle._use_sharded_views()
    flat = handle.flat_param
    shard = getattr(flat, "_local_shard", flat).detach()
    local = shard[: shard.numel() - flat._shard_numel_padded]
    ranks = tuple(dist.get_process_group_ranks(handle.process_group))
    rank = dist.get_rank()
    starts = [0, *accumulate(flat._numels_with_padding)]
    firsts = [start for start, is_padding in zip(starts, flat._is_padding_mask) if not is_padding]
    shared: dict[tuple[int, str], list[tuple[nn.Module, str]]] = {}
    for one in flat._shared_param_infos:
        shared.setdefault((id(one.prim_module), one.prim_param_name), []).append((one.module, one.param_name))
    parameters = _STAND_INS.get(handle) if flat._params is None else flat._params
    if parameters is None:
        parameters = [nn.Parameter(local.new_empty(0), flat.requires_grad) for _ in flat._param_infos]
        _STAND_INS[handle] = parameters
    members = []
    offsets = []
    for number, (info, held) in enumerate(zip(flat._param_infos, flat._shard_param_infos, strict=True)):
        name = f"{info.module_name}.{info.param_name}" if info.module_name else info.param_name
        layout = FlatLayout(ranks, handle.uses_sharded_strategy, flat._unpadded_unsharded_size.numel(), firsts[number])
        begin = held.offset_in_shard if held.in_shard else 0
        count = held.numel_in_shard if held.in_shard else 0
        start, stop = layout.held(flat._numels[number], rank)
        if stop - start != count or (count and held.intra_param_start_idx != start):
            raise UnstorableTensorError(
                f"Cannot read '{name}': FullyShardedDataParallel of torch {torch.__version__} keeps other elements of "
                f"it on rank {rank} than {start} to {stop}. Use fully_shard.",
                fqn=name,
            )
        if flat._param_extensions[number] is not None or not flat._contiguities[number]:
            raise UnstorableTensorError(
                f"Cannot read '{name}': FullyShardedDataParallel has flattened it in another order than that of its "
                "elements, because it was a DTensor or not contiguous. Use fully_shard, or make it contiguous before "
                "the module is wrapped.",
                fqn=name,
            )
        tensor = FlatTensor(local[begin : begin + count], flat._shapes[number], layout)
        places = ((info.module, info.param_name), *shared.get((id(info.module), info.param_name), ()))
        members.append(
            FlatMember(
                parameter=parameters[number], tensor=tensor, target=tensor, name=name, places=places, variable=flat
            )
        )
        offsets.append(begin)
    return FlatParameter(flat, tuple(members), tuple(offsets), shard.numel(), flat._params is None)
