"""Dotted names as a tree in columns, so that a page has each prefix once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hfshard.viewing.layers import natural_order, split_name
from hfshard.viewing.page.page import shown


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
