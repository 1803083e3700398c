"""How the tensors of a checkpoint are spread over the ranks that restore it: as those of the state that was built."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import chain
from typing import Any, Final

import torch

from hfshard.errors import UnstorableTensorError
from hfshard.format.file_names import MODEL_BASE
from hfshard.tensors.state_dict import collect_state_dict, is_dtensor
from hfshard.training.collecting import STATE_BASE, is_of_a_rank
from hfshard.training.parts.gradients import Gradients
from hfshard.training.parts.nested import encode
from hfshard.training.parts.optimizers.optimizer import encode_optimizer
from hfshard.training.state import TrainingState

_PLAIN_SLOT: Final = "step"
"""Which torch's optimizers count in a plain number, whatever the parameter is."""


class StateLayouts:
    """The layouts of a state's tensors, by the names that a save gives them.

    Args:
        state: Its parameters are not gathered; it is not changed.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._names = state.parameter_names()

    def empty(self, base: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Make what this rank's part of a stored tensor is read into; None where it is read whole.

        A tensor that the state has has the layout that it has there. One of an optimizer that has not run yet has the
        layout of the parameter, where it has its shape; a number is plain; what is between (the rows' and columns'
        statistics of Adafactor) is on every rank of the parameter's mesh.

        Args:
            base: The set of tensors.
            name: The stored one.
            shape: Of the whole tensor.
            dtype: Of the stored tensor.
        """
        live = self._live[base].get(name)
        if live is not None and tuple(live.shape) == shape:
            return _empty_like(live, dtype) if is_dtensor(live) else None
        parameter = self._parameter_of(base, name)
        if parameter is None:
            return None
        is_count = not shape and (parameter.dim() > 0 or name.endswith(f"/{_PLAIN_SLOT}"))
        if tuple(parameter.shape) == shape and not is_count:
            return _empty_like(parameter, dtype)
        return None if is_count or base == STATE_BASE else _empty_everywhere(parameter, shape, dtype)

    @cached_property
    def _parameters(self) -> dict[str, torch.Tensor]:
        """The spread parameters by name."""
        modules = self._state.of_kind("module").values()
        parameters = chain.from_iterable(module.parameters() for module in modules)
        return {self._names[id(one)]: one for one in parameters if is_dtensor(one)}

    @cached_property
    def _live(self) -> Mapping[str, dict[str, torch.Tensor]]:
        """The tensors that the state has, by set and name."""
        found: dict[str, dict[str, torch.Tensor]] = {MODEL_BASE: {}, "optimizer": {}, STATE_BASE: {}}
        for name, part in self._state.components.items():
            kind = self._state.kinds[name]
            if name == MODEL_BASE:
                state_dict = collect_state_dict(part)
                found[MODEL_BASE] = {key: one for key, one in state_dict.items() if isinstance(one, torch.Tensor)}
            elif kind == "optimizer":
                base, prefix = ("optimizer", "") if name == "optimizer" else (STATE_BASE, f"{name}/")
                encode_optimizer(part, self._names, name, found[base], prefix)
            elif kind in ("module", "stateful"):
                self._add(name, part, found[STATE_BASE])
        return found

    def _add(self, name: str, part: Any, tensors: dict[str, torch.Tensor]) -> None:
        own: dict[str, torch.Tensor] = {}
        try:
            encode(collect_state_dict(part) if isinstance(part, torch.nn.Module) else part.state_dict(), name, own)
        except UnstorableTensorError:
            return  # an object that can't be saved now may be restored
        tensors |= own

    def _parameter_of(self, base: str, name: str) -> torch.Tensor | None:
        """The spread parameter that a tensor of an optimizer, or of another object, is about."""
        words = name.split("/")
        if base == STATE_BASE:
            component = words[1] if is_of_a_rank(name) and len(words) > 1 else words[0]
            part = self._state.components.get(component)
            if not (isinstance(part, Gradients) or self._state.kinds.get(component) in ("optimizer", "stateful")):
                return None
        found = (self._parameters.get(word) for word in words if base != MODEL_BASE)
        return next((parameter for parameter in found if parameter is not None), None)


def _empty_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same part of a tensor of another dtype, without its values."""
    return torch.empty_like(tensor.detach(), dtype=dtype, requires_grad=False)


def _empty_everywhere(parameter: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    local = torch.empty(shape, dtype=dtype, device=parameter.to_local().device)
    placements = [Replicate()] * parameter.device_mesh.ndim
    return DTensor.from_local(local, parameter.device_mesh, placements, run_check=False)
