"""A model and its named tensors: collect them without wrappers' prefixes, match foreign names, assign."""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from hfshard._util.text import list_some
from hfshard.errors import StateDictMismatchError

KeySelection = Collection[str] | Callable[[str], bool] | str
"""Which keys to load: names or globs, or a function of the name."""

_WRAPPERS = frozenset(("module", "_orig_mod"))
"""The children in which DataParallel, DistributedDataParallel and torch.compile keep what they wrap."""
_COMPILED = re.compile(r"(?:^|(?<=\.))_orig_mod\.")

_SHOWN_KEYS = 20


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DataParallel, DistributedDataParallel and torch.compile, in any nesting."""
    while (child := _wrapped_child(model)) is not None:
        model = getattr(model, child)
    return model


def collect_state_dict(model: nn.Module) -> dict[str, Any]:
    """The model's state dict, with the prefixes of wrappers removed, by the wrappers themselves and never by name.

    A child that is honestly called `module` keeps its name. The tensors are the model's own, not copies.
    """
    model = unwrap(model)
    state_dict = model.state_dict()
    wrapped = _wrapped_prefixes(model)
    return {_without_wrappers(name, wrapped): value for name, value in state_dict.items()}


def parameter_names(model: nn.Module) -> dict[int, str]:
    """The id of each parameter -> its name without the prefixes of wrappers; of tied names the first one, sorted."""
    model = unwrap(model)
    wrapped = _wrapped_prefixes(model)
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        short = _without_wrappers(name, wrapped)
        names[id(parameter)] = min(short, names.get(id(parameter), short))
    return names


def match_prefixes(names: Iterable[str], expected: Collection[str]) -> dict[str, str]:
    """Strip `module.` and `_orig_mod.` from a file's names where, and only where, that makes them the model's.

    A wrapper around the model is on every name: as many are taken off all of them as makes the most names fit, so that
    a child that is honestly called `module` keeps its own. What then does not fit may come out of a wrapped child.

    Args:
        names: The names in the file.
        expected: The model's names.

    Returns:
        Name in the file -> name for the model, each another one.
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


def strip_wrappers(name: str) -> str:
    """A name without all that wrappers around the model and torch.compile put into it."""
    return strip_compiled(_without_first(name, _wrappers_before(name)))


def strip_compiled(name: str) -> str:
    """A name without what torch.compile puts into it."""
    return _COMPILED.sub("", name)


def _wrappers_before(name: str) -> int:
    parts = name.split(".")
    return next((number for number, part in enumerate(parts) if part not in _WRAPPERS), len(parts) - 1)


def _without_first(name: str, count: int) -> str:
    return name.split(".", count)[-1]


def _unwrapped_forms(name: str) -> Iterator[str]:
    """What a name can have been inside wrapped modules, the likeliest first."""
    for count in range(_wrappers_before(name) + 1):
        yield strip_compiled(_without_first(name, count))
    yield ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def has_wrapper_prefix(names: Iterable[str]) -> bool:
    """Whether any name has a part that could be a wrapper's."""
    return any("mod" in name and not _WRAPPERS.isdisjoint(name.split(".")) for name in names)


def select_keys(names: Iterable[str], keys: KeySelection | None) -> list[str]:
    """The names that were asked for, in their own order.

    Raises:
        StateDictMismatchError: A name or glob that matches nothing.
    """
    names = list(names)
    if keys is None:
        return names
    if callable(keys):
        return [name for name in names if keys(name)]
    known, patterns = set(names), [keys] if isinstance(keys, str) else list(keys)
    found = {pattern: {pattern} if pattern in known else set(_matching(names, pattern)) for pattern in patterns}
    chosen = set[str]().union(*found.values())
    empty = tuple(pattern for pattern in patterns if not found[pattern])
    if empty:
        raise StateDictMismatchError(
            f"The checkpoint has no tensor that matches {list_some(empty, _SHOWN_KEYS)}. "
            "To see the names, run: hfshard inspect --tensors DIR",
            missing_keys=empty,
        )
    return [name for name in names if name in chosen]


def _matching(names: Iterable[str], glob: str) -> Iterator[str]:
    is_glob = any(sign in glob for sign in "*?[")  # of thousands of exact names that are not there, none is a glob
    return (name for name in names if fnmatchcase(name, glob)) if is_glob else iter(())


@dataclass(frozen=True, slots=True)
class KeyMismatch:
    """How a checkpoint and a model differ."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """(name, shape in the checkpoint, shape in the model)."""

    def raise_unless_allowed(self, *, strict: bool, path: str, matched: int) -> None:
        """Refuse what may not be assigned.

        Raises:
            StateDictMismatchError: strict and anything differs; else: a shape differs, or no key was found.
        """
        nothing = matched == 0 and bool(self.missing)
        if not (nothing or self.mismatched or (strict and (self.missing or self.unexpected))):
            return
        raise StateDictMismatchError(
            f"The checkpoint '{path}' does not fit the model, and nothing was loaded: {self.summary()}. "
            + ("Pass strict=False to load what fits, or " if strict and not (nothing or self.mismatched) else "Please ")
            + f"compare the names with: hfshard inspect --tensors {path}",
            path=path,
            missing_keys=self.missing,
            unexpected_keys=self.unexpected,
            mismatched_keys=self.mismatched,
        )

    def summary(self) -> str:
        """All of it in words."""
        parts = []
        if self.missing:
            parts.append(f"{len(self.missing)} missing: {list_some(self.missing, _SHOWN_KEYS)}")
        if self.unexpected:
            parts.append(f"{len(self.unexpected)} unexpected: {list_some(self.unexpected, _SHOWN_KEYS)}")
        if self.mismatched:
            shown = [
                f"{name} {list(theirs)} in the checkpoint, {list(mine)} in the model"
                for name, theirs, mine in self.mismatched
            ]
            parts.append(f"{len(self.mismatched)} of another shape: {list_some(shown, _SHOWN_KEYS)}")
        return "; ".join(parts)


def compare(state_dict: Mapping[str, torch.Tensor], model_state: Mapping[str, torch.Tensor]) -> KeyMismatch:
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


def assign(model: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Load tensors into the model by its own `load_state_dict`, in place of its meta tensors; other names are ignored.

    Tied parameters stay tied, values are cast to the parameter's dtype and moved to its device, and what a module does
    in its hooks, its `_load_from_state_dict` or its `set_extra_state` is done.

    Args:
        model: Unwrapped; changed.
        state_dict: By the names that `collect_state_dict` gives.
    """
    own, wrapped = model.state_dict(), _wrapped_prefixes(model)
    given = {name: state_dict[short] for name in own if (short := _without_wrappers(name, wrapped)) in state_dict}
    meta = {name: given[name] for name in given if getattr(own[name], "is_meta", False)}
    filled = {name: given[name] for name in given if name not in meta}
    for part, is_meta in ((filled, False), (_as_parameters(model, meta), True)):
        if part:
            _load_tensors(model, part, getattr(own, "_metadata", None) or {}, assign=is_meta)


def _load_tensors(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, dict[str, Any]], *, assign: bool
) -> None:
    """`model.load_state_dict(tensors, strict=False, assign=assign)`, in time that grows as the number of names.

    torch's looks at all names below a module once for each of its children: a list of 10,000 experts takes 6 s.

    Args:
        model: Changed.
        tensors: By the names of its own state dict.
        metadata: That state dict's: what its modules said of their versions.
        assign: As in `load_state_dict`.
    """
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        versioned = OrderedDict(tensors)
        versioned._metadata = metadata  # type: ignore[attr-defined]
        model.load_state_dict(versioned, strict=False, assign=assign)
        return
    differing = _IncompatibleKeys([], [])
    errors: list[str] = []

    def load(module: nn.Module, below: dict[str, torch.Tensor], prefix: str) -> None:
        local_metadata = dict(metadata.get(prefix[:-1], {})) | ({"assign_to_params_buffers": True} if assign else {})
        module._load_from_state_dict(below, prefix, local_metadata, True, *differing, errors)
        parts = _by_child(below, prefix, module._modules)
        for name, child in module._modules.items():
            if child is not None:
                load(child, parts[name], f"{prefix}{name}.")
        for hook in module._load_state_dict_post_hooks.values():
            hook(module, differing)

    load(model, dict(tensors), "")
    if errors:
        raise RuntimeError("\n\t".join([f"Error(s) in loading state_dict for {type(model).__name__}:", *errors]))


def _by_child(
    tensors: Mapping[str, torch.Tensor], prefix: str, children: Iterable[str]
) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors below each child of the module that has this prefix."""
    parts: dict[str, dict[str, torch.Tensor]] = {child: {} for child in children}
    dotted = [child for child in parts if "." in child]  # `setattr` takes such a name
    for name, tensor in tensors.items():
        child, dot, _ = name.removeprefix(prefix).partition(".")
        if dot and child in parts and name.startswith(prefix):
            parts[child][name] = tensor
        for child in dotted:
            if name.startswith(f"{prefix}{child}."):
                parts[child][name] = tensor
    return parts


def _as_parameters(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that take the places of meta parameters: of their dtype, and one for all names that were tied."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    made: dict[int, torch.Tensor] = {}
    result = dict(tensors)
    for name in tensors.keys() & parameters.keys():
        old = parameters[name]
        if id(old) not in made:
            made[id(old)] = nn.Parameter(tensors[name].to(old.dtype), requires_grad=old.requires_grad)
        result[name] = made[id(old)]
    return result


def _wrapped_child(module: nn.Module) -> str | None:
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return "module"
    # torch.compile's class is looked up only where it can exist: importing it takes a second.
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is not None and isinstance(module, eval_frame.OptimizedModule):
        return "_orig_mod"
    return None


def _wrapped_prefixes(model: nn.Module) -> set[str]:
    """Where in the model's names the wrappers of its children put theirs: "encoder._orig_mod."."""
    return {
        (f"{path}." if path else "") + child + "."
        for path, module in model.named_modules()
        if (child := _wrapped_child(module)) is not None
    }


def _without_wrappers(name: str, wrapped: set[str]) -> str:
    if not wrapped:
        return name
    kept, path = [], ""
    for part in name.split("."):
        path += f"{part}."
        if path not in wrapped:
            kept.append(part)
    return ".".join(kept)
