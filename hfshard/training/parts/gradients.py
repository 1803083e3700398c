"""The gradients of a model, for checkpoints between the micro-batches of one step."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from torch import nn

from hfshard.errors import StateDictMismatchError
from hfshard.state_dicts.dtensors import is_dtensor
from hfshard.state_dicts.state_dict import parameter_names


class Gradients:
    """Saves and restores `.grad` of every parameter, by name.

        state = TrainingState(model=model, optimizer=optimizer, gradients=Gradients(model))

    It is needed only for saves while gradients accumulate: after `optimizer.step()` there are none to save. It makes a
    checkpoint larger by the size of the gradients. Under `fully_shard`, gradients are those that were reduced: save
    after a backward pass with `set_requires_gradient_sync(True)`, which is the default.
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
        """Return name -> gradient of the parameters that have one; the tensors themselves."""
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
