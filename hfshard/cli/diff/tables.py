"""The tables of `hfshard diff`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from hfshard._util.text import format_size, list_some
from hfshard.cli.output import count_of, printable, shortened, table
from hfshard.viewing.diff.renames import rename_rules
from hfshard.viewing.diff.report import CheckpointDiff, TensorDiff
from hfshard.viewing.folding import FoldedRow, fold_names, fold_rows
from hfshard.viewing.layers import natural_order
from hfshard.viewing.tensor_entry import TensorEntry

_MOST_ROWS: Final = 30
"""Of a table of modules: about what a terminal shows at once."""
_MOST_RULES: Final = 8
_MOST_DTYPES: Final = 4
_SAME: Final = "same"
_VALUES: Final = (">elements", ">norm", ">largest")
_MODULE_VALUES: Final = 2
"""Of these, so many in a table of modules: their names need the space."""
_FROM_ZERO: Final = "from 0"
"""In place of a relative norm."""


def places_table(found: CheckpointDiff, place_a: str, place_b: str) -> str:
    """Both checkpoints: where they are, how large, of which dtypes."""
    in_a = [tensor.a for tensor in found.tensors if tensor.a]
    in_b = [tensor.b for tensor in found.tensors if tensor.b]
    rows = []
    for side, place, facts in (("A", place_a, in_a), ("B", place_b, in_b)):
        dtypes = [dtype for dtype, _ in Counter(one.dtype for one in facts).most_common()]
        more = [f"{len(dtypes) - _MOST_DTYPES} more"] if len(dtypes) > _MOST_DTYPES else []
        size = format_size(sum(one.nbytes for one in facts))
        rows.append([side, f"{len(facts):,}", size, ", ".join([*dtypes[:_MOST_DTYPES], *more]), place])
    return table(["", ">tensors", ">size", "dtypes", "place"], rows)


def renames_table(found: CheckpointDiff) -> str:
    """By which rules names differ; "" where none does."""
    pairs = [(one.a.name, one.b.name) for one in found.tensors if one.kind == "renamed" and one.a and one.b]
    rules = rename_rules(pairs)
    rows = [[f"{count:,}", shortened(rule.as_text(), 60)] for rule, count in rules[:_MOST_RULES]]
    left = sum(count for _, count in rules[_MOST_RULES:])
    if left:
        rows.append([f"{left:,}", f"in {len(rules) - _MOST_RULES:,} other ways"])
    return table([">renamed", "how"], rows) if rows else ""


def modules_table(found: CheckpointDiff, columns: int) -> str:
    """What differs, in as few rows as tell it; modules that are alike share one."""
    tree = fold_names({tensor.name: _difference(tensor) for tensor in found.tensors})
    rows = fold_rows(tree, hidden=_SAME, most=_MOST_ROWS)
    by_name = {tensor.name: tensor for tensor in found.tensors}
    has_values = any(tensor.values for tensor in found.tensors)
    cells = []
    for row in rows:
        values = _values_of(row, by_name)[:_MODULE_VALUES] if has_values else []
        cells.append([_marks_text(row.marks), _count_text(row.marks), *values, row.path or "(everywhere)"])
    same = found.counts.get("same", 0)
    if same:
        cells.append([_SAME, f"{same:,}", *([""] * _MODULE_VALUES if has_values else []), "the rest"])
    titles = ["difference", ">tensors", *(_VALUES[:_MODULE_VALUES] if has_values else []), "where"]
    return _fitted(titles, cells, columns)


def tensors_table(found: CheckpointDiff) -> str:
    """Every tensor that differs, by name."""
    differing = sorted((one for one in found.tensors if one.kind != "same"), key=lambda one: natural_order(one.name))
    has_values = any(tensor.values for tensor in differing)
    rows = []
    for tensor in differing:
        values = _values_cells([tensor]) if has_values else []
        rows.append([_difference(tensor), _shapes_text(tensor), *values, _names_text(tensor)])
    titles = ["difference", "shape", *(_VALUES if has_values else []), "tensor"]
    return table(titles, rows)


def not_finite_lines(found: CheckpointDiff) -> list[str]:
    """What one has of NaN and infinity that the other lacks."""
    lines = []
    for side, other in (("B", "A"), ("A", "B")):
        more: dict[str, int] = {}
        for tensor in found.tensors:
            if tensor.values:
                in_a, in_b = tensor.values.nan_a + tensor.values.inf_a, tensor.values.nan_b + tensor.values.inf_b
                more[tensor.name] = in_b - in_a if side == "B" else in_a - in_b
        names = [name for name, count in more.items() if count > 0]
        if names:
            count = count_of(sum(more[name] for name in names), "element")
            text = list_some([shortened(printable(name), 60) for name in names], 3)
            lines.append(f"NaN or infinite in {side} and not in {other}: {count} of {text}")
    return lines


def zero_before_lines(found: CheckpointDiff) -> list[str]:
    """What was zero in A and is not in B, which has no relative norm."""
    names = [tensor.name for tensor in found.tensors if tensor.values and tensor.values.was_zero]
    if not names:
        return []
    text = list_some([shortened(printable(name), 60) for name in names], 3)
    return [f"Zero in A and not in B: {count_of(len(names), 'tensor')}: {text}"]


def _difference(tensor: TensorDiff) -> str:
    """What a table calls it."""
    if tensor.kind == "cast" and tensor.a and tensor.b:
        return f"cast {tensor.a.dtype}→{tensor.b.dtype}"
    return tensor.kind.replace("only_in_a", "only in A").replace("only_in_b", "only in B")


def _marks_text(marks: Counter[str]) -> str:
    return ", ".join(mark for mark in marks if mark != _SAME)


def _count_text(marks: Counter[str]) -> str:
    differing = marks.total() - marks[_SAME]
    return f"{differing:,} of {marks.total():,}" if marks[_SAME] else f"{differing:,}"


def _values_of(row: FoldedRow, by_name: dict[str, TensorDiff]) -> list[str]:
    return _values_cells(by_name[name] for module in row.modules for name in module.tensors())


def _values_cells(tensors: Iterable[TensorDiff]) -> list[str]:
    """How many elements changed, the largest relative norm that is finite, and the largest change of an element."""
    values = [tensor.values for tensor in tensors if tensor.values]
    elements = sum(value.elements for value in values)
    if not elements:
        return ["", "", ""]
    changed = sum(value.changed for value in values)
    share = "none" if not changed else f"{max(changed / elements, 0.001):.1%}"
    norms = [value.relative_norm for value in values if not value.was_zero]
    norm = f"{max(norms):.1e}" if norms else _FROM_ZERO
    return [share, norm, f"{max(value.max_abs for value in values):.1e}"]


def _shapes_text(tensor: TensorDiff) -> str:
    texts = [_shape_text(facts) for facts in (tensor.a, tensor.b) if facts]
    return texts[0] if len(set(texts)) == 1 else "→".join(texts)


def _shape_text(facts: TensorEntry) -> str:
    return "×".join(map(str, facts.shape)) or "scalar"


def _names_text(tensor: TensorDiff) -> str:
    if tensor.a and tensor.b and tensor.a.name != tensor.b.name:
        return f"{tensor.a.name} → {tensor.b.name}"
    return tensor.name


def _fitted(titles: Sequence[str], rows: Sequence[Sequence[str]], columns: int) -> str:
    """A table whose last column takes what the others leave of a line."""
    others = table(titles[:-1], [row[:-1] for row in rows]).split("\n")
    width = max(20, columns - max(map(len, others)) - 2)
    return table(titles, [[*row[:-1], shortened(printable(row[-1]), width)] for row in rows])
