"""Turns on gradient checkpointing in one call, with the gradients, buffers and RNG states of training without it."""

from __future__ import annotations

import copyreg
import difflib
import sys
import types
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any, Final

import torch
from torch import nn

from hfshard.errors import InvalidArgumentError
from hfshard.tensors.parameter_names import unwrap
from hfshard.training.recompute.recomputation import call_recomputed

_BASE: Final = "_hfshard_checkpointed_class"
"""The attribute of a replaced class that holds the module's original class."""


class GradientCheckpointing:
    """A handle for what `enable_gradient_checkpointing` turned on.

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
                f"Gradient checkpointing of '{covered[0]}' can't be removed: its class has been changed to "
                f"{type(self._blocks[covered[0]]).__name__}. Remove it before fully_shard() and the like.",
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
    training without it, bit for bit. It is never reentrant, works for blocks that are called twice, and under autocast.
    In eval mode, and where no gradients are recorded, blocks run as usual. Parameter names do not change.

    For a transformers model, the flags of its layers are set, which turns its cache (`use_cache`) off. So "bit for bit"
    compares with training with `config.use_cache = False`. With the cache, which some models fill while they train,
    attention reads contiguous copies of keys and values; some processors sum the products of these in another order
    (GPT-2 on an AMD EPYC: gradients differ by up to 2e-8), with or without hfshard.

    Do not pass `gradient_checkpointing=True` to Trainer, which would replace what is done here. Under torch.compile,
    blocks run uncompiled.

    Changes that a block makes to lists and dicts, to objects that are not modules and to global variables are not
    noticed, and so happen twice.

    Args:
        model: A transformers model, a module that holds some, an `nn.Sequential` of blocks, or any module together
            with `modules`, wrapped by DistributedDataParallel or torch.compile or not. It is changed in place.
        modules: Dotted names of blocks, with wildcards in place of parts of a name: "blocks.*" is every child of
            `blocks`, "*.layers.?" works too. None: the layers that transformers chose for its models, or else the
            children of a Sequential that have children themselves (a single layer has nothing to save).

    Returns:
        A handle with the names of the blocks and a method `remove()`.

    Raises:
        InvalidArgumentError: The model has no such blocks, or can't recompute them; nothing was changed. Later, when
            a block is called: it changes its input or a parameter in place; see `recomputation.py`.

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
    """The blocks of a Sequential."""
    lists = [
        name for name, module in model.named_modules() if name and isinstance(module, nn.ModuleList | nn.Sequential)
    ]
    hint = f" For example modules='{lists[0]}.*'." if lists else ""
    if not isinstance(model, nn.Sequential):
        raise InvalidArgumentError(
            f"A {type(model).__name__} is neither a transformers model nor a Sequential: name the blocks whose "
            f"activations are to be recomputed, enable_gradient_checkpointing(model, modules=...).{hint}"
        )
    blocks = {name: child for name, child in model.named_children() if next(child.children(), None) is not None}
    if not blocks:
        raise InvalidArgumentError(
            "This Sequential has no blocks: each child is a layer alone, whose input would be kept in place of its "
            "activations, which saves nothing. Group its layers: nn.Sequential(nn.Sequential(...), nn.Sequential(...))."
        )
    return blocks


def _named_blocks(model: nn.Module, patterns: tuple[str, ...]) -> dict[str, nn.Module]:
    """The modules that match patterns, in the model's order; a module with several names appears once."""
    names = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    chosen: set[str] = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InvalidArgumentError(f"modules= takes names such as 'blocks.*', not a {type(pattern).__name__}.")
        found = {name for name in names if _matches(name, pattern)}
        if not found:
            near = difflib.get_close_matches(pattern, names, n=3)
            hint = f"the nearest names are {', '.join(map(repr, near))}" if near else "see model.named_modules()"
            raise InvalidArgumentError(
                f"modules= names '{pattern}', and no module of this {type(model).__name__} is called so: {hint}.",
                fqn=pattern,
            )
        chosen |= found
    if not chosen:
        raise InvalidArgumentError("modules= is empty: name at least one block, such as 'blocks.*'.")
    first: dict[int, str] = {}
    for name in names:
        if name in chosen:
            first.setdefault(id(names[name]), name)
    return {name: names[name] for name in first.values()}


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches a dotted name; a wildcard does not match a dot."""
    parts = name.split(".")
    wanted = pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _check_block(name: str, block: nn.Module, blocks: dict[str, nn.Module]) -> None:
    """Refuse a block that can't be recomputed.

    Raises:
        InvalidArgumentError: It is never called, has a `forward` of its own, or holds another block.
    """
    if "forward" in vars(block) or isinstance(block, torch.jit.ScriptModule):
        raise InvalidArgumentError(
            f"'{name}' ({type(block).__name__}) has a forward of its own, from torch.compile, torch.jit or hooks "
            "of accelerate: enable gradient checkpointing before those.",
            fqn=name,
        )
    if type(block).forward is nn.Module.forward:
        raise InvalidArgumentError(
            f"modules= names '{name}', a {type(block).__name__}, which is never called itself: "
            f"name what is in it, '{name}.*'.",
            fqn=name,
        )
    others = {id(other): other_name for other_name, other in blocks.items()}
    for inner_name, inner in block.named_modules():
        is_layer = getattr(inner, "gradient_checkpointing", False) is True
        if (inner is not block and (id(inner) in others or _is_on(inner))) or is_layer:
            whole = f"{name}.{inner_name}".rstrip(".")
            raise InvalidArgumentError(
                f"'{name}' holds '{whole}', which is checkpointed as well: blocks within blocks would be recomputed "
                "twice. Name one of the two.",
                fqn=whole,
            )


def _is_on(module: nn.Module) -> bool:
    return hasattr(type(module), _BASE)


def _checkpointed_class(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass that recomputes: its instances are copied, pickled and replicated like those of the class itself.

    It is a class and not an attribute of the instance: a copy of the attributes (as in DataParallel) would go on
    calling the original module.
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
    """An empty module with gradient checkpointing, which a copy or a pickle begins with."""
    made = _checkpointed_class(base)
    return made.__new__(made)


def _transformers_models(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost transformers models within a module, itself included, found without importing transformers."""
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
    """`gradient_checkpointing_enable` or `…_disable`, under their newer names where transformers has these."""
    return getattr(model, f"activation_checkpointing_{verb}", None) or getattr(model, f"gradient_checkpointing_{verb}")


def _enable_in_transformers(models: dict[str, nn.Module]) -> GradientCheckpointing:
    """Turn on transformers' own gradient checkpointing, and let its layers call `call_recomputed`.

    Raises:
        InvalidArgumentError: An architecture does not support it; nothing was changed.
    """
    layer_class: Any = sys.modules["transformers.modeling_layers"].GradientCheckpointingLayer  # imported by the models
    for name, model in models.items():
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise _unsupported(name, model)
    blocks: dict[str, nn.Module] = {}
    for outer, model in models.items():
        _transformers_method(model, "enable")({"use_reentrant": False, "preserve_rng_state": True})
        # Only a reentrant checkpoint needs inputs with gradients, which make frozen first layers work for nothing.
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
    """Clear the flag of the modules within a layer, which do not need it, and some of which behave differently with it.

    T5's attention lets its zero bias require a gradient, which a reentrant checkpoint needs: torch then takes another
    attention kernel, and gradients differ in their last bits (1e-7 of 1) from training without checkpointing.
    """
    for module in layer.modules():
        if module is not layer and getattr(module, "gradient_checkpointing", False) is True:
            setattr(module, "gradient_checkpointing", False)  # noqa: B010  # no tensor and no module
