"""Dotted names as a tree in columns, so that a page has each prefix once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from hfshard.viewing.layers import natural_order, split_name
from hfshard.viewing.page.page import shown

_MOST_CHARACTERS: Final = 2_500_000
"""Of all labels of a page, as they are coded. What has more is no model's: each label is cut to its share."""
_SHORTEST_SHARE: Final = 20


@dataclass(frozen=True, slots=True)
class NameTree:
    """The nodes of a tree of modules, each before what is in it, siblings in natural order; the root is the first.

    A module with nothing but one other module or tensor in it is one node with that: "encoder.layer", "lm_head.weight".
    """

    labels: list[str]
    """Every label that a node has, once, made fit to be shown."""
    label: list[int]
    """Of each node: where its label stands in `labels`."""
    depth: list[int]
    """Of each node: how many are above it."""
    node_of: dict[str, int]
    """Name -> its node, which may have others below it."""


def coded_labels(labels: Sequence[str]) -> list[int | str]:
    """Write labels so that each has only what the one before it does not begin with.

    Returns:
        Of each label two entries: how many characters (UTF-16) it has in common with the one before, and the rest.
    """
    coded = _coded(labels)
    if sum(len(rest) for rest in coded[1::2] if isinstance(rest, str)) <= _MOST_CHARACTERS:
        return coded
    most = max(_SHORTEST_SHARE, _MOST_CHARACTERS // len(labels))
    return _coded([label if len(label) <= most else f"{label[:most]}…" for label in labels])


def _coded(labels: Sequence[str]) -> list[int | str]:
    coded: list[int | str] = []
    for before, label in pairwise(("", *labels)):
        common = _common(before, label) if before.isascii() and label.isascii() else 0
        coded += (common, label[common:])
    return coded


def _common(one: str, other: str) -> int:
    differing = (at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return next(differing, min(len(one), len(other)))


@dataclass(slots=True)
class _Branch:
    """A node while the tree is built."""

    name: str | None = None
    """The whole name that ends here."""
    parts: dict[str, _Branch] = field(default_factory=dict)


def make_name_tree(names: Iterable[str]) -> NameTree:
    """Make the tree of these names, in time that is linear but for sorting siblings."""
    root = _Branch()
    for name in names:
        branch = root
        for part in split_name(name):
            following = branch.parts.get(part)
            if following is None:
                following = branch.parts[part] = _Branch()
            branch = following
        branch.name = name
    return _in_columns(root)


def _in_columns(root: _Branch) -> NameTree:
    tree = NameTree([], [], [], {})
    places: dict[str, int] = {}
    stack = [("", root, 0)]
    while stack:
        label, branch, depth = stack.pop()
        while branch is not root and branch.name is None and len(branch.parts) == 1:
            ((part, only),) = branch.parts.items()
            label = f"{label}.{part}"
            branch = only
        if branch.name is not None:
            tree.node_of[branch.name] = len(tree.label)
        tree.label.append(places.setdefault(label, len(places)))
        tree.depth.append(depth)
        below = sorted(branch.parts, key=natural_order, reverse=True)
        stack += [(part, branch.parts[part], depth + 1) for part in below]
    tree.labels.extend(map(shown, places))
    return tree
