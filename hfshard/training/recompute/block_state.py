"""What the first run of a block reads and changes, and how it is put before the second run and taken away after it.

That is: the buffers, attributes and `training` flags of the block's modules, and the generators of Python and numpy,
those of the process and those that the modules hold. (torch itself restores its own generators.) Where the second run
would start from something that can't be put back, an error names the tensor or the array.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hfshard.errors import InvalidArgumentError

_SMALL_BYTES: Final = 65_536
"""Buffers up to this size are kept for the recomputation without checking whether they changed: a check costs more, and
does not see writes through `.data`, which count no version. No BatchNorm has larger ones."""
_TORCHS_OWN: Final = frozenset(vars(nn.Module()))
"""Attributes that every module has: its tables of parameters, buffers and hooks, and `training`."""
_ABSENT: Final = object()
"""Stands for a buffer or an attribute that does not exist."""


@dataclass(slots=True)
class _Buffer:
    """A buffer as it was before the first run."""

    value: Tensor
    version: int | None
    copy: Tensor

    def is_same(self) -> bool:
        """Whether the first run did not change it; small ones are not compared."""
        if self.value.nbytes <= _SMALL_BYTES:
            return False
        return version_of(self.value) == self.version and torch.equal(self.copy, self.value)


@dataclass(frozen=True, slots=True)
class _TableEntry:
    """What a table of a module held before the first run."""

    table: dict[str, Any]
    name: str
    value: Any
    copy: Tensor | None = None
    """The numbers from before the first run; a copy of them is put in place each time."""

    def put(self, copies: dict[int, Tensor]) -> Callable[[], None] | None:
        """Put it back and return what undoes that, or None if nothing changes. A buffer of two names stays one."""
        there = self.table.get(self.name, _ABSENT)
        value = self.value
        if self.copy is not None:
            if id(value) not in copies:
                copies[id(value)] = self.copy.clone()
            value = copies[id(value)]
        if value is there:
            return None
        _put(self.table, self.name, value)
        return partial(_put, self.table, self.name, there)


@dataclass(slots=True)
class _Generator:
    """A random number generator that torch's checkpoint does not restore, and its state before the first run."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    state: Any


@dataclass(slots=True)
class StateBefore:
    """Everything that a first run may change, as it was before."""

    modules: list[nn.Module]
    tables: list[tuple[dict[str, Any], dict[str, Any]]]
    """The tables of parameters and of buffers: each table itself, and what it contained."""
    buffers: dict[int, _Buffer]
    """By the id of the tensor."""
    attributes: list[dict[str, Any]]
    training: list[bool]
    fixed: list[tuple[str, Tensor, int | None]]
    """Tensors that no run may change: a description, the tensor, its version."""
    parameters: int
    """How many of `fixed` are parameters; these come first."""
    arrays: list[tuple[str, Any, Any]]
    """Attributes whose numbers no run may change though nothing counts it: a description, the value, a copy of it."""
    generators: list[_Generator]

    @classmethod
    def of(cls, blocks: list[nn.Module], inputs: Any) -> StateBefore:
        """Note the state of blocks, and of the inputs that they are about to get."""
        modules = list({id(module): module for block in blocks for module in block.modules()}.values())
        attributes = [_own_attributes(module) for module in modules]
        parameters = list(_named_parameters(modules))
        others = [("input", leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        others += [
            (f"attribute '{name}' of a {type(module).__name__}", value)
            for module, own in zip(modules, attributes)
            for name, value in own.items()
            if isinstance(value, Tensor)
        ]
        return cls(
            modules=modules,
            tables=[(table, dict(table)) for one in modules for table in (one._parameters, one._buffers)],
            buffers={
                id(value): _Buffer(value, version_of(value), value.detach().clone())
                for module in modules
                for value in module._buffers.values()
                if value is not None
            },
            attributes=attributes,
            training=[module.training for module in modules],
            fixed=[(words, tensor, version_of(tensor)) for words, tensor in (*parameters, *others)],
            parameters=len(parameters),
            arrays=[
                (f"attribute '{name}' of a {type(module).__name__}", value, _copied(value))
                for module, own in zip(modules, attributes)
                for name, value in own.items()
                if _is_small_array(value)
            ],
            generators=list(_generators(attributes)),
        )

    def compare(self, second_run: SecondRun) -> None:
        """After the first run: tell the second one what the first one changed; refuse what can't be put back.

        Raises:
            InvalidArgumentError: It changed an input or a parameter.
        """
        changed = [(words, tensor) for words, tensor, version in self.fixed if version_of(tensor) != version]
        changed += [(words, value) for words, value, copy in self.arrays if not _is_same_state(copy, _copied(value))]
        for words, value in changed:
            raise InvalidArgumentError(
                f"A block with gradient checkpointing, '{type(self.modules[0]).__name__}', changes its {words} "
                f"(shape {tuple(value.shape)}) in place when it is called, so the recomputation in the backward "
                "pass would start from other values and give other gradients. Write that operation out of place "
                "(inplace=False, x = x + y for x += y), or leave this block out of the checkpointed ones.",
                actual=words,
            )
        second_run.fixed = self.fixed[: self.parameters]
        copies = {key: one.copy for key, one in self.buffers.items() if not one.is_same()}
        for table, held in self.tables:
            for name in {**held, **table}:
                value = held.get(name, _ABSENT)
                second_run.entries.append(_TableEntry(table, name, value, copies.get(id(value))))
        for module, attributes, training in zip(self.modules, self.attributes, self.training):
            second_run.entries.append(_TableEntry(vars(module), "training", training))
            now = _own_attributes(module)
            for name in {**attributes, **now}:
                value = attributes.get(name, _ABSENT)
                if value is not now.get(name, _ABSENT):
                    second_run.entries.append(_TableEntry(vars(module), name, _without_graph(value)))
        second_run.generators = [one for one in self.generators if not _is_same_state(one.state, one.get())]


@dataclass(slots=True)
class SecondRun:
    """The context of each recomputation of one call: within it, everything is as it was before the first run."""

    fixed: list[tuple[str, Tensor, int | None]] = field(default_factory=list)
    entries: list[_TableEntry] = field(default_factory=list)
    generators: list[_Generator] = field(default_factory=list)
    undo: list[list[Callable[[], None]]] = field(default_factory=list)

    def __enter__(self) -> None:
        for words, tensor, version in self.fixed:
            if version_of(tensor) != version:
                raise InvalidArgumentError(
                    f"The {words} (shape {tuple(tensor.shape)}) of a block with gradient checkpointing was changed "
                    "between the forward and the backward pass (optimizer.step() before the last backward()?): the "
                    "recomputation would give the gradients of other weights. Call backward() first.",
                    actual=words,
                )
        copies: dict[int, Tensor] = {}
        undo = [step for entry in self.entries if (step := entry.put(copies)) is not None]
        for one in self.generators:
            undo.append(partial(one.set, one.get()))
            one.set(one.state)
        self.undo.append(undo)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for step in reversed(self.undo.pop()):
            step()


def _put(table: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        table.pop(name, None)
    else:
        table[name] = value


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was changed in place, as torch counts it for autograd; None where torch does not count."""
    return None if tensor.is_inference() else tensor._version


def _named_parameters(modules: list[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """The parameters of modules, and what they are in words."""
    for module in modules:
        for name, tensor in module._parameters.items():
            if tensor is not None:
                yield f"parameter '{name}' of a {type(module).__name__}", tensor


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module, without those that every module has."""
    return {name: value for name, value in vars(module).items() if name not in _TORCHS_OWN}


def _is_small_array(value: Any) -> bool:
    """Whether it is a small array of numpy, or tensor: writes to it, or through its `.data`, count no version."""
    if type(value) is Tensor:
        return value.nbytes <= _SMALL_BYTES and not value.is_meta
    numpy = sys.modules.get("numpy")
    is_array = numpy is not None and type(value) is numpy.ndarray and not value.dtype.hasobject
    return is_array and bool(value.nbytes <= _SMALL_BYTES)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value.copy()


def _without_graph(value: Any) -> Any:
    """The value without the graph that produced it: a chain of graphs would keep every step in memory."""
    return value.detach() if isinstance(value, Tensor) and value.grad_fn is not None else value


def _generators(attributes: Iterable[dict[str, Any]]) -> Iterator[_Generator]:
    """The generators of Python and numpy, and those that modules hold; a state that is read is a copy."""
    yield _Generator(random.getstate, random.setstate, random.getstate())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        get = partial(numpy.random.get_state, legacy=False)
        yield _Generator(get, numpy.random.set_state, get())
    for value in (value for one in attributes for value in one.values()):
        if isinstance(value, torch.Generator):
            yield _Generator(value.get_state, value.set_state, value.get_state())
        elif isinstance(value, random.Random):
            yield _Generator(value.getstate, value.setstate, value.getstate())
        elif numpy is not None and isinstance(value, numpy.random.RandomState):
            get = partial(value.get_state, legacy=False)
            yield _Generator(get, value.set_state, get())
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            get, put = partial(getattr, bits, "state"), partial(setattr, bits, "state")
            yield _Generator(get, put, get())


def _is_same_state(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(_is_same_state(value, other[name]) for name, value in one.items())
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return bool(one.tobytes() == other.tobytes()) if hasattr(one, "tobytes") else bool(one == other)
