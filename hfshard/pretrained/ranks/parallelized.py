"""Builds a model without data, lets the user spread it over ranks, and reads this rank's parts from the checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.distributed.layout import Box, box_elements
from hfshard.distributed.load_on_ranks import current_agreement
from hfshard.distributed.read_parts import Target, prepare_reads
from hfshard.distributed.spread_tensor import SpreadTensor
from hfshard.errors import InvalidArgumentError
from hfshard.pretrained.ranks.conversion_views import ConvertedTensor, trace_reverted
from hfshard.tensors.state_dict import is_dtensor

Parallelize = Callable[[Any], Any]
"""Spreads a model, which has no data yet, over ranks: by `fully_shard`, `parallelize_module` ...; returns the model."""


class ParallelizedLoad:
    """What stands in the place of transformers' `_load_pretrained_model` for one `from_pretrained`.

    1. transformers loads tensors without data. So it finds out which names are missing, which conversions are used and
       which dtypes the parameters get, and ties and renames as it always does.
    2. The user spreads the model; or transformers does, as a `distributed_config` says, only now.
    3. Its parameters get memory, and each rank reads its parts of them, once all are ready to. Afterwards transformers
       initialises what is missing, and the buffers that are not stored.
    """

    def __init__(self, parallelize: Parallelize | None, model_class: type, checkpoint: OpenCheckpoint) -> None:
        self._parallelize = parallelize
        self._model_class = model_class
        self._checkpoint = checkpoint
        self.stored_names: Mapping[str, str] = {}
        """Name that transformers is given -> name in the checkpoint."""
        self.tie: Callable[[Any], None] = lambda model: None
        """Ties what the config does not declare."""
        self.parallelized: Any = None
        """What the user's function has returned."""
        self._distribute: Parallelize = lambda model: model

    def load_class(self, alias: type[PreTrainedModel]) -> type[PreTrainedModel]:
        """Make the class whose `from_pretrained` loads so."""
        names = {"__module__": alias.__module__, "__qualname__": alias.__qualname__}
        methods: dict[str, Any] = {"_load_pretrained_model": staticmethod(self._load)}
        if self._parallelize is None:
            methods["maybe_distribute_model"] = staticmethod(self._distribute_later)
        return type(alias.__name__, (alias,), {**names, **methods})

    def _distribute_later(self, model: Any, *args: Any) -> Any:
        """Stand in the place of transformers' `maybe_distribute_model`."""
        self._distribute = lambda model: type(model).maybe_distribute_model(model, *args)
        return model

    def _load(self, model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *rest: Any) -> Any:
        theirs: Any = PreTrainedModel._load_pretrained_model
        result = theirs(model, state_dict, checkpoint_files, replace(load_config, device_map={"": "meta"}), *rest)
        info = result[0]
        passed_over = set(info.missing_keys) | {one[0] for one in info.mismatched_keys}
        plan = _ReadPlan(model, passed_over, state_dict)
        shell = copy.deepcopy(model) if plan.computed else None
        model.__class__ = self._model_class
        agreement = current_agreement()
        agreement.meet("ready to spread")
        self.parallelized = self._spread(model, set(info.missing_keys))
        _give_memory(model)
        own = model.state_dict(keep_vars=True)
        info.missing_keys &= own.keys()  # a pipeline stage has less
        targets = ((self.stored_names[stored], target) for stored, target in plan.targets(own))
        read_parts = prepare_reads(self._checkpoint, targets)
        agreement.meet("ready to read")
        read_parts()
        for names, stored in plan.computed:
            read = self._checkpoint.read([self.stored_names[name] for name in stored])
            whole: Any = copy.deepcopy(shell)
            theirs(whole, {name: read[self.stored_names[name]] for name in stored}, None, load_config, *rest)
            _fill(own, whole.state_dict(), names)
        agreement.meet("read")
        for name, tensor in own.items():
            if name not in passed_over:
                tensor._is_hf_initialized = True
        return result

    def _spread(self, model: Any, missing: set[str]) -> Any:
        if self._parallelize is None:
            return self._distribute(model)  # which expects that ties are made later
        self.tie(model)
        _tie_declared(model, missing)
        spread = self._parallelize(model)
        if not isinstance(spread, nn.Module):
            raise InvalidArgumentError("parallelize must return the model that it was given, spread over ranks.")
        _forget_absent_ties(model)
        return spread


class _ReadPlan:
    """Which stored tensors fill which tensors of the model."""

    def __init__(self, model: Any, passed_over: set[str], given: Mapping[str, torch.Tensor]) -> None:
        """Find out.

        Args:
            model: Without data, as transformers has loaded it.
            passed_over: The names that nothing is loaded into.
            given: Stored name -> meta tensor.

        Raises:
            InvalidArgumentError: It is not known what a tensor is made of.
        """
        state = model.state_dict()
        wanted = {name: tensor for name, tensor in state.items() if name not in passed_over}
        traced = trace_reverted(model, wanted)
        self._given = given
        self._prefix = f"{model.base_model_prefix}."
        self._pieces: dict[str, list[tuple[str, ConvertedTensor]]] = {name: [] for name in wanted}
        computed: dict[str, dict[str, None]] = {}
        for name, tensor in traced.items():
            stored = self._stored_name(name)
            for source in tensor.sources if stored is not None else ():
                self._pieces[source].append((stored or "", tensor))
        for name, tensor in wanted.items():
            pieces = self._pieces[name]
            if not pieces:
                pieces.append((self._own_name(name, tensor), _whole(name, tensor)))
            elif not self._are_all_of(tensor, pieces):
                computed[name] = dict.fromkeys(stored for stored, _ in pieces)
        self.computed = _with_common_names(computed)
        """Names of the model and the stored names that they are computed from."""
        for names, _ in self.computed:
            for name in names:
                self._pieces.pop(name)

    def targets(self, own: Mapping[str, Any]) -> Iterator[tuple[str, Target]]:
        """Each stored tensor, and the part of the model's own that it fills."""
        filled: set[int] = set()
        for name, pieces in self._pieces.items():
            tensor = own.get(name)
            if tensor is None or id(tensor) in filled:  # on another pipeline stage; or tied
                continue
            filled.add(id(tensor))
            spread = SpreadTensor.of(tensor, name) if is_dtensor(tensor) else None
            for stored, piece in pieces:
                window = piece.window or ()
                if spread is not None:
                    yield stored, spread.view(window, piece.shape)
                else:
                    yield stored, tensor.detach()[tuple(slice(*one) for one in window)].view(piece.shape)

    def _stored_name(self, name: str) -> str | None:
        """The stored name, which may have or lack the prefix of the base model."""
        forms = (name, f"{self._prefix}{name}", name.removeprefix(self._prefix))
        return next((form for form in forms if form in self._given), None)

    def _own_name(self, name: str, tensor: torch.Tensor) -> str:
        stored = self._stored_name(name)
        if stored is None or self._given[stored].shape != tensor.shape:
            raise InvalidArgumentError(
                f"Can't load '{name}' by parts: which tensors of the checkpoint it is made of is not known. Save the "
                "checkpoint anew in one process, by save_pretrained, and load that.",
                fqn=name,
            )
        return stored

    def _are_all_of(self, tensor: torch.Tensor, pieces: list[tuple[str, ConvertedTensor]]) -> bool:
        """Whether the pieces are rectangles, stored as such, that are the whole tensor."""
        elements = 0
        for stored, piece in pieces:
            if piece.window is None or tuple(self._given[stored].shape) != piece.shape:
                return False
            elements += box_elements(tuple((interval,) for interval in piece.window))
        return elements == tensor.numel()


def _whole(name: str, tensor: torch.Tensor) -> ConvertedTensor:
    shape = tuple(tensor.shape)
    return ConvertedTensor(shape, tensor.dtype, (name,), tuple((0, size) for size in shape))


def _with_common_names(computed: Mapping[str, Mapping[str, None]]) -> list[tuple[list[str], list[str]]]:
    """Put those that are computed from a common stored tensor together."""
    groups: list[tuple[list[str], dict[str, None]]] = []
    for name, stored in computed.items():
        touched = [group for group in groups if not group[1].keys().isdisjoint(stored)]
        names = [one for group in touched for one in group[0]] + [name]
        merged = {one: None for group in touched for one in group[1]} | dict(stored)
        groups = [group for group in groups if group not in touched] + [(names, merged)]
    return [(names, list(stored)) for names, stored in groups]


def _tie_declared(model: Any, missing: set[str]) -> None:
    """Tie what the config declares, unless a checkpoint has both names: transformers compares their values later."""
    if not any(missing.isdisjoint(pair) for pair in model.all_tied_weights_keys.items()):
        model.tie_weights(missing_keys=missing, recompute_mapping=False)


def _forget_absent_ties(model: Any) -> None:
    """Declare no ties of what is on another pipeline stage: transformers asks for both parameters of each."""
    model.all_tied_weights_keys = {
        name: kept
        for name, kept in model.all_tied_weights_keys.items()
        if _has_parameter(model, name) and _has_parameter(model, kept)
    }


def _has_parameter(model: nn.Module, name: str) -> bool:
    try:
        model.get_parameter(name)
    except AttributeError:
        return False
    return True


def _give_memory(model: nn.Module) -> None:
    """Give parameters and buffers memory, where they have none; those that are one stay one."""
    made: dict[int, torch.Tensor] = {}
    mesh = next((one.device_mesh for one in model.parameters() if is_dtensor(one)), None)
    device = torch.device("cpu" if mesh is None else mesh.device_type)
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    if id(parameter) not in made:
                        memory = torch.empty_like(parameter, device=device)
                        made[id(parameter)] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
                    module._parameters[name] = made[id(parameter)]  # type: ignore[assignment]
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = made.setdefault(id(buffer), torch.empty_like(buffer, device=device))


def _fill(own: Mapping[str, Any], whole: Mapping[str, torch.Tensor], names: list[str]) -> None:
    """Copy this rank's parts of whole tensors."""
    with torch.no_grad():
        for name in names:
            if name not in own:  # on another pipeline stage
                continue
            if is_dtensor(own[name]):
                spread = SpreadTensor.of(own[name], name)
                spread.part().copy_(_part_of(whole[name], spread.stored_box))
            else:
                own[name].copy_(whole[name])


def _part_of(whole: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, intervals in enumerate(box):
        pieces = [whole.narrow(dim, start, stop - start) for start, stop in intervals]
        whole = torch.cat(pieces, dim) if pieces else whole.narrow(dim, 0, 0)
    return whole
