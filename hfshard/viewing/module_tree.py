"""A model's modules as a tree in which similar modules are folded, and its stacks of layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, get_args

_MOST_RANGES: Final = 8
"""The most ranges of numbers in a label; longer lists are cut."""
_MOST_LETTERS: Final = 40
"""The most characters of a label that joins the names of several modules."""


@dataclass(frozen=True, slots=True)
class FoldedModule:
    """A module, a tensor, or several numbered ones that contain the same names with the same marks."""

    label: str
    """The last part of its name: "self_attn", or "{0-11}" for several numbers."""
    numbers: tuple[int, ...]
    """The numbers in the label; empty if there are none."""
    marks: Counter[str]
    """The number of tensors of each mark, in and below it."""
    children: tuple[FoldedModule, ...]
    """In natural order; empty for a tensor."""
    names: tuple[str, ...]
    """The FQNs of a tensor, or of the tensors that are folded into one; empty for a module."""

    def tensors(self) -> Iterator[str]:
        """Yield the FQNs in and below it."""
        yield from self.names
        for child in self.children:
            yield from child.tensors()


class FoldedRow(NamedTuple):
    """One line of a table of modules."""

    path: str
    """A name in which "{0-11}" or "{query,value}" represents each of these; "" for the whole model."""
    modules: tuple[FoldedModule, ...]

    @property
    def marks(self) -> Counter[str]:
        """The number of tensors of each mark."""
        return sum((module.marks for module in self.modules), Counter())


def fold_names(marks: Mapping[str, str]) -> FoldedModule:
    """Build the tree of a model's modules, and fold similar ones.

    Takes time proportional to the number of names.

    Args:
        marks: FQN -> mark to distinguish: modules are similar if they have the same names with the same marks.

    Returns:
        The whole model.

    Example:
        >>> tree = fold_names({"h.0.weight": "same", "h.1.weight": "same", "h.2.weight": "changed"})
        >>> [(child.label, child.marks["same"]) for child in tree.children[0].children]
        [('{0-1}', 2), ('2', 0)]
    """
    return _fold("", grow_branches(marks), marks, {})[0]


def fold_rows(tree: FoldedModule, *, hidden: str, most: int) -> list[FoldedRow]:
    """Choose the modules of a table: as large as possible with one mark each, up to a number of rows.

    Args:
        tree: The whole model.
        hidden: A mark; rows with only this mark are left out.
        most: The most rows; to stay within it, modules with several marks remain one row.

    Returns:
        Rows in natural order; siblings with the same mark share a row if its label is short.
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
class Branch:
    """A module, a tensor, or both at once, in the tree of a model's names."""

    name: str | None = None
    """The tensor's FQN; None for a module alone."""
    parts: dict[str, Branch] = field(default_factory=dict)


def grow_branches(names: Iterable[str]) -> Branch:
    """Build the tree of names, and return its root."""
    root = Branch()
    for name in names:
        branch = root
        for part in split_name(name):
            following = branch.parts.get(part)
            if following is None:
                following = branch.parts[part] = Branch()
            branch = following
        branch.name = name
    return root


@dataclass(slots=True)
class _Row:
    """A row, and the rows that replace it."""

    row: FoldedRow
    parts: list[_Row] = field(default_factory=list)

    def flat(self) -> Iterator[FoldedRow]:
        if not self.parts:
            yield self.row
        for part in self.parts:
            yield from part.flat()


_Likeness = tuple[object, ...]
"""A key of a module's contents: its children's labels, and the numbers of their likenesses."""


def _fold(
    label: str, branch: Branch, marks: Mapping[str, str], known: dict[_Likeness, int]
) -> tuple[FoldedModule, int]:
    """Fold a module's contents; the returned number is the same for similar modules."""
    found: list[tuple[FoldedModule, int]] = []
    for part, below in branch.parts.items():
        if below.name is not None:
            mark = marks[below.name]
            likeness = known.setdefault((mark,), len(known))
            found.append((FoldedModule(part, _number_in(part), Counter({mark: 1}), (), (below.name,)), likeness))
    found += [_fold(part, below, marks, known) for part, below in branch.parts.items() if below.parts]
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
    """Merge modules with the same contents into one."""
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
        for mark, count in module.marks.items():  # `Counter.update` takes ten times as long for a few
            marks[mark] += count
    return marks


def _number_in(part: str) -> tuple[int, ...]:
    return (int(part),) if is_number(part) else ()


def _joined_label(alike: Sequence[FoldedModule]) -> str:
    """Join the labels of several modules as shells write alternatives."""
    if len(alike) == 1:
        return alike[0].label
    names = [module.label for module in alike if not module.numbers]
    numbers = number_ranges(number for module in alike for number in module.numbers)
    return f"{{{','.join(filter(None, [numbers, *names]))}}}"


def number_ranges(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: "0-3,8"; long lists are cut."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    texts = ["-".join(map(str, each)) for each in ranges]
    return ",".join(texts if len(texts) <= _MOST_RANGES else [*texts[: _MOST_RANGES - 1], "…"])


def _parts_of(row: FoldedRow, hidden: str) -> list[FoldedRow]:
    """List the rows that may replace a row; none if it should stay as it is."""
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
    """Descend while a module contains just one other module."""
    while len(module.children) == 1 and module.children[0].children:
        module = module.children[0]
        path = f"{path}.{module.label}"
    return FoldedRow(path, (module,))


# A model's layers, found in the names of its tensors: the stack, the layer, and the kind of tensor in it.


_MOST_PARTS: Final = 32
"""The most parts of a name; no model nests deeper, and the rest of a longer name stays one part."""
_MOST_DIGITS: Final = 9
"""The most digits of a layer's number; anything longer is a name."""


@dataclass(frozen=True, slots=True)
class LayerStack:
    """Layers that follow each other and are built alike, such as `model.layers.0`, `model.layers.1` ..."""

    name: str
    """The part before the number: "model.layers"; "" if a name begins with the number."""
    layers: tuple[int, ...]
    """The numbers that occur, ascending."""
    kinds: tuple[str, ...]
    """The parts after the number, in natural order: "self_attn.q_proj.weight". A "*" represents the numbers of similar
    modules, such as experts."""
    cells: dict[tuple[int, str], tuple[str, ...]]
    """(layer, kind) -> the names there; a layer may lack a kind."""


@dataclass(frozen=True, slots=True)
class LayerGrid:
    """All names of a model: layers x kinds, and the names outside layers."""

    stacks: tuple[LayerStack, ...]
    """In natural order of their names."""
    others: tuple[str, ...]
    """Embeddings, heads, norms ..., in natural order."""


def layer_grid(names: Iterable[str]) -> LayerGrid:
    """Find the stacks of layers in the names of a model's tensors.

    A layer is identified by a number in a name: the outermost one for which other numbers at the same place have a
    tensor of the same name below them. Takes time proportional to the number of names.

    Args:
        names: FQNs, in any order; any text is valid.

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


Role = Literal["attention", "MLP", "norms", "other"]
"""The part of a layer that a tensor belongs to."""

_MLP_WORDS: Final = frozenset(
    {"dense", "densereludense", "down", "expert", "experts", "fc", "fc1", "fc2", "ff", "gate", "intermediate"}
    | {"lin1", "lin2", "linear1", "linear2", "moe", "output", "router", "up", "w1", "w2", "w3", "wi", "wo"}
)
_STEPS: Final[tuple[frozenset[str], ...]] = (
    frozenset({"q", "query", "wq"}),
    frozenset({"k", "key", "wk"}),
    frozenset({"v", "value", "wv"}),
    frozenset({"gate", "router", "w1"}),
    frozenset({"fc", "fc1", "intermediate", "lin1", "linear1", "up", "w3", "wi"}),
    frozenset(),
    frozenset({"down", "fc2", "lin2", "linear2", "o", "out", "output", "w2", "wo"}),
)
"""Words of names, in the order in which a layer computes; the empty set is the place of names with none of them."""


def kinds_by_role(kinds: Iterable[str]) -> list[tuple[Role, tuple[str, ...]]]:
    """Sort kinds of tensors as a layer computes with them: query before key, up before down, a weight before its bias.

    Files usually have them in alphabetical order, so the order comes from the words in the names.

    Args:
        kinds: The kinds of a `LayerStack`.

    Returns:
        The roles that occur, attention first, with their kinds.

    Example:
        >>> kinds_by_role(["attn.k.weight", "attn.q.weight", "mlp.up.bias", "mlp.up.weight"])
        [('attention', ('attn.q.weight', 'attn.k.weight')), ('MLP', ('mlp.up.weight', 'mlp.up.bias'))]
    """
    found: dict[Role, list[str]] = {role: [] for role in get_args(Role)}
    for kind in sorted(kinds, key=_computing_order):
        found[_role(_words(kind))].append(kind)
    return [(role, tuple(members)) for role, members in found.items() if members]


def parts_of_model(names: Collection[str]) -> dict[str, str]:
    """Sort tensors into the parts of a model: embeddings, attention, MLP, norms, head, other.

    Args:
        names: FQNs. If one part of layers has them all, as of a LoRA adapter, they are sorted by a few modules.

    Returns:
        Name -> part, in the order in which a page lists the parts.

    Example:
        >>> parts_of_model(["h.0.q.weight", "h.1.q.weight", "wte.weight"])
        {'wte.weight': 'embeddings', 'h.0.q.weight': 'attention', 'h.1.q.weight': 'attention'}
    """
    grid = layer_grid(names)
    kind_of = {name: kind for stack in grid.stacks for (_, kind), members in stack.cells.items() for name in members}
    parts: dict[str, str] = {name: _role(_words(kind)) for name, kind in kind_of.items()}
    parts |= {name: _part_outside(name) for name in grid.others}
    modules = {name: kind.split(".lora_")[0].removesuffix(".weight") for name, kind in kind_of.items()}
    order = sorted(set(modules.values()), key=_computing_order)
    if len(set(parts.values())) > 1 or grid.others or len(order) > _MOST_MODULES:
        modules, order = parts, list(_PARTS)
    return dict(sorted(modules.items(), key=lambda one: order.index(one[1])))


_PARTS: Final = ("embeddings", *get_args(Role)[:-1], "head", "other")
HEADS: Final = frozenset(
    {"classification_head", "classifier", "cls", "embed_out", "fc", "head", "heads", "lm_head", "logits"}
    | {"output_projection", "qa_outputs", "score"}
)
"""Names that architectures use for the task-specific part."""
_MOST_MODULES: Final = 9
"""The most modules of a layer that are told apart: a page has as many colors."""
_EMBEDDINGS: Final = ("emb", "tok", "wpe", "wte")
"""How words in the names of embeddings begin."""


def _part_outside(name: str) -> str:
    """Return the part of a tensor outside the layers."""
    words = _words(name)
    if _role(words) == "norms":
        return "norms"
    if not HEADS.isdisjoint(split_name(name)):
        return "head"
    return "embeddings" if any(word.startswith(_EMBEDDINGS) for word in words) else "other"


def _words(kind: str) -> set[str]:
    return set(re.findall(r"[a-z]+[0-9]*", kind.lower()))


def _role(words: set[str]) -> Role:
    if any("norm" in word or word.rstrip("0123456789") in ("ln", "rms") for word in words):
        return "norms"
    is_attention = any("attn" in word or "attention" in word for word in words)
    if is_attention or not words.isdisjoint(_STEPS[0] | _STEPS[1] | _STEPS[2] | {"qkv"}):
        return "attention"
    is_mlp = any("mlp" in word or "ffn" in word or "feed" in word for word in words)
    return "MLP" if is_mlp or not words.isdisjoint(_MLP_WORDS) else "other"


def _computing_order(kind: str) -> tuple[object, ...]:
    words = _words(kind)
    is_cross = any("cross" in word or "encdec" in word or word == "encoder" for word in words)
    known = () if _role(words) == "norms" else enumerate(_STEPS)
    step = next((at for at, some in known if words & some), _STEPS.index(frozenset()))
    module, _, tensor = kind.rpartition(".")
    return is_cross, step, natural_order(module), tensor != "weight", natural_order(tensor)


def split_name(name: str) -> list[str]:
    """Split an FQN at its dots, into a bounded number of parts."""
    return name.split(".", _MOST_PARTS - 1)


def common_length(one: Sequence[str], other: Sequence[str]) -> int:
    """Count the first parts, or the first characters of two texts, that are the same."""
    differing = (at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return next(differing, min(len(one), len(other)))


def is_number(part: str) -> bool:
    """Return whether a part of a name is the number of a module in a list, as Python writes it."""
    is_short = part.isascii() and part.isdigit() and len(part) <= _MOST_DIGITS
    return is_short and (part == "0" or not part.startswith("0"))


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return the sort key of natural order: "layer.2" before "layer.10"."""
    pieces = re.findall(r"([0-9]+)|([^0-9]+)", name)
    return [(len(digits.lstrip("0")) + 1, digits.lstrip("0")) if digits else (0, text) for digits, text in pieces]


@dataclass(slots=True)
class _Place:
    """The numbers that occur at one place in names, and what follows them."""

    numbers: set[str]
    suffixes: set[str]
    pairs: set[tuple[str, str]]

    @property
    def is_stack(self) -> bool:
        """True if two of the numbers have a tensor of the same name."""
        return len(self.pairs) > len(self.suffixes)

    @property
    def is_alike(self) -> bool:
        """True if all numbers have the same tensors."""
        return len(self.numbers) > 1 and len(self.pairs) == len(self.numbers) * len(self.suffixes)


def _places(every: list[list[str]]) -> dict[str, _Place]:
    """Find all places where numbers occur, by what comes before them."""
    places: dict[str, _Place] = {}
    for parts in every:
        for position in _numbers(parts):
            place = places.setdefault(_place(parts, position), _Place(set(), set(), set()))
            suffix = without_numbers(parts[position + 1 :])
            place.numbers.add(parts[position])
            place.suffixes.add(suffix)
            place.pairs.add((parts[position], suffix))
    return places


def _numbers(parts: list[str]) -> list[int]:
    """List the positions of module numbers; a number at the end is a tensor's."""
    return [position for position, part in enumerate(parts[:-1]) if is_number(part)]


def _place(parts: list[str], position: int) -> str:
    return without_numbers(parts[:position])


def without_numbers(parts: Sequence[str]) -> str:
    """Join the parts of a name, with a "*" for each number."""
    return ".".join("*" if is_number(part) else part for part in parts)


def _kind(parts: list[str], layer: int, places: dict[str, _Place]) -> str:
    """Return a tensor's kind in its layer; numbers of similar modules become "*"."""
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
