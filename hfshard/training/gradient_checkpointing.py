"""Gradient checkpointing in one call, with the gradients, buffers and RNG states of training without it."""

from __future__ import annotations

import copyreg
import difflib
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial, wraps
from types import TracebackType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from hfshard.errors import InvalidArgumentError
from hfshard.tensors.parameter_names import unwrap
from hfshard.training.data.seeding import generator_state, is_generator, set_generator_state

_BASE: Final = "_hfshard_checkpointed_class"
"""The attribute of a replaced class that stores the module's original class."""


class GradientCheckpointing:
    """A handle for what `enable_gradient_checkpointing` enabled.

    Attributes:
        names: The dotted names of the blocks whose activations are recomputed, in the model's order.
    """

    def __init__(self, blocks: dict[str, nn.Module], models: Iterable[nn.Module] = ()) -> None:
        self.names = tuple(blocks)
        self._blocks = blocks
        self._models = tuple(models)

    def __repr__(self) -> str:
        return f"GradientCheckpointing(names={self.names!r})"

    def remove(self) -> None:
        """Turn gradient checkpointing off again; a second call does nothing.

        Raises:
            InvalidArgumentError: Something (FSDP2's fully_shard) has changed a block's class since.
        """
        covered = [name for name, block in self._blocks.items() if _is_on(block) and _BASE not in vars(type(block))]
        if covered:
            raise InvalidArgumentError(
                f"Cannot remove gradient checkpointing from '{covered[0]}': its class was changed to "
                f"{type(self._blocks[covered[0]]).__name__}. Remove it before fully_shard() and similar calls.",
                fqn=covered[0],
            )
        for block in self._blocks.values():
            if _is_on(block):
                block.__class__ = getattr(type(block), _BASE)
        for model in self._models:
            _transformers_method(model, "disable")()
        self._models = ()


def enable_gradient_checkpointing(
    model: nn.Module, modules: str | Iterable[str] | None = None
) -> GradientCheckpointing:
    """Recompute the activations of a model's blocks in the backward pass instead of keeping them.

    Gradients, buffers (BatchNorm counts a step once) and the states of all random number generators are those of
    training without it, bit for bit. It is never reentrant, and works for blocks that are called twice and under
    autocast. In eval mode, and where no gradients are recorded, blocks run as usual. Parameter names do not change.

    For a transformers model, the flags of its layers are set, which turns its cache (`use_cache`) off. So "bit for bit"
    compares with training with `config.use_cache = False`. With the cache, which some models fill while they train,
    attention reads contiguous copies of keys and values; some processors sum the products of these in another order
    (GPT-2 on an AMD EPYC: gradients differ by up to 2e-8), with or without hfshard.

    Do not pass `gradient_checkpointing=True` to Trainer, which would replace what is done here. Under torch.compile,
    blocks run uncompiled.

    Changes that a block makes to lists and dicts, to objects that are not modules and to global variables are not
    noticed, and so happen twice.

    Args:
        model: A transformers model, a module that contains some, an `nn.Sequential` of blocks, or any module together
            with `modules`; wrapped by DistributedDataParallel or torch.compile or not. It is changed in place.
        modules: Dotted names of blocks, with wildcards in place of parts of a name: "blocks.*" is every child of
            `blocks`, "*.layers.?" works too. None: the layers that transformers chose for its models, or else the
            children of a Sequential that have children themselves (a single layer has nothing to save).

    Returns:
        A handle with the names of the blocks and a method `remove()`.

    Raises:
        InvalidArgumentError: The model has no such blocks, or cannot recompute them; nothing was changed. Later, when
            a block is called: it changes its input or a parameter in place.

    Example:
        handle = enable_gradient_checkpointing(bert)
        handle.remove()
    """
    model = unwrap(model)
    if modules is None:
        within = _transformers_models(model)
        if within:
            return _enable_in_transformers(within)
        blocks = _children_with_children(model)
    else:
        blocks = _named_blocks(model, (modules,) if isinstance(modules, str) else tuple(modules))
    for name, block in blocks.items():
        _check_block(name, block, blocks)
    for block in blocks.values():
        if not _is_on(block):
            block.__class__ = _checkpointed_class(type(block))
    return GradientCheckpointing(blocks)


def _children_with_children(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a Sequential."""
    lists = [
        name for name, module in model.named_modules() if name and isinstance(module, nn.ModuleList | nn.Sequential)
    ]
    hint = f" For example: modules='{lists[0]}.*'." if lists else ""
    if not isinstance(model, nn.Sequential):
        raise InvalidArgumentError(
            f"A {type(model).__name__} is neither a transformers model nor a Sequential. Name the blocks to recompute: "
            f"enable_gradient_checkpointing(model, modules=...).{hint}"
        )
    blocks = {name: child for name, child in model.named_children() if next(child.children(), None) is not None}
    if not blocks:
        raise InvalidArgumentError(
            "This Sequential has no blocks: each child is a single layer, and keeping its input instead of its "
            "activations saves nothing. Group its layers: nn.Sequential(nn.Sequential(...), nn.Sequential(...))."
        )
    return blocks


def _named_blocks(model: nn.Module, patterns: tuple[str, ...]) -> dict[str, nn.Module]:
    """Return the modules that match patterns, in the model's order; a module with several names appears once."""
    names = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    chosen: set[str] = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InvalidArgumentError(
                f"modules= must contain names such as 'blocks.*', got a {type(pattern).__name__}."
            )
        found = {name for name in names if _matches(name, pattern)}
        if not found:
            near = difflib.get_close_matches(pattern, names, n=3)
            hint = f"the nearest names are {', '.join(map(repr, near))}" if near else "see model.named_modules()"
            raise InvalidArgumentError(
                f"modules= names '{pattern}', but this {type(model).__name__} has no such module: {hint}.",
                fqn=pattern,
            )
        chosen |= found
    if not chosen:
        raise InvalidArgumentError("modules= is empty. Name at least one block, such as 'blocks.*'.")
    first: dict[int, str] = {}
    for name in names:
        if name in chosen:
            first.setdefault(id(names[name]), name)
    return {name: names[name] for name in first.values()}


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a dotted name; a wildcard does not match a dot."""
    parts = name.split(".")
    wanted = pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _check_block(name: str, block: nn.Module, blocks: dict[str, nn.Module]) -> None:
    """Reject a block that is never called, has its own `forward`, or contains another block."""
    if "forward" in vars(block) or isinstance(block, torch.jit.ScriptModule):
        raise InvalidArgumentError(
            f"'{name}' ({type(block).__name__}) has its own forward, from torch.compile, torch.jit or Accelerate's "
            "hooks. Enable gradient checkpointing before those.",
            fqn=name,
        )
    if type(block).forward is nn.Module.forward:
        raise InvalidArgumentError(
            f"modules= names '{name}', a {type(block).__name__}, which is never called itself. Name its contents: "
            f"'{name}.*'.",
            fqn=name,
        )
    others = {id(other): other_name for other_name, other in blocks.items()}
    for inner_name, inner in block.named_modules():
        is_layer = getattr(inner, "gradient_checkpointing", False) is True
        if (inner is not block and (id(inner) in others or _is_on(inner))) or is_layer:
            whole = f"{name}.{inner_name}".rstrip(".")
            raise InvalidArgumentError(
                f"'{name}' contains '{whole}', which is checkpointed too: nested blocks would be recomputed twice. "
                "Name only one of them.",
                fqn=whole,
            )


def _is_on(module: nn.Module) -> bool:
    return hasattr(type(module), _BASE)


def _checkpointed_class(base: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass that recomputes; its instances are copied, pickled and replicated like the base class's own.

    It is a class and not an attribute of the instance: a copy of the attributes (as in DataParallel) would still call
    the original module.
    """
    for known in base.__subclasses__():
        if vars(known).get(_BASE) is base:
            return known

    @wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled():
            return call_recomputed(base.forward, self, *args, **kwargs)
        return base.forward(self, *args, **kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        parts = base.__reduce_ex__(self, protocol)
        if isinstance(parts, tuple) and parts[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            return (_new_instance, (base,), *parts[2:])
        return parts

    space = {_BASE: base, "forward": forward, "__reduce_ex__": __reduce_ex__}
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    made: type[nn.Module] = types.new_class(base.__name__, (base,), exec_body=lambda body: body.update(space | names))
    return made


def _new_instance(base: type[nn.Module]) -> nn.Module:
    """Create an empty module with gradient checkpointing, from which a copy or a pickle starts."""
    made = _checkpointed_class(base)
    return made.__new__(made)


def _transformers_models(model: nn.Module) -> dict[str, nn.Module]:
    """Find the outermost transformers models in a module, itself included, without importing transformers."""
    modeling_utils = sys.modules.get("transformers.modeling_utils")
    if modeling_utils is None:
        return {}
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        within = any(name.startswith(f"{outer}.") or not outer for outer in found)
        if isinstance(module, modeling_utils.PreTrainedModel) and not within:
            found[name] = module
    return found


def _transformers_method(model: nn.Module, verb: str) -> Any:
    """Return `gradient_checkpointing_enable` or `…_disable`, under their newer names if transformers has these."""
    return getattr(model, f"activation_checkpointing_{verb}", None) or getattr(model, f"gradient_checkpointing_{verb}")


def _enable_in_transformers(models: dict[str, nn.Module]) -> GradientCheckpointing:
    """Enable transformers' own gradient checkpointing, and let its layers call `call_recomputed`."""
    layer_class: Any = sys.modules["transformers.modeling_layers"].GradientCheckpointingLayer  # imported by the models
    for name, model in models.items():
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise _unsupported(name, model)
    blocks: dict[str, nn.Module] = {}
    for outer, model in models.items():
        _transformers_method(model, "enable")({"use_reentrant": False, "preserve_rng_state": True})
        # Only a reentrant checkpoint needs inputs with gradients, which cost frozen first layers needless work.
        model.disable_input_require_grads()  # type: ignore[operator]
        callers = {
            ".".join(filter(None, (outer, name))): module
            for name, module in model.named_modules()
            if hasattr(module, "_gradient_checkpointing_func")
        }
        if not callers:  # the architecture sets a flag that nothing reads
            GradientCheckpointing({}, models.values()).remove()
            raise _unsupported(outer, model)
        for caller in callers.values():
            caller._gradient_checkpointing_func = call_recomputed
        layers = {name: caller for name, caller in callers.items() if isinstance(caller, layer_class)}
        for layer in layers.values():
            _switch_off_within(layer)
        blocks |= layers or callers  # a model's own code may checkpoint its layers from the stack
    return GradientCheckpointing(blocks, models.values())


def _unsupported(name: str, model: nn.Module) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{type(model).__name__} does not support gradient checkpointing in this version of transformers. "
        "Name its blocks: enable_gradient_checkpointing(model, modules=...).",
        fqn=name,
    )


def _switch_off_within(layer: nn.Module) -> None:
    """Clear the flag of the modules within a layer, which do not need it; some of them behave differently with it.

    T5's attention lets its zero bias require a gradient, which a reentrant checkpoint needs: torch then uses another
    attention kernel, and gradients differ in their last bits (1e-7 of 1) from training without checkpointing.
    """
    for module in layer.modules():
        if module is not layer and getattr(module, "gradient_checkpointing", False) is True:
            setattr(module, "gradient_checkpointing", False)  # noqa: B010  # no tensor and no module


# State that the first run of a block reads and changes: it is restored before the second run, and undone after it.
#
# It consists of the buffers, attributes and `training` flags of the block's modules, and of the generators of Python
# and numpy, both the process's and the modules' own. (torch itself restores its own generators.) If the second run
# would start from something that cannot be restored, an error names the tensor or the array.


_SMALL_BYTES: Final = 65_536
"""Buffers up to this size are kept for the recomputation without checking whether they changed: a check costs more, and
does not see writes through `.data`, which count no version. No BatchNorm has larger ones."""
_TORCHS_OWN: Final = frozenset(vars(nn.Module()))
"""Attributes that every module has: its tables of parameters, buffers and hooks, and `training`."""
_ABSENT: Final = object()
"""Represents a buffer or an attribute that does not exist."""


@dataclass(slots=True)
class _Buffer:
    """A buffer as it was before the first run."""

    value: Tensor
    version: int | None
    copy: Tensor

    def is_same(self) -> bool:
        """Return whether the first run left it unchanged; False for small ones, which are not compared."""
        if self.value.nbytes <= _SMALL_BYTES:
            return False
        return version_of(self.value) == self.version and torch.equal(self.copy, self.value)


@dataclass(frozen=True, slots=True)
class _TableEntry:
    """An entry of a module's table as it was before the first run."""

    table: dict[str, Any]
    name: str
    value: Any
    copy: Tensor | None = None
    """The numbers from before the first run; a copy of them is placed in the table each time."""

    def put(self, copies: dict[int, Tensor]) -> Callable[[], None] | None:
        """Put the entry back; return what undoes that, None if nothing changes. A buffer of two names stays one."""
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
class StateSnapshot:
    """Everything that a first run can change, as it was before."""

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
    """The number of parameters in `fixed`; these come first."""
    arrays: list[tuple[str, Any, Any]]
    """Attributes whose numbers no run may change although no version counts it: a description, the value, a copy."""
    generators: list[_Generator]

    @classmethod
    def of(cls, blocks: list[nn.Module], inputs: Any) -> StateSnapshot:
        """Note the state of blocks, and of the inputs that they are about to get."""
        modules = list({id(module): module for block in blocks for module in block.modules()}.values())
        attributes = [_own_attributes(module) for module in modules]
        parameters = [
            (f"parameter '{name}' of a {type(module).__name__}", tensor)
            for module in modules
            for name, tensor in module._parameters.items()
            if tensor is not None
        ]
        others = [("input", leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        values = [
            (f"attribute '{name}' of a {type(module).__name__}", value)
            for module, own in zip(modules, attributes)
            for name, value in own.items()
            if isinstance(value, Tensor | np.ndarray)
        ]
        others += [(words, value) for words, value in values if isinstance(value, Tensor)]
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
            arrays=[(words, value, _copied(value)) for words, value in values if _is_small_array(value)],
            generators=list(_generators(attributes)),
        )

    def compare(self, second_run: SecondRun) -> None:
        """Compare after the first run: pass what it changed to the second one; reject what cannot be restored.

        Raises:
            InvalidArgumentError: The first run changed an input or a parameter.
        """
        changed = [(words, tensor) for words, tensor, version in self.fixed if version_of(tensor) != version]
        changed += [(words, value) for words, value, copy in self.arrays if not _is_same_state(copy, _copied(value))]
        for words, value in changed:
            raise InvalidArgumentError(
                f"The checkpointed block '{type(self.modules[0]).__name__}' changed its {words} (shape "
                f"{tuple(value.shape)}) in place, so the recomputation in the backward pass would start from other "
                "values and give other gradients. Write that operation out of place (inplace=False, x = x + y for x "
                "+= y), or do not checkpoint this block.",
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
    """The context of each recomputation of a call; within it, everything is as it was before the first run."""

    fixed: list[tuple[str, Tensor, int | None]] = field(default_factory=list)
    entries: list[_TableEntry] = field(default_factory=list)
    generators: list[_Generator] = field(default_factory=list)
    undo: list[list[Callable[[], None]]] = field(default_factory=list)

    def __enter__(self) -> None:
        for words, tensor, version in self.fixed:
            if version_of(tensor) != version:
                raise InvalidArgumentError(
                    f"The {words} (shape {tuple(tensor.shape)}) of a checkpointed block was changed between the "
                    "forward and the backward pass (optimizer.step() before the last backward()?): the recomputation "
                    "would give the gradients of other weights. Call backward() first.",
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
    """Return how often a tensor was changed in place, as torch counts it for autograd; None if torch does not count."""
    return None if tensor.is_inference() else tensor._version


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module, without those that every module has."""
    return {name: value for name, value in vars(module).items() if name not in _TORCHS_OWN}


def _is_small_array(value: Any) -> bool:
    """Return whether it is a small numpy array or tensor: writes to it, or through its `.data`, count no version."""
    if type(value) is Tensor:
        return value.nbytes <= _SMALL_BYTES and not value.is_meta
    return type(value) is np.ndarray and not value.dtype.hasobject and bool(value.nbytes <= _SMALL_BYTES)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value.copy()


def _without_graph(value: Any) -> Any:
    """Return the value without the graph that produced it: a chain of graphs would keep every step in memory."""
    return value.detach() if isinstance(value, Tensor) and value.grad_fn is not None else value


def _generators(attributes: Iterable[dict[str, Any]]) -> Iterator[_Generator]:
    """Yield the generators of Python and numpy, and those of modules; a state that is read is a copy."""
    yield _Generator(random.getstate, random.setstate, random.getstate())
    get = partial(np.random.get_state, legacy=False)
    yield _Generator(get, np.random.set_state, get())
    for value in (value for one in attributes for value in one.values()):
        if is_generator(value):
            get = partial(generator_state, value)
            yield _Generator(get, partial(set_generator_state, value), get())


def _is_same_state(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(_is_same_state(value, other[name]) for name, value in one.items())
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return bool(one.tobytes() == other.tobytes()) if hasattr(one, "tobytes") else bool(one == other)


# Exact recomputation: a block is called now and once more in the backward pass.
#
# `torch.utils.checkpoint` runs the block a second time. What the first run read and changed is restored before the
# second one, so that both runs compute the same.


@torch.compiler.disable  # type: ignore[untyped-decorator]  # dynamo would trace one run and not know of the other
def call_recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of modules now, keep no activations, and call it again when the backward pass needs them.

        y = call_recomputed(block.forward, x)

    Args:
        function: A module's method, or a partial of one; it is called with the arguments and nothing else.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        What the function returns.

    Raises:
        InvalidArgumentError: The function changes its inputs or its parameters, so that a second run could not equal
            the first; or (in the backward pass) other code changed its parameters in between.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    while isinstance(function, partial):
        inner: partial[Any] = function
        function = inner.func
        args = (*inner.args, *args)
        kwargs = {**inner.keywords, **kwargs}
    blocks = _blocks(function, args)
    before = StateSnapshot.of(blocks, (args, kwargs))
    second_run = SecondRun()

    # All tensors go in by position: torch keeps the random state only of the devices that it sees there.
    count, names = len(args), tuple(kwargs)
    values = (*args, *kwargs.values(), *_one_on_each_device(before, (args, kwargs)))

    def run(*given: Any) -> Any:
        return function(*given[:count], **dict(zip(names, given[count : count + len(names)])))

    result = checkpoint(
        run, *values, use_reentrant=False, preserve_rng_state=True, context_fn=lambda: (nullcontext(), second_run)
    )
    before.compare(second_run)
    return result


def _blocks(function: Callable[..., Any], args: tuple[Any, ...]) -> list[nn.Module]:
    """Return the modules that a call runs: those the method is bound to, gets as arguments, or has in its closure."""
    owner = getattr(function, "__self__", function)
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    blocks = [module for module in (owner, *args, *held) if isinstance(module, nn.Module)]
    if not blocks:
        raise InvalidArgumentError(
            f"Cannot make gradient checkpointing of {function!r} exact: it is not a method of a module. Name the "
            "blocks instead: enable_gradient_checkpointing(model, modules=...)."
        )
    return blocks


def _one_on_each_device(before: StateSnapshot, inputs: Any) -> list[Tensor]:
    """Create an empty tensor on every device where the block has tensors and its inputs have none."""
    seen = {leaf.device for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
    own = {tensor.device for _, tensor, _ in before.fixed} | {one.value.device for one in before.buffers.values()}
    return [torch.empty(0, device=device) for device in own - seen if device.type not in ("cpu", "meta")]
