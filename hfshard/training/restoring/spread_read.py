"""The tensors of a training checkpoint, read for a state that is spread over ranks: this rank's part of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import chain
from typing import Any, Final

import torch

from hfshard.checkpoint.load_options import read_tensors
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.distributed.read_parts import read_parts, stored_tensors
from hfshard.errors import UnstorableTensorError
from hfshard.format.file_names import MODEL_BASE
from hfshard.tensors.flat_tensor import FlatTensor
from hfshard.tensors.state_dict import is_dtensor, is_spread_tensor
from hfshard.training.state.collect_state import STATE_BASE, is_rank_local, rank_prefix
from hfshard.training.state.flat_optimizer import with_named_states
from hfshard.training.state.nested import encode
from hfshard.training.state.optimizer import encode_optimizer
from hfshard.training.state.rng import Gradients
from hfshard.training.state.training_state import TrainingState, collect_run_tensors
from hfshard.training.state.zero_runs import Masters, names_of_whole, spread_parameters

_PLAIN_SLOT: Final = "step"
"""The slot that torch's optimizers count in a plain number, whatever the parameter is."""


class StateLayouts:
    """The layouts of a state's tensors, by the names that a save gives them.

    Args:
        state: Its parameters are not gathered; it is not changed.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._names = state.parameter_names()

    def empty(self, base: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Create the target into which this rank's part of a stored tensor is read; None if it is read in full.

        A tensor that the state has gets its layout there. One of an optimizer that has not run yet gets the parameter's
        layout, if it has its shape; a number is plain; anything between (Adafactor's statistics of rows and columns) is
        on every rank of the parameter's mesh.

        Args:
            base: The set of tensors.
            name: The stored tensor's name.
            shape: The shape of the full tensor.
            dtype: The dtype of the stored tensor.
        """
        live = self._live[base].get(name)
        if live is not None and tuple(live.shape) == shape:
            return _empty_like(live, dtype) if is_spread_tensor(live) else None
        parameter = self._parameter_of(base, name)
        if parameter is None:
            return None
        is_count = not shape and (parameter.dim() > 0 or name.endswith(f"/{_PLAIN_SLOT}"))
        if tuple(parameter.shape) == shape and not is_count:
            return _empty_like(parameter, dtype)
        is_whole = is_count or base == STATE_BASE or isinstance(parameter, FlatTensor)
        return None if is_whole else _empty_everywhere(parameter, shape, dtype)

    @cached_property
    def _parameters(self) -> dict[str, torch.Tensor]:
        """The spread parameters, by name."""
        modules = self._state.naming_modules().values()
        parameters = chain.from_iterable(module.parameters() for module in modules)
        found: dict[str, torch.Tensor] = {self._names[id(one)]: one for one in parameters if is_dtensor(one)}
        for module in modules:
            parts = {**self._state.masters, **spread_parameters(module)}
            found |= {self._names[key]: one for key, one in parts.items() if key in self._names}
        return found

    @cached_property
    def _live(self) -> Mapping[str, dict[str, torch.Tensor]]:
        """The tensors that the state has, by set and name."""
        found: dict[str, dict[str, torch.Tensor]] = {MODEL_BASE: {}, "optimizer": {}, STATE_BASE: {}}
        state = with_named_states(self._state) if self._state.is_flattened else self._state
        for name, part in state.components.items():
            kind = self._state.kinds[name]
            if name == MODEL_BASE:
                own = _tensors_in_parts(part, self._state.masters)
                found[MODEL_BASE] = {key: one for key, one in own.items() if isinstance(one, torch.Tensor)}
            elif kind == "optimizer":
                base, prefix = ("optimizer", "") if name == "optimizer" else (STATE_BASE, f"{name}/")
                encode_optimizer(part, self._names, name, found[base], prefix)
            elif kind in ("module", "stateful"):
                self._add(name, part, found[STATE_BASE])
        return found

    def _add(self, name: str, part: Any, tensors: dict[str, torch.Tensor]) -> None:
        own: dict[str, torch.Tensor] = {}
        try:
            is_module = isinstance(part, torch.nn.Module)
            encode(_tensors_in_parts(part, self._state.masters) if is_module else part.state_dict(), name, own)
        except UnstorableTensorError:
            return  # an object that cannot be saved now may be restored
        tensors |= own

    def _parameter_of(self, base: str, name: str) -> torch.Tensor | None:
        """Find the spread parameter that a tensor of an optimizer, or of another object, belongs to."""
        words = name.split("/")
        if base == STATE_BASE:
            is_own = is_rank_local(name)
            component = words[1] if is_own and len(words) > 1 else words[0]
            part = self._state.components.get(component)
            may_be_spread = not is_own and self._state.kinds.get(component) in ("optimizer", "stateful")
            if not (isinstance(part, Gradients) or may_be_spread):
                return None
        found = (self._parameters.get(word) for word in words if base != MODEL_BASE)
        return next((parameter for parameter in found if parameter is not None), None)


def _tensors_in_parts(module: torch.nn.Module, masters: Masters) -> dict[str, Any]:
    """Do what `collect_run_tensors` does, without the parameters that have parts while each rank needs all of them."""
    whole = names_of_whole(module, masters)
    return {name: one for name, one in collect_run_tensors(module, masters).items() if name not in whole}


def _empty_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Allocate the same part of a tensor with another dtype, without its values."""
    return torch.empty_like(tensor.detach(), dtype=dtype, requires_grad=False)


def _empty_everywhere(parameter: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    local = torch.empty(shape, dtype=dtype, device=parameter.to_local().device)
    placements = [Replicate()] * parameter.device_mesh.ndim
    return DTensor.from_local(local, parameter.device_mesh, placements, run_check=False)


def read_local_parts(
    checkpoint: OpenCheckpoint,
    base: str,
    layouts: StateLayouts,
    own_rank: int,
    is_wanted: Callable[[str], bool] | None = None,
) -> dict[str, torch.Tensor]:
    """Read what this rank needs of one set of tensors into memory.

    Args:
        checkpoint: That set, opened.
        base: The set.
        layouts: The layouts of the state that is restored.
        own_rank: The rank whose own random numbers and positions are read.
        is_wanted: Selects names; None: all.

    Returns:
        Name -> a DTensor that has this rank's part, or the full tensor if the state has it in full.
    """
    targets: dict[str, torch.Tensor] = {}
    whole: list[str] = []
    tied_names = checkpoint.index.tied_names
    described = stored_tensors(checkpoint)
    if is_wanted is not None:
        described = {name: one for name, one in described.items() if is_wanted(name)}
    for name, one in described.items():
        if base == STATE_BASE and is_rank_local(name) and not name.startswith(rank_prefix(own_rank)):
            continue
        target = layouts.empty(base, name, tuple(one.shape), one.dtype)
        if target is None:
            whole.append(name)
        elif tied_names.get(name, name) not in targets:
            targets[tied_names.get(name, name)] = target
    read_parts(checkpoint, targets.items())
    found = {name: targets[tied_names.get(name, name)] for name in described if tied_names.get(name, name) in targets}
    if whole:
        found |= read_tensors(checkpoint, frozenset(whole).__contains__, "cpu", "pread")
    return {name: found[name] for name in described if name in found}
