"""Tensor names: without wrapper prefixes, selected, and compared with a model's."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import nn

from hfshard._util.text import shorten_list
from hfshard.errors import InvalidArgumentError, StateDictMismatchError

_WRAPPERS = frozenset(("module", "_orig_mod"))
"""The children in which DataParallel, DistributedDataParallel and torch.compile keep the wrapped module."""
_CHECKPOINTED = "_checkpoint_wrapped_module"
"""The child in which torch's activation checkpointing keeps a module: it is part of parameter names, but torch itself
omits it from the names in a state dict."""
_COMPILED = re.compile(r"(?:^|(?<=\.))_orig_mod\.")


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside its wrappers, in any nesting."""
    while (child := _wrapped_child(model)) is not None:
        model = getattr(model, child)
    return model


def match_prefixes(names: Iterable[str], expected: Collection[str]) -> dict[str, str]:
    """Strip `module.` and `_orig_mod.` from a file's names if, and only if, that makes them the model's.

    1. A wrapper around the model prefixes every name: all names are stripped of the number of prefixes with which the
       most of them fit, so that a child that is really called `module` keeps its name.
    2. Names that still do not fit may come from a wrapped child: they are tried without the wrappers inside the name.

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
    """Strip the prefixes of wrappers around a model from its names, if the model itself is not known.

    Returns:
        Name -> the name without the `module.` and `_orig_mod.` that all of them begin with.

    Example:
        >>> without_common_wrappers(["module.0.weight", "module.module.bias"])
        {'module.0.weight': '0.weight', 'module.module.bias': 'module.bias'}
    """
    depth = min((_wrappers_before(name) for name in names), default=0)
    return {name: _without_first(name, depth) for name in names}


def strip_wrappers(name: str) -> str:
    """Strip from a name all parts that wrappers around the model and torch.compile add."""
    return strip_compiled(_without_first(name, _wrappers_before(name)))


def strip_compiled(name: str) -> str:
    """Strip from a name the parts that torch.compile adds."""
    return _COMPILED.sub("", name)


def has_wrapper_prefix(names: Iterable[str]) -> bool:
    """Return whether any name has a part that could be a wrapper's."""
    return any("mod" in name and not _WRAPPERS.isdisjoint(name.split(".")) for name in names)


def _wrappers_before(name: str) -> int:
    parts = name.split(".")
    return next((number for number, part in enumerate(parts) if part not in _WRAPPERS), len(parts) - 1)


def _without_first(name: str, count: int) -> str:
    return name.split(".", count)[-1]


def _unwrapped_forms(name: str) -> Iterator[str]:
    """Yield the names that this one can have inside wrapped modules, the likeliest first."""
    for count in range(_wrappers_before(name) + 1):
        yield strip_compiled(_without_first(name, count))
    yield ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _wrapped_child(module: nn.Module) -> str | None:
    child = _child_of_wrapper(module)
    # A subclass with tensors or children of its own is a model, and no name is omitted.
    has_own = child is not None and (set(module._modules) != {child} or bool(module._parameters or module._buffers))
    return None if has_own else child


def _child_of_wrapper(module: nn.Module) -> str | None:
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return "module"
    # torch.compile's class is looked up only if it was imported, which takes a second.
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is not None and isinstance(module, eval_frame.OptimizedModule):
        return "_orig_mod"
    deepspeed = sys.modules.get("deepspeed.runtime.engine")
    if deepspeed is not None and isinstance(module, deepspeed.DeepSpeedEngine):
        return "module"
    checkpointing = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    if checkpointing is not None and isinstance(module, checkpointing.ActivationWrapper):
        return _CHECKPOINTED
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        return "_fsdp_wrapped_module"
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
    """Remove from a name the wrappers that `wrapped_prefixes` found."""
    if not wrapped:
        return name
    kept, path = [], ""
    for part in name.split("."):
        path += f"{part}."
        if path not in wrapped:
            kept.append(part)
    return ".".join(kept)


# Selection of tensor names, and comparison of a checkpoint's names with a model's.


KeySelection = Collection[str] | Callable[[str], bool] | str
"""The tensors to load: names or globs, or a function of the name."""

_SHOWN_KEYS: Final = 20


def select_keys(names: Iterable[str], keys: KeySelection) -> list[str]:
    """Select names, in their own order.

    Args:
        names: All names.
        keys: The selection.

    Raises:
        InvalidArgumentError: `keys` is something else.
        StateDictMismatchError: A name or glob matches nothing.
    """
    names = list(names)
    if callable(keys):
        return [name for name in names if keys(name)]
    given: Any = keys
    if isinstance(given, bytes) or not isinstance(given, Iterable) or not all(isinstance(one, str) for one in given):
        raise InvalidArgumentError(f"keys must be names, globs, or a function of the name, got {keys!r:.200}.")
    known = set(names)
    patterns = [keys] if isinstance(keys, str) else list(keys)
    found = {pattern: {pattern} if pattern in known else set(_matching(names, pattern)) for pattern in patterns}
    selected = set[str]().union(*found.values())
    empty = tuple(pattern for pattern in patterns if not found[pattern])
    if empty:
        raise StateDictMismatchError(
            f"The checkpoint has no tensor that matches {shorten_list(empty, _SHOWN_KEYS)}. "
            "To see the names, run: hfshard inspect --tensors DIR",
            missing_keys=empty,
        )
    return [name for name in names if name in selected]


def _matching(names: Iterable[str], glob: str) -> Iterator[str]:
    is_glob = any(
        sign in glob for sign in "*?["
    )  # thousands of exact names may be missing: they are not compared one by one
    return (name for name in names if fnmatchcase(name, glob)) if is_glob else iter(())


@dataclass(frozen=True, slots=True)
class KeyMismatch:
    """Differences between the names and shapes of a checkpoint and a model."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """(name, shape in the checkpoint, shape in the model)."""

    def raise_unless_allowed(self, *, strict: bool, path: str, matched: int) -> None:
        """Reject differences that are not allowed.

        Raises:
            StateDictMismatchError: A shape differs, no name matches, or `strict` and any name differs.
        """
        nothing = matched == 0 and bool(self.missing)
        if not (nothing or self.mismatched or (strict and (self.missing or self.unexpected))):
            return
        raise StateDictMismatchError(
            f"The checkpoint '{path}' does not fit the model: {self.summary()}. Nothing was loaded. "
            + ("Pass strict=False to load what fits, or " if strict and not (nothing or self.mismatched) else "Please ")
            + f"compare the names with: hfshard inspect --tensors {path}",
            path=path,
            missing_keys=self.missing,
            unexpected_keys=self.unexpected,
            mismatched_keys=self.mismatched,
        )

    def summary(self) -> str:
        """Describe all differences."""
        parts = []
        if self.missing:
            parts.append(f"{len(self.missing)} missing: {shorten_list(self.missing, _SHOWN_KEYS)}")
        if self.unexpected:
            parts.append(f"{len(self.unexpected)} unexpected: {shorten_list(self.unexpected, _SHOWN_KEYS)}")
        if self.mismatched:
            shown = [
                f"{name} {list(stored_shape)} in the checkpoint, {list(model_shape)} in the model"
                for name, stored_shape, model_shape in self.mismatched
            ]
            parts.append(f"{len(self.mismatched)} of another shape: {shorten_list(shown, _SHOWN_KEYS)}")
        return "; ".join(parts)


def compare_keys(state_dict: Mapping[str, torch.Tensor], model_state: Mapping[str, torch.Tensor]) -> KeyMismatch:
    """Compare the names and shapes of a checkpoint with those of a model."""
    return KeyMismatch(
        missing=tuple(name for name in model_state if name not in state_dict),
        unexpected=tuple(name for name in state_dict if name not in model_state),
        mismatched=tuple(
            (name, tuple(tensor.shape), tuple(model_state[name].shape))
            for name, tensor in state_dict.items()
            if isinstance(model_state.get(name), torch.Tensor) and tensor.shape != model_state[name].shape
        ),
    )
