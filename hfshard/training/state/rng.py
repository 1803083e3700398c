"""The state of every random number generator of the process, and gradients between the micro-batches of a step."""

from __future__ import annotations

import hashlib
import logging
import operator
import random
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from hfshard.errors import DamagedCheckpointError, InvalidArgumentError, StateDictMismatchError
from hfshard.tensors.state_dict import fully_sharded_modules, is_dtensor, parameter_names

logger = logging.getLogger(__name__)

_MERSENNE_TWISTER: Final = "MT19937"
"""The kind of numpy's global generator unless another is set."""

_PLACES: Final = {_MERSENNE_TWISTER: ("state", "pos", 624), "Philox": ("", "buffer_pos", 4)}
"""numpy's generators that read from a buffer at a position in their state -> where it is, and its highest value. numpy
accepts any, and then reads beyond the buffer."""

_DEVICES: Final = ("cuda", "xpu")
"""Kinds of devices with a generator for each device; MPS has a single one."""

_CURRENT: Final = "current_devices"
"""The key of the process's own device of each kind."""


def rng_state() -> dict[str, Any]:
    """Return the state of all generators as tensors and plain values that `nested` encodes; nothing is drawn.

    Example:
        state = rng_state()
        torch.rand(3)
        set_rng_state(state)  # as if nothing had been drawn
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {
            "version": version,
            "words": torch.tensor(words, dtype=torch.uint32, device="cpu").view(torch.int32),
            "gauss": gauss,
        },
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
    }
    for kind in _DEVICES:
        device = getattr(torch, kind)
        if device.is_available() and device.is_initialized():  # otherwise nothing was drawn there
            state[kind] = device.get_rng_state_all()
            state[_CURRENT] = {**state.get(_CURRENT, {}), kind: device.current_device()}
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def check_rng_state(state: Any, file: str) -> None:
    """Reject a state that `set_rng_state` cannot use.

    Raises:
        DamagedCheckpointError: It is not what `rng_state` returns.
        StateDictMismatchError: numpy's global generator is of another kind here.
    """
    try:
        probe = random.Random()
        probe.setstate(_python_state(state))
        if "numpy" in state:
            _reject_other_generator(state["numpy"], file)
            _check_place(state["numpy"])
            if state["numpy"]["bit_generator"] == _MERSENNE_TWISTER:
                np.random.RandomState().set_state(state["numpy"])
        torch.Generator().set_state(state["torch"])
        lists = [state.get(kind, []) for kind in _DEVICES]
        of_devices = [one for states in lists for one in states] + [state[key] for key in state if key == "mps"]
        is_known = all(isinstance(one, torch.Tensor) and one.dtype == torch.uint8 for one in of_devices)
        if not is_known or not all(isinstance(states, list) for states in lists):
            raise TypeError("the state of a device's generator is not a tensor of bytes")
        for kind, number in state.get(_CURRENT, {}).items():
            if type(number) is not int or not 0 <= number < len(state[kind]):
                raise ValueError(f"its current device {number!r:.50} has no state")
    except StateDictMismatchError:
        raise
    except (LookupError, ValueError, TypeError, RuntimeError, AttributeError, OverflowError) as error:
        raise DamagedCheckpointError(
            f"'{file}' is damaged: its random number generator states are not valid ({error!r:.200}). "
            "Restore another checkpoint, or download it again.",
            path=file,
        ) from error


def _reject_other_generator(state: dict[str, Any], file: str) -> None:
    saved = state["bit_generator"]
    here = np.random.get_state(legacy=False)["bit_generator"]
    if saved != here:
        raise StateDictMismatchError(
            f"numpy's global random numbers came from {saved!r:.50} when '{file}' was saved, but come from {here} "
            f"here. Set the saved generator first: numpy.random.set_bit_generator(numpy.random.{saved}()).",
            path=file,
            expected=saved,
            actual=here,
        )


def _check_place(state: dict[str, Any]) -> None:
    """Reject a numpy generator that would read beyond its buffer, by a ValueError."""
    if (found := _PLACES.get(state["bit_generator"])) is None:
        return
    inner, name, highest = found
    place = (state[inner] if inner else state)[name]
    if not 0 <= operator.index(place) <= highest:
        raise ValueError(f"numpy's generator is at {place!r:.50}, and its buffer has {highest} numbers")


def set_rng_state(state: dict[str, Any]) -> None:
    """Set all generators to a state of `rng_state`; warn if there are fewer devices than in the state."""
    random.setstate(_python_state(state))
    if "numpy" in state:
        if state["numpy"]["bit_generator"] == _MERSENNE_TWISTER:
            np.random.set_state(state["numpy"])
        else:
            np.random.get_bit_generator().state = state["numpy"]  # type: ignore[attr-defined,unused-ignore]
    torch.set_rng_state(state["torch"])
    for kind in _DEVICES:
        saved = state.get(kind, [])
        device = getattr(torch, kind)
        count = device.device_count() if device.is_available() else 0
        if len(saved) > count:
            logger.warning(
                "The checkpoint has the random state of %d %s devices, but there are %d here.", len(saved), kind, count
            )
        if saved and count:
            now = device.current_device()
            places = device_places(len(saved), state.get(_CURRENT, {}).get(kind), now, count)
            if now not in places.values():
                logger.warning(
                    "The checkpoint has no random state for this process's %s device %d, which keeps its own.",
                    kind,
                    now,
                )
            for number, target in places.items():
                device.set_rng_state(saved[number], target)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


def device_places(saved: int, current: int | None, now: int, count: int) -> dict[int, int]:
    """Choose which of the saved states of a kind of device goes to which device here.

    The state of the device on which the process drew goes to the one on which it draws now: a rank may have another one
    than before, for example if two machines of 4 became one of 8. The others keep their numbers, if such devices exist.

    Args:
        saved: The number of states.
        current: The process's own device when they were saved; None: the checkpoint does not record it.
        now: Its own device here.
        count: The number of devices here.

    Example:
        >>> device_places(saved=4, current=1, now=5, count=8)
        {1: 5, 0: 0, 2: 2, 3: 3}
    """
    places = {} if current is None else {current: now}
    taken = set(places.values())
    return places | {number: number for number in range(min(saved, count)) if number not in {*places, *taken}}


def seed_from_state(state: dict[str, Any], rank: int, world_size: int) -> None:
    """Seed all generators from a state of another number of ranks: always the same, and different on each rank."""
    word = hashlib.sha256(f"{rank} of {world_size}".encode() + state["torch"].numpy().tobytes()).digest()
    seed = int.from_bytes(word[:8], "little") >> 1  # torch accepts 63 bits
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    torch.manual_seed(seed)


def _python_state(state: dict[str, Any]) -> tuple[Any, ...]:
    python = state["python"]
    return python["version"], tuple(python["words"].view(torch.uint32).tolist()), python["gauss"]


# The gradients of a model, for checkpoints between the micro-batches of one step.


class Gradients:
    """Saves and restores `.grad` of every parameter, by name.

        state = TrainingState(model=model, optimizer=optimizer, gradients=Gradients(model))

    It is needed only for saves while gradients accumulate. After `optimizer.step()` their values do not matter, and
    without it a restore sets those of trained parameters to zero, or to None where there were none. It makes a
    checkpoint larger by the size of the gradients. Under `fully_shard`, gradients are those that were reduced: after a
    backward pass with `set_requires_gradient_sync(False)` a save is rejected.
    """

    def __init__(self, model: nn.Module) -> None:
        """Name the model.

        Args:
            model: Any module, with or without wrappers.
        """
        self._model = model

    @property
    def is_spread(self) -> bool:
        """True if a parameter is a DTensor, so that its gradient is that of all ranks."""
        return bool(fully_sharded_modules(self._model)) or any(map(is_dtensor, self._model.parameters()))

    @property
    def names(self) -> set[str]:
        """The names of all parameters, with or without a gradient."""
        return set(self._parameters())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return name -> gradient of the parameters that have one; the tensors themselves.

        Raises:
            InvalidArgumentError: A gradient is not reduced over the ranks yet.
        """
        reject_unreduced(self._model, "save")
        return {name: one.grad for name, one in self._parameters().items() if one.grad is not None}

    def check_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Reject gradients of another model; nothing is changed.

        Raises:
            StateDictMismatchError: A parameter is missing, or has another shape.
        """
        parameters = self._parameters()
        for name, gradient in state_dict.items():
            if name not in parameters or parameters[name].shape != gradient.shape:
                found = list(parameters[name].shape) if name in parameters else "no such parameter"
                raise StateDictMismatchError(
                    f"The checkpoint has a gradient of '{name}' of shape {list(gradient.shape)}, but the model has "
                    f"{found}. Build the model as in the saved run.",
                    fqn=name,
                    unexpected_keys=(name,),
                )

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Restore the gradient of each parameter, and remove the gradients of those that had none.

        Raises:
            StateDictMismatchError: A parameter is missing, or has another shape.
        """
        self.check_state_dict(state_dict)
        for name, parameter in self._parameters().items():
            gradient = state_dict.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)

    def _parameters(self) -> dict[str, nn.Parameter]:
        names = parameter_names(self._model)
        return {names[id(parameter)]: parameter for parameter in self._model.parameters()}


def reject_unreduced(model: nn.Module, verb: str) -> None:
    """Reject gradients that FSDP2 keeps to itself until a later backward pass reduces them over the ranks.

    No parameter has them as its `.grad`, so a save would lose them, and a restore would leave them to the next step.

    Args:
        model: Any module; under `fully_shard` it must have been resharded.
        verb: What is rejected, "save" or "restore".

    Raises:
        InvalidArgumentError: There are such gradients.
    """
    found = next(_unreduced_names(model), None)
    if found is not None:
        raise InvalidArgumentError(
            f"Cannot {verb} between these micro-batches: the gradient of '{found}' is not reduced over the ranks yet, "
            "because the last backward pass ran with set_requires_gradient_sync(False) or "
            f"set_requires_all_reduce(False). {verb.capitalize()} after one that ran with True; or leave both at True "
            "while gradients accumulate, which costs a reduction per micro-batch.",
            fqn=found,
        )


def _unreduced_names(model: nn.Module) -> Iterator[str]:
    """Yield the parameters whose gradients are not reduced, or with HSDP not summed up over the replicas."""
    modules = fully_sharded_modules(model)
    names = parameter_names(model) if modules else {}
    for group in chain.from_iterable(map(_parameter_groups, modules)):
        for one in group.fsdp_params:
            gathered = getattr(one, "_unsharded_param", None)  # there is none before the first pass
            is_kept = gathered is not None and gathered.grad is not None
            if is_kept or one.unsharded_accumulated_grad is not None or group._partial_reduce_output is not None:
                yield names[id(one.sharded_param)]


def _parameter_groups(module: Any) -> list[Any]:
    """Return a module's groups under `fully_shard`; torch has no public name for them, and before 2.13 at most one."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
