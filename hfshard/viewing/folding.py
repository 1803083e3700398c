"""The modules of a model as a tree in which those that are alike are one, to show much in few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from hfshard.viewing.layers import is_number, natural_order, split_name

_MOST_RANGES: Final = 8
"""Of numbers in a label; more are cut short."""
_MOST_LETTERS: Final = 40
"""Of a label that joins the names of several modules."""


@dataclass(frozen=True, slots=True)
class FoldedModule:
    """A module, a tensor, or several numbered ones that hold the same names with the same marks."""

    label: str
    """The last part of its name: "self_attn", or "{0-11}" for several numbers."""
    numbers: tuple[int, ...]
    """Those of the label; empty where it is no number."""
    marks: Counter[str]
    """How many tensors there are of each mark, in and below it."""
    children: tuple[FoldedModule, ...]
    """In natural order; empty for a tensor."""
    names: tuple[str, ...]
    """The FQNs of a tensor, or of those that are folded into one; empty for a module."""

    def tensors(self) -> Iterator[str]:
        """The FQNs in and below it."""
        yield from self.names
        for child in self.children:
            yield from child.tensors()


class FoldedRow(NamedTuple):
    """One line of a table of modules."""

    path: str
    """A name in which "{0-11}" or "{query,value}" stands for each of these; "" for the whole model."""
    modules: tuple[FoldedModule, ...]

    @property
    def marks(self) -> Counter[str]:
        """How many tensors there are of each mark."""
        return sum((module.marks for module in self.modules), Counter())


def fold_names(marks: Mapping[str, str]) -> FoldedModule:
    """Make the tree of the modules of a model, and fold those that are alike.

    Args:
        marks: FQN -> what is to be told apart: modules are alike if they have the same names, with the same marks.

    Returns:
        The whole model; it takes time in proportion to the names.

    Example:
        >>> tree = fold_names({"h.0.weight": "same", "h.1.weight": "same", "h.2.weight": "changed"})
        >>> [(child.label, child.marks["same"]) for child in tree.children[0].children]
        [('{0-1}', 2), ('2', 0)]
    """
    root = _Node()
    for name, mark in marks.items():
        *modules, tensor = split_name(name)
        node = root
        for part in modules:
            node = node.modules.setdefault(part, _Node())
        node.tensors[tensor] = (name, mark)
    return _fold("", root, {})[0]


def fold_rows(tree: FoldedModule, *, hidden: str, most: int) -> list[FoldedRow]:
    """Choose the modules of a table: as large as each has one mark only, and not more of them than asked for.

    Args:
        tree: The whole model.
        hidden: A mark; rows of nothing else are left out.
        most: How many rows there may be; to keep to it, modules with several marks stay one row.

    Returns:
        In natural order; siblings with the same mark share a row where that is short.
    """
    root = _Row(FoldedRow("", (tree,)))
    shown = 1
    level = [root]
    while level:
        opened: list[_Row] = []
        for row in level:
            rows = _parts_of(row.row, hidden)
            more = sum(set(part.marks) != {hidden} for part in rows) - 1
            if rows and shown + more <= most:
                row.parts = [_Row(part) for part in rows]
                shown += more
                opened += [part for part in row.parts if len(part.row.marks) > 1]
        level = opened
    return [row for row in root.flat() if set(row.marks) != {hidden}]


@dataclass(slots=True)
class _Node:
    """A module; a name may be both a tensor's and a module's."""

    modules: dict[str, _Node] = field(default_factory=dict)
    tensors: dict[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(slots=True)
class _Row:
    """A row, and those that replace it."""

    row: FoldedRow
    parts: list[_Row] = field(default_factory=list)

    def flat(self) -> Iterator[FoldedRow]:
        if not self.parts:
            yield self.row
        for part in self.parts:
            yield from part.flat()


_Likeness = tuple[object, ...]
"""Of what a module holds: its children's labels, and the numbers of their likenesses."""


def _fold(label: str, node: _Node, known: dict[_Likeness, int]) -> tuple[FoldedModule, int]:
    """Fold what is in a module; the number is the same for modules that are alike."""
    found: list[tuple[FoldedModule, int]] = []
    for part, (name, mark) in node.tensors.items():
        likeness = known.setdefault((mark,), len(known))
        found.append((FoldedModule(part, _number_in(part), Counter({mark: 1}), (), (name,)), likeness))
    found += [_fold(part, module, known) for part, module in node.modules.items()]
    groups: dict[tuple[str | None, int], list[FoldedModule]] = {}
    for child, likeness in found:
        groups.setdefault((None if child.numbers else child.label, likeness), []).append(child)
    children = [(_merge(_joined_label(alike), alike), likeness) for (_, likeness), alike in groups.items()]
    if len(children) > 1:
        children.sort(key=lambda pair: (natural_order(pair[0].label.lstrip("{")), pair[1]))
    key = tuple((child.numbers or child.label, likeness) for child, likeness in children)
    modules = tuple(child for child, _ in children)
    folded = FoldedModule(label, _number_in(label), _sum(modules), modules, ())
    return folded, known.setdefault(("module", key), len(known))


def _merge(label: str, alike: Sequence[FoldedModule]) -> FoldedModule:
    """Make one of several modules that hold the same."""
    if len(alike) == 1:
        return alike[0]
    children = zip(*(module.children for module in alike), strict=True)
    return FoldedModule(
        label,
        tuple(sorted(number for module in alike for number in module.numbers)),
        _sum(alike),
        tuple(_merge(parts[0].label, parts) for parts in children),
        tuple(name for module in alike for name in module.names),
    )


def _sum(modules: Sequence[FoldedModule]) -> Counter[str]:
    marks: Counter[str] = Counter()
    for module in modules:
        for mark, count in module.marks.items():  # `Counter.update` takes ten times as long for so few
            marks[mark] += count
    return marks


def _number_in(part: str) -> tuple[int, ...]:
    return (int(part),) if is_number(part) else ()


def _joined_label(alike: Sequence[FoldedModule]) -> str:
    """One label for several modules, as shells write alternatives."""
    if len(alike) == 1:
        return alike[0].label
    names = [module.label for module in alike if not module.numbers]
    numbers = number_ranges(number for module in alike for number in module.numbers)
    return f"{{{','.join(filter(None, [numbers, *names]))}}}"


def number_ranges(numbers: Iterable[int]) -> str:
    """Write numbers as ranges: "0-3,8"; many ranges are cut short."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    texts = ["-".join(map(str, each)) for each in ranges]
    return ",".join(texts if len(texts) <= _MOST_RANGES else [*texts[: _MOST_RANGES - 1], "…"])


def _parts_of(row: FoldedRow, hidden: str) -> list[FoldedRow]:
    """The rows that may replace one; none where it is best as it is."""
    if len(row.modules) > 1:
        return []
    groups: dict[object, list[FoldedModule]] = {}
    for child in row.modules[0].children:
        is_one = len(child.marks) == 1
        groups.setdefault((bool(child.children), *child.marks) if is_one else id(child), []).append(child)
    rows = []
    for alike in groups.values():
        label = _joined_label(alike)
        is_short = len(label) <= _MOST_LETTERS or set(alike[0].marks) == {hidden}
        if len(alike) > 1 and is_short and row.path:
            rows.append(FoldedRow(_joined(row.path, label), tuple(alike)))
        else:
            rows += [_without_single_steps(_joined(row.path, module.label), module) for module in alike]
    return rows


def _joined(path: str, label: str) -> str:
    return f"{path}.{label}" if path else label


def _without_single_steps(path: str, module: FoldedModule) -> FoldedRow:
    """Go down where a module holds one other module and nothing else."""
    while len(module.children) == 1 and module.children[0].children:
        module = module.children[0]
        path = f"{path}.{module.label}"
    return FoldedRow(path, (module,))
