"""Which part of a model some tensors are, in a few words: "query and value of all 6 layers"."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from hfshard.viewing.folding import fold_names, fold_rows, number_ranges
from hfshard.viewing.layers import LayerStack, layer_grid

_MOST_KINDS: Final = 4
"""Kinds of tensors in a layer that are named."""
_MOST_PLACES: Final = 3
"""Modules beside the layers that are named."""
_MOST_LETTERS: Final = 40
"""Of one name; the middle of a longer one is left out."""


def describe_tensors(chosen: Collection[str], every: Iterable[str], *, names_kinds: bool = False) -> str:
    """Say which part of a model some of its tensors are.

    Args:
        chosen: FQNs of tensors; at least one.
        every: All tensors of the model, these included.
        names_kinds: Whether kinds of tensors are named where all of them are chosen, too.

    Example:
        >>> every = [f"h.{layer}.{kind}.weight" for layer in range(6) for kind in "qkv"]
        >>> describe_tensors({name for name in every if "q" in name}, every)
        'q of all 6 layers'
    """
    chosen = set(chosen)
    grid = layer_grid(every)
    texts = []
    for stack in grid.stacks:
        text = _in_stack(stack, chosen, names_kinds)
        if text:
            texts.append(f"{text} of {short_name(stack.name)}" if stack.name and len(grid.stacks) > 1 else text)
    if not chosen.isdisjoint(grid.others):
        texts.append(_in_others(chosen, grid.others))
    return join_words(texts)


def join_words(words: Sequence[str]) -> str:
    """Join words as in a sentence: "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def short_name(name: str) -> str:
    """Leave out the middle of a name that is too long for a sentence."""
    if len(name) <= _MOST_LETTERS:
        return name
    return f"{name[: _MOST_LETTERS // 2]}…{name[-_MOST_LETTERS // 2 + 1 :]}"


def _in_stack(stack: LayerStack, chosen: set[str], names_kinds: bool) -> str:
    """The layers, and what in them; "" where none is chosen."""
    whole = {cell for cell, names in stack.cells.items() if chosen.issuperset(names)}
    partly = {cell for cell, names in stack.cells.items() if not chosen.isdisjoint(names)}
    if not partly:
        return ""
    layers = {layer for layer, _ in partly}
    kinds = {kind for _, kind in partly}
    where = _layers_text(layers, stack)
    if whole != {(layer, kind) for layer, kind in stack.cells if layer in layers and kind in kinds}:
        return f"parts of {where}"
    in_layers = {kind for layer, kind in stack.cells if layer in layers}
    return f"{_kinds_text(kinds, stack)} of {where}" if names_kinds or kinds != in_layers else where


def _layers_text(layers: set[int], stack: LayerStack) -> str:
    if len(layers) == len(stack.layers):
        return f"all {len(layers)} layers"
    return f"layer{'s' if len(layers) > 1 else ''} {number_ranges(layers)} of {len(stack.layers)}"


def _kinds_text(kinds: set[str], stack: LayerStack) -> str:
    """The modules that are chosen as a whole, and the tensors of others; each by as little of its name as tells it."""
    tensors: dict[str, set[str]] = {}
    for kind in stack.kinds:
        tensors.setdefault(kind.rpartition(".")[0] or kind, set()).add(kind)
    chosen: list[str] = []
    for module, held in tensors.items():
        if held <= kinds:
            chosen.append(_short_among(module, tensors))
        else:
            tail = (kind.removeprefix(module) for kind in stack.kinds if kind in held & kinds)
            chosen += [_short_among(module, tensors) + tensor for tensor in tail]
    if len(chosen) > _MOST_KINDS:
        return f"{len(kinds)} of {len(stack.kinds)} tensors"
    return join_words([short_name(name) for name in chosen])


def _short_among(module: str, modules: Collection[str]) -> str:
    """The last parts of a module's name, as many as no other of the modules ends with."""
    parts = module.split(".")
    for count in range(1, len(parts)):
        tail = ".".join(parts[-count:])
        if sum(f".{other}".endswith(f".{tail}") for other in modules) == 1:
            return tail
    return module


def _in_others(chosen: set[str], others: Sequence[str]) -> str:
    tree = fold_names({name: "chosen" if name in chosen else "" for name in others})
    rows = fold_rows(tree, hidden="", most=_MOST_PLACES)
    if any(set(row.marks) != {"chosen"} for row in rows):
        count = sum(row.marks["chosen"] for row in rows)
        return f"{count} of {len(others)} tensors beside the layers"
    return join_words([short_name(row.path) for row in rows])
