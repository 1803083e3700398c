"""Everything that a run of training consists of, as flat text that two runs are compared by, bit for bit."""

from __future__ import annotations

import hashlib
import random
import types
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tests.helpers.tensor_bytes import bytes_of

_PLAIN = (str, bytes, int, complex, bool, type(None), torch.dtype, torch.device, torch.Size, Enum)
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, weakref.ReferenceType)
_OWNERS = (Optimizer, nn.Module)
"""Found inside of another object: part of the run, and shown elsewhere."""


def digest(data: bytes) -> str:
    """Short, for messages that people read; long enough that no two values in a test share it."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def flatten(value: Any, path: str, seen: tuple[int, ...] = ()) -> Iterator[tuple[str, str]]:
    """Each leaf's path and its type and bits.

    Args:
        value: Anything that is found in the state of a run; objects are shown by their attributes.
        path: Where it is.
        seen: The objects around it, so that a circle ends.
    """
    if isinstance(value, DTensor):
        yield from flatten(value.to_local(), f"{path} of this rank")
    elif isinstance(value, torch.Tensor):
        yield path, f"{value.dtype}{tuple(value.shape)} {digest(bytes_of(value))}"
    elif isinstance(value, np.ndarray):
        yield path, f"numpy.{value.dtype}{value.shape} {digest(value.tobytes())}"
    elif isinstance(value, np.generic):
        yield path, f"numpy.{value.dtype} {digest(value.tobytes())}"
    elif isinstance(value, float):
        yield path, f"float {value.hex()}"
    elif isinstance(value, _PLAIN):
        yield path, f"{type(value).__name__} {value!r}"
    elif isinstance(value, _CODE):
        yield path, f"code {getattr(value, '__qualname__', '')}"
    elif isinstance(value, _OWNERS):
        yield path, type(value).__name__
    elif isinstance(value, Mapping):
        order = list(value) if not isinstance(value, Counter) else sorted(value, key=repr)
        yield path, f"{type(value).__name__} {order!r}"
        for key in order:
            yield from flatten(value[key], f"{path}/{key!r}", seen)
    elif isinstance(value, list | tuple | deque):
        limit = f" of {value.maxlen}" if isinstance(value, deque) else ""
        yield path, f"{type(value).__name__} {len(value)}{limit}"
        for index, item in enumerate(value):
            yield from flatten(item, f"{path}/{index}", seen)
    elif isinstance(value, set | frozenset):
        yield path, f"{type(value).__name__} {sorted(map(repr, value))}"
    elif id(value) in seen:
        yield path, "around"
    else:
        yield path, type(value).__name__
        yield from flatten(vars(value), path + ".", (*seen, id(value)))


def of_model(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Weights and buffers."""
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            yield from flatten(tensor, f"model/{name}")


def of_optimizer(optimizer: Optimizer, model: nn.Module, path: str) -> Iterator[tuple[str, str]]:
    """Each group's members and options, each parameter's state: all by the parameters' names."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for index, group in enumerate(optimizer.param_groups):
        yield f"{path}/group {index}", " ".join(names[parameter] for parameter in group["params"])
        for option in sorted(group):
            if option != "params":
                yield from flatten(group[option], f"{path}/group {index}/{option}")
    for parameter, name in names.items():
        if parameter in optimizer.state:
            state = optimizer.state[parameter]
            yield from flatten({slot: state[slot] for slot in sorted(state)}, f"{path}/state/{name}")


def of_scheduler(scheduler: Any) -> Iterator[tuple[str, str]]:
    """All that it holds, of the schedulers and callables inside it too."""
    attributes = dict(sorted(vars(scheduler).items()))
    yield from flatten(attributes, "scheduler", (id(scheduler),))


def of_rngs() -> Iterator[tuple[str, str]]:
    """The three generators of this process."""
    state: Any = np.random.get_state()
    yield "rng/python", digest(repr(random.getstate()).encode())
    yield "rng/numpy", digest(state[1].tobytes() + repr(state[2:]).encode())
    yield "rng/torch", digest(bytes_of(torch.get_rng_state()))
