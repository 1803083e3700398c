"""The gradients of a model, for checkpoints between the micro-batches of one step."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from hfshard.errors import InvalidArgumentError, StateDictMismatchError
from hfshard.tensors.state_dict import is_dtensor, parameter_names


class Gradients:
    """Saves and restores `.grad` of every parameter, by name.

        state = TrainingState(model=model, optimizer=optimizer, gradients=Gradients(model))

    It is needed only for saves while gradients accumulate: after `optimizer.step()` there are none to save. It makes a
    checkpoint larger by the size of the gradients. Under `fully_shard`, gradients are those that were reduced: after a
    backward pass with `set_requires_gradient_sync(False)` a save is refused.
    """

    def __init__(self, model: nn.Module) -> None:
        """Name the model.

        Args:
            model: Any module; wrappers are looked through.
        """
        self._model = model

    @property
    def is_spread(self) -> bool:
        """Whether a parameter is a DTensor, so that its gradient is that of all ranks."""
        fsdp = sys.modules.get("torch.distributed.fsdp")
        is_gathered = fsdp is not None and any(isinstance(one, fsdp.FSDPModule) for one in self._model.modules())
        return is_gathered or any(map(is_dtensor, self._model.parameters()))

    @property
    def names(self) -> set[str]:
        """Of all parameters, with a gradient or without."""
        return set(self._parameters())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return name -> gradient of the parameters that have one; the tensors themselves.

        Raises:
            InvalidArgumentError: One is not reduced over the ranks yet.
        """
        refuse_unreduced(self._model, "save")
        return {name: one.grad for name, one in self._parameters().items() if one.grad is not None}

    def check_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Refuse gradients of another model; nothing is changed.

        Raises:
            StateDictMismatchError: A parameter is missing, or has another shape.
        """
        parameters = self._parameters()
        for name, gradient in state_dict.items():
            if name not in parameters or parameters[name].shape != gradient.shape:
                found = list(parameters[name].shape) if name in parameters else "no such parameter"
                raise StateDictMismatchError(
                    f"The checkpoint has a gradient of '{name}' of shape {list(gradient.shape)}, and the model has "
                    f"{found}. Build the model as in the run that was saved.",
                    fqn=name,
                    unexpected_keys=(name,),
                )

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Restore the gradient of each parameter, and remove the gradients of those that had none.

        Raises:
            StateDictMismatchError: As in `check_state_dict`.
        """
        self.check_state_dict(state_dict)
        for name, parameter in self._parameters().items():
            gradient = state_dict.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)

    def _parameters(self) -> dict[str, nn.Parameter]:
        names = parameter_names(self._model)
        return {names[id(parameter)]: parameter for parameter in self._model.parameters()}


def refuse_unreduced(model: nn.Module, verb: str) -> None:
    """Refuse gradients that FSDP2 keeps to itself until a later backward pass reduces them over the ranks.

    No parameter has them as its `.grad`, so a save would lose them, and a restore would leave them to the next step.

    Args:
        model: Any module; under `fully_shard` it must have been resharded.
        verb: What is refused, "save" or "restore".

    Raises:
        InvalidArgumentError: There are some.
    """
    found = next(_unreduced_names(model), None)
    if found is not None:
        raise InvalidArgumentError(
            f"Cannot {verb} between these micro-batches: the gradient of '{found}' is not reduced over the ranks yet, "
            "as the last backward pass ran with set_requires_gradient_sync(False) or set_requires_all_reduce(False). "
            f"{verb.capitalize()} after one that ran with True; or leave both at True while gradients accumulate, "
            "which costs a reduction for each micro-batch.",
            fqn=found,
        )


def _unreduced_names(model: nn.Module) -> Iterator[str]:
    """Parameters whose gradients are not reduced; with HSDP also those that are not summed up over the replicas."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    modules = [] if fsdp is None else [one for one in model.modules() if isinstance(one, fsdp.FSDPModule)]
    names = parameter_names(model) if modules else {}
    for group in chain.from_iterable(map(_parameter_groups, modules)):
        for one in group.fsdp_params:
            gathered = getattr(one, "_unsharded_param", None)  # there is none before the first pass
            is_kept = gathered is not None and gathered.grad is not None
            if is_kept or one.unsharded_accumulated_grad is not None or group._partial_reduce_output is not None:
                yield names[id(one.sharded_param)]


def _parameter_groups(module: Any) -> list[Any]:
    """Those of a module under `fully_shard`; torch has no public name for them, and before 2.13 one or none."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
