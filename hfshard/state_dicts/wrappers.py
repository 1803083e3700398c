"""The wrappers of models and their parts (DataParallel, DistributedDataParallel, torch.compile), and their names."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator

from torch import nn

_WRAPPERS = frozenset(("module", "_orig_mod"))
"""The children in which DataParallel, DistributedDataParallel and torch.compile keep what they wrap."""
_CHECKPOINTED = "_checkpoint_wrapped_module"
"""The child in which torch's activation checkpointing keeps a module: a part of the names of parameters, but torch
itself leaves it out of those of a state dict."""
_COMPILED = re.compile(r"(?:^|(?<=\.))_orig_mod\.")


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside its wrappers, in any nesting."""
    while (child := _wrapped_child(model)) is not None:
        model = getattr(model, child)
    return model


def match_prefixes(names: Iterable[str], expected: Collection[str]) -> dict[str, str]:
    """Strip `module.` and `_orig_mod.` from a file's names where, and only where, that makes them the model's.

    1. A wrapper around the model prefixes every name: the number of prefixes is stripped from all names with which the
       most names fit, so that a child that is really called `module` keeps its name.
    2. What does not fit then may come from a wrapped child: it is tried without the wrappers inside the name.

    Args:
        names: The names in the file.
        expected: The model's names.

    Returns:
        Name in the file -> name for the model; no two are the same.
    """
    names, known = list(names), set(expected)
    common = min((_wrappers_before(name) for name in names), default=0)
    fits = [sum(_without_first(name, depth) in known for name in names) for depth in range(common + 1)]
    depth = fits.index(max(fits)) if fits else 0
    owners = {short: name for name in reversed(names) if (short := _without_first(name, depth)) in known}
    result = dict.fromkeys(names, "") | {name: short for short, name in owners.items()}
    for name in names:
        if not result[name]:
            short = _without_first(name, depth)
            forms = [form for form in _unwrapped_forms(short) if form in known]
            result[name] = next((form for form in [*forms, short] if form not in owners), name)
            owners[result[name]] = name
    return result


def without_common_wrappers(names: Collection[str]) -> dict[str, str]:
    """Strip what wrappers around a whole model have put before its names, where the model itself is not known.

    Returns:
        Name -> the same without the `module.` and `_orig_mod.` that all of them begin with.

    Example:
        >>> without_common_wrappers(["module.0.weight", "module.module.bias"])
        {'module.0.weight': '0.weight', 'module.module.bias': 'module.bias'}
    """
    depth = min((_wrappers_before(name) for name in names), default=0)
    return {name: _without_first(name, depth) for name in names}


def strip_wrappers(name: str) -> str:
    """Strip from a name all that wrappers around the model and torch.compile put into it."""
    return strip_compiled(_without_first(name, _wrappers_before(name)))


def strip_compiled(name: str) -> str:
    """Strip from a name what torch.compile puts into it."""
    return _COMPILED.sub("", name)


def has_wrapper_prefix(names: Iterable[str]) -> bool:
    """Whether any name has a part that could be a wrapper's."""
    return any("mod" in name and not _WRAPPERS.isdisjoint(name.split(".")) for name in names)


def _wrappers_before(name: str) -> int:
    parts = name.split(".")
    return next((number for number, part in enumerate(parts) if part not in _WRAPPERS), len(parts) - 1)


def _without_first(name: str, count: int) -> str:
    return name.split(".", count)[-1]


def _unwrapped_forms(name: str) -> Iterator[str]:
    """The names that this one can have inside wrapped modules, the likeliest first."""
    for count in range(_wrappers_before(name) + 1):
        yield strip_compiled(_without_first(name, count))
    yield ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _wrapped_child(module: nn.Module) -> str | None:
    child = _child_of_wrapper(module)
    # A subclass may have tensors and children of its own: then it is a model, and no name is left out.
    has_own = child is not None and (set(module._modules) != {child} or bool(module._parameters or module._buffers))
    return None if has_own else child


def _child_of_wrapper(module: nn.Module) -> str | None:
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return "module"
    # torch.compile's class is looked up only where it can exist: importing it takes a second.
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is not None and isinstance(module, eval_frame.OptimizedModule):
        return "_orig_mod"
    checkpointing = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    if checkpointing is not None and isinstance(module, checkpointing.ActivationWrapper):
        return _CHECKPOINTED
    return None


def wrapped_prefixes(model: nn.Module) -> set[str]:
    """Find the prefixes that the wrappers of the model's children add to its names: "encoder._orig_mod."."""
    found = {
        (f"{path}." if path else "") + child + "."
        for path, module in model.named_modules()
        if (child := _wrapped_child(module)) is not None
    }
    inside = {prefix for prefix in found if not prefix.endswith(f"{_CHECKPOINTED}.")}
    return found | {prefix.replace(f"{_CHECKPOINTED}.", "") for prefix in inside}


def without_wrappers(name: str, wrapped: set[str]) -> str:
    """Remove from a name what `wrapped_prefixes` found."""
    if not wrapped:
        return name
    kept, path = [], ""
    for part in name.split("."):
        path += f"{part}."
        if path not in wrapped:
            kept.append(part)
    return ".".join(kept)
