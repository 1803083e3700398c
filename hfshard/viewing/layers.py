"""The layers of a model, found in the names of its tensors: which layer of which stack, and what it is in there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_MOST_PARTS: Final = 32
"""Parts of a name that are told apart; no model nests deeper, and the rest of a longer name stays one part."""
_MOST_DIGITS: Final = 9
"""Of the number of a layer; what is longer is a name."""


@dataclass(frozen=True, slots=True)
class LayerStack:
    """Layers that follow each other and are built alike, such as `model.layers.0`, `model.layers.1` ..."""

    name: str
    """What comes before the number: "model.layers"; "" where a name begins with the number."""
    layers: tuple[int, ...]
    """The numbers that occur, ascending."""
    kinds: tuple[str, ...]
    """What comes after the number, in natural order: "self_attn.q_proj.weight". A "*" stands for the numbers of modules
    that are alike, such as experts."""
    cells: dict[tuple[int, str], tuple[str, ...]]
    """(layer, kind) -> the names there; a layer may lack a kind."""


@dataclass(frozen=True, slots=True)
class LayerGrid:
    """All names of a model: layers x kinds, and what lies in no layer."""

    stacks: tuple[LayerStack, ...]
    """In natural order of their names."""
    others: tuple[str, ...]
    """Embeddings, heads, norms ..., in natural order."""


def layer_grid(names: Iterable[str]) -> LayerGrid:
    """Find the stacks of layers in the names of a model's tensors.

    A layer is told by a number in a name: the outermost one beside which the same place has other numbers with a tensor
    of the same name below. It takes time in proportion to the names.

    Args:
        names: FQNs, in any order. Any text may be one.

    Returns:
        Each name once, in a cell of a stack or in `others`.

    Example:
        >>> grid = layer_grid(["embed.weight", "h.0.attn.weight", "h.1.attn.weight"])
        >>> grid.stacks[0].name, grid.stacks[0].layers, grid.stacks[0].kinds, grid.others
        ('h', (0, 1), ('attn.weight',), ('embed.weight',))
    """
    every = [split_name(name) for name in names]
    places = _places(every)
    cells: dict[str, dict[tuple[int, str], list[str]]] = {}
    others = []
    for parts in every:
        position = next((at for at in _numbers(parts) if places[_place(parts, at)].is_stack), None)
        if position is None:
            others.append(".".join(parts))
            continue
        cell = (int(parts[position]), _kind(parts, position, places))
        cells.setdefault(".".join(parts[:position]), {}).setdefault(cell, []).append(".".join(parts))
    stacks = [_stack(name, cells[name]) for name in sorted(cells, key=natural_order)]
    return LayerGrid(tuple(stacks), tuple(sorted(others, key=natural_order)))


def split_name(name: str) -> list[str]:
    """Split an FQN at its dots, into a bounded number of parts."""
    return name.split(".", _MOST_PARTS - 1)


def is_number(part: str) -> bool:
    """Whether a part of a name is the number of a module in a list, as Python writes it."""
    is_short = part.isascii() and part.isdigit() and len(part) <= _MOST_DIGITS
    return is_short and (part == "0" or not part.startswith("0"))


def natural_order(name: str) -> list[tuple[int, str]]:
    """The key by which people sort names: "layer.2" before "layer.10"."""
    pieces = re.findall(r"([0-9]+)|([^0-9]+)", name)
    return [(len(digits.lstrip("0")) + 1, digits.lstrip("0")) if digits else (0, text) for digits, text in pieces]


@dataclass(slots=True)
class _Place:
    """The numbers that occur at one place of names, and what follows them."""

    numbers: set[str]
    suffixes: set[str]
    pairs: set[tuple[str, str]]

    @property
    def is_stack(self) -> bool:
        """Whether two of the numbers have a tensor of the same name."""
        return len(self.pairs) > len(self.suffixes)

    @property
    def is_alike(self) -> bool:
        """Whether all numbers have the same tensors."""
        return len(self.numbers) > 1 and len(self.pairs) == len(self.numbers) * len(self.suffixes)


def _places(every: list[list[str]]) -> dict[str, _Place]:
    """All places where numbers occur, by what comes before them."""
    places: dict[str, _Place] = {}
    for parts in every:
        for position in _numbers(parts):
            place = places.setdefault(_place(parts, position), _Place(set(), set(), set()))
            suffix = _wild(parts[position + 1 :])
            place.numbers.add(parts[position])
            place.suffixes.add(suffix)
            place.pairs.add((parts[position], suffix))
    return places


def _numbers(parts: list[str]) -> list[int]:
    """Positions of the numbers of modules; a number at the end is a tensor's."""
    return [position for position, part in enumerate(parts[:-1]) if is_number(part)]


def _place(parts: list[str], position: int) -> str:
    return _wild(parts[:position])


def _wild(parts: list[str]) -> str:
    return ".".join("*" if is_number(part) else part for part in parts)


def _kind(parts: list[str], layer: int, places: dict[str, _Place]) -> str:
    """What a tensor is in its layer: numbers of modules that are alike become "*"."""
    kind = []
    numbers = _numbers(parts)
    for position in range(layer + 1, len(parts)):
        folds = position in numbers and places[_place(parts, position)].is_alike
        kind.append("*" if folds else parts[position])
    return ".".join(kind)


def _stack(name: str, cells: dict[tuple[int, str], list[str]]) -> LayerStack:
    layers = sorted({layer for layer, _ in cells})
    kinds = sorted({kind for _, kind in cells}, key=natural_order)
    in_order = {cell: tuple(sorted(names, key=natural_order)) for cell, names in sorted(cells.items())}
    return LayerStack(name, tuple(layers), tuple(kinds), in_order)
