"""The command that compares two checkpoints: a table, a heat map, or JSON."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hfshard._util.arguments import absolute_path
from hfshard._util.text import count_of, format_size, printable, shorten_list
from hfshard.cli.output import elide_middle, has_colors, print_json, print_text, table
from hfshard.cli.shared_arguments import (
    REPO,
    STORE,
    CommandGroup,
    add_format,
    add_no_progress,
    add_token,
    add_variant,
    add_verify_level,
)
from hfshard.viewing.describe import comparison_method, headline, rename_rules, zero_before
from hfshard.viewing.module_tree import LayerStack, fold_names, fold_rows, kinds_by_role, layer_grid, natural_order
from hfshard.viewing.results import FROM_ZERO, KIND_WORDS, LEAST, CheckpointDiff, NormScale, TensorDiff

_EXIT_SAME = 0
_EXIT_DIFFERENT = 1


def add_diff(commands: CommandGroup) -> None:
    """Add `diff`."""
    parser = commands.add_parser(
        "diff",
        diff,
        help="show what differs between two checkpoints, and where",
        description="Show which tensors of two checkpoints are the same, changed, cast, reshaped, renamed or in only "
        "one, however they are sharded. Tensors with digests in both are not read. Exit 0: nothing differs, 1: "
        "something does, 2: bad usage, or one of them is damaged or cannot be read.",
    )
    parser.set_defaults(exit_failed=2)
    place = (
        f"a directory, one file of weights, a run or one of its checkpoints; {REPO}, also with @revision; or {STORE}"
    )
    parser.add_argument("a", metavar="A", help=place)
    parser.add_argument("b", metavar="B", help="the same")
    parser.add_argument(
        "--values",
        action="store_true",
        help="also show by how much: read the changed tensors block by block, and compare their values",
    )
    parser.add_argument("--all", action="store_true", help="list every tensor that differs, with its full name")
    add_verify_level(parser, "full: trust no digests; read and compare every byte of both")
    add_variant(parser)
    parser.add_argument(
        "--key",
        action="append",
        help="key of the weights in torch.save files that contain several, such as model_ema; twice: for A, for B",
    )
    parser.add_argument("--subfolder", action="append", help="folder in both; twice: for A, for B")
    add_token(parser)
    add_format(parser)
    add_no_progress(parser)


def diff(arguments: argparse.Namespace) -> int:
    """Show the differences between two checkpoints; return 0 if there are none, else 1."""
    from hfshard.viewing.diff_checkpoints import diff_checkpoints

    found = diff_checkpoints(
        arguments.a,
        arguments.b,
        values=arguments.values,
        variant=arguments.variant,
        key=_one_or_each(arguments.key),
        subfolder=_one_or_each(arguments.subfolder) or "",
        verify=arguments.verify,
        token=arguments.token,
        progress=arguments.progress,
    )
    if arguments.format == "json":
        print_json({"headline": headline(found), **found.as_json()})
    else:
        places = (_shown_place(arguments.a, found.a), _shown_place(arguments.b, found.b))
        print_diff(found, places, lists_all=arguments.all)
    return _EXIT_SAME if found.is_same else _EXIT_DIFFERENT


def print_diff(found: CheckpointDiff, places: tuple[str, str], *, lists_all: bool) -> None:
    """Print a report as text: one sentence first, then more and more detail.

    Args:
        found: The report.
        places: The displayed names of both checkpoints.
        lists_all: Whether to list every tensor that differs.
    """
    columns = shutil.get_terminal_size().columns
    print_text(printable(headline(found)))
    print_text("\n" + places_table(found, *places))
    print_text(f"\n{comparison_method(found)}")
    for line in (*not_finite_lines(found), printable(zero_before(found))):
        if line:
            print_text(line)
    if not found.differing:
        return
    renames = renames_table(found)
    if renames:
        print_text("\n" + renames)
    print_text("\n" + (tensors_table(found) if lists_all else modules_table(found, columns)))
    has_shades = sys.stdout.isatty() and sys.stdout.encoding.lower().startswith("utf")
    for drawn in heat_maps(found.merged or found, HeatMapStyle(columns, has_shades, has_colors(sys.stdout))):
        print_text("\n" + drawn)


def _one_or_each(values: list[str] | None) -> Any:
    """Return the value of an option that was passed once for both checkpoints, or the values for each."""
    return None if not values else values[0] if len(values) == 1 else tuple(values)


def _shown_place(given: str, found: str) -> str:
    """Return a place as it was typed, unless it led to another one, as a run does to its latest checkpoint."""
    return given if absolute_path(given) == found else found


# Heat maps of how much each tensor of each layer changed, drawn with characters: kinds of tensors x layers.


_LEVELS: Final = 9
_SHADES: Final = "░░▒▒▓▓███"
_COLORS: Final = (229, 228, 221, 214, 208, 202, 196, 160, 124)
"""Colors of the 256 of a terminal, from light yellow to dark red; users who can't distinguish them see the shades."""
_MOST_LABEL: Final = 36
_MOST_KINDS: Final = 40
_MOST_STACKS: Final = 4
_NOT_MEASURED: Final = math.ulp(0.0)
"""Represents a difference that is not one of numbers: another shape, or a tensor in only one of the two."""
_DIFFERENT: Final = "?"
_SAME_CELL: Final = "·"
_LACKING: Final = " "
_RULER: Final = 5
"""Columns from one layer's number to the next."""


@dataclass(frozen=True, slots=True)
class HeatMapStyle:
    """Style of a heat map."""

    columns: int
    """Characters in a line."""
    has_shades: bool
    """Whether levels are shades; else they are digits, for files and programs."""
    has_colors: bool


def heat_maps(found: CheckpointDiff, style: HeatMapStyle) -> Iterator[str]:
    """Draw a map of each stack of layers in which values were compared.

    Args:
        found: A report with values; without them nothing is drawn.
        style: How to draw.

    Yields:
        Lines: maps of the stacks with the largest changes first, then the legend.
    """
    norms: dict[str, float] = {}
    for one in found.tensors:  # a name may be in several pairs
        norms[one.name] = max(_heat(one), norms.get(one.name, 0.0))
    stacks = [
        stack
        for stack in layer_grid(tensor.name for tensor in found.tensors).stacks
        if _hottest(stack, norms) > _NOT_MEASURED
    ]
    stacks.sort(key=lambda stack: -_hottest(stack, norms))
    scale = found.norm_scale(name for stack in stacks for names in stack.cells.values() for name in names)
    for stack in stacks[:_MOST_STACKS]:
        yield _map(stack, norms, scale, style)
    if len(stacks) > _MOST_STACKS:
        yield f"{count_of(len(stacks) - _MOST_STACKS, 'more stack')} of layers with smaller changes"
    if stacks:
        yield _legend(scale, style, has_others=_NOT_MEASURED in norms.values())


def _heat(tensor: TensorDiff) -> float:
    """Return the relative norm; not zero for a change that is not finite, too small for a norm, or a zero's sign."""
    if tensor.values is None:
        return 0.0 if tensor.kind in ("same", "renamed") else _NOT_MEASURED
    is_changed = tensor.kind == "changed" or tensor.values.changed > 0
    return max(tensor.values.relative_norm, LEAST if is_changed else 0.0)


def _hottest(stack: LayerStack, norms: dict[str, float]) -> float:
    return max((norms.get(name, 0.0) for names in stack.cells.values() for name in names), default=0.0)


def _map(stack: LayerStack, norms: dict[str, float], scale: NormScale, style: HeatMapStyle) -> str:
    cells = {cell: max(norms.get(name, 0.0) for name in names) for cell, names in stack.cells.items()}
    heat: dict[str, float] = {}
    for (_, kind), norm in cells.items():
        heat[kind] = max(norm, heat.get(kind, 0.0))
    hot = {kind for kind in sorted(heat, key=lambda kind: -heat[kind])[:_MOST_KINDS] if heat[kind]}
    in_order = [kind for _, kinds in kinds_by_role(hot) for kind in kinds]
    labels = {kind: elide_middle(printable(kind), _MOST_LABEL) for kind in in_order}
    title = elide_middle(printable(f"{stack.name}.*" if stack.name else "*"), _MOST_LABEL)
    width = max(len(title), *map(len, labels.values()))
    per_column = max(1, math.ceil(len(stack.layers) / max(1, style.columns - width - 2)))
    groups = [stack.layers[start : start + per_column] for start in range(0, len(stack.layers), per_column)]
    lines = [f"{title:<{width}}  {_ruler(groups)}"]
    for kind, label in labels.items():
        drawn = (_drawn([cells.get((layer, kind)) for layer in group], scale, style) for group in groups)
        lines.append(f"{label:<{width}}  {''.join(drawn)}".rstrip())
    left = sum(norm > 0 for kind, norm in heat.items() if kind not in hot)
    if left:
        lines.append(f"... and {count_of(left, 'kind')} of tensors that changed less")
    if per_column > 1:
        lines.append(f"(each column: the maximum of {per_column} layers)")
    return "\n".join(lines)


def _ruler(groups: Sequence[Sequence[int]]) -> str:
    """Write the numbers of layers over their columns."""
    ruler = ""
    for column in range(0, len(groups), _RULER):
        if column >= len(ruler):
            ruler = f"{ruler:<{column}}{groups[column][0]} "
    return ruler.rstrip()


def _drawn(norms: Sequence[float | None], scale: NormScale, style: HeatMapStyle) -> str:
    present = [norm for norm in norms if norm is not None]
    if not present:
        return _LACKING
    norm = max(present)
    if norm == 0:
        return _SAME_CELL if style.has_shades else "."
    if norm == _NOT_MEASURED:
        return _DIFFERENT
    return _level_text(scale.level(norm, _LEVELS), style)


def _level_text(level: int, style: HeatMapStyle) -> str:
    text = _SHADES[level - 1] if style.has_shades else str(level)
    return f"\x1b[38;5;{_COLORS[level - 1]}m{text}\x1b[0m" if style.has_colors else text


def _legend(scale: NormScale, style: HeatMapStyle, *, has_others: bool) -> str:
    levels = (1, _LEVELS) if not style.has_shades else (1, 3, 5, 7)
    texts = [f"{_level_text(level, style)} {scale.norm_of(level, _LEVELS):.1e}" for level in levels]
    same = _SAME_CELL if style.has_shades else "."
    others = f"  {_DIFFERENT} differs otherwise" if has_others else ""
    return f"relative norm |B-A| / |A|:  {same} same  {'  '.join(texts)}{others}"


# The tables of `hfshard diff`.


_MOST_ROWS: Final = 30
"""Rows of a table of modules: about what a terminal shows at once."""
_MOST_RULES: Final = 8
_MOST_DTYPES: Final = 4
_SAME: Final = "same"
_VALUES: Final = (">elements", ">norm", ">largest")
_MODULE_VALUES: Final = 2
"""The number of these in a table of modules, whose names need the space."""


def places_table(found: CheckpointDiff, place_a: str, place_b: str) -> str:
    """Describe both checkpoints: tensors, size, dtypes and place."""
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
    """List the rules by which names differ; "" if none does."""
    pairs = [(one.a.name, one.b.name) for one in found.tensors if one.kind == "renamed" and one.a and one.b]
    rules = rename_rules(pairs)
    rows = [[f"{count:,}", elide_middle(rule.as_text(), 60)] for rule, count in rules[:_MOST_RULES]]
    left = sum(count for _, count in rules[_MOST_RULES:])
    if left:
        rows.append([f"{left:,}", f"in {len(rules) - _MOST_RULES:,} other ways"])
    return table([">renamed", "how"], rows) if rows else ""


def modules_table(found: CheckpointDiff, columns: int) -> str:
    """List the differences in as few rows as possible; modules that are alike share one."""
    tree = fold_names({tensor.name: _difference(tensor) for tensor in found.tensors})
    rows = fold_rows(tree, hidden=_SAME, most=_MOST_ROWS)
    by_name = {tensor.name: tensor for tensor in found.tensors}
    has_values = found.has_values
    cells = []
    for row in rows:
        tensors = [by_name[name] for module in row.modules for name in module.tensors()]
        values = _values_cells(tensors)[:_MODULE_VALUES] if has_values else []
        marks = ", ".join(mark for mark in row.marks if mark != _SAME)
        cells.append([marks, _count_text(row.marks), *values, row.path or "(everywhere)"])
    same = found.counts.get("same", 0)
    if same:
        cells.append([_SAME, f"{same:,}", *([""] * _MODULE_VALUES if has_values else []), "the rest"])
    titles = ["difference", ">tensors", *(_VALUES[:_MODULE_VALUES] if has_values else []), "where"]
    return _fitted(titles, cells, columns)


def tensors_table(found: CheckpointDiff) -> str:
    """List every tensor that differs, by name."""
    differing = sorted(found.differing, key=lambda one: natural_order(one.name))
    has_values = found.has_values
    rows = []
    for tensor in differing:
        values = _values_cells([tensor]) if has_values else []
        rows.append([_difference(tensor), _shapes_text(tensor), *values, _names_text(tensor)])
    titles = ["difference", "shape", *(_VALUES if has_values else []), "tensor"]
    return table(titles, rows)


def not_finite_lines(found: CheckpointDiff) -> list[str]:
    """Report the NaN and infinite elements of one checkpoint that the other lacks."""
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
            text = shorten_list([elide_middle(printable(name), 60) for name in names], 3)
            lines.append(f"NaN or infinite in {side} and not in {other}: {count} of {text}")
    return lines


def _difference(tensor: TensorDiff) -> str:
    """Return a table's name for the difference."""
    if tensor.kind == "cast" and tensor.a and tensor.b:
        return f"cast {tensor.a.dtype}→{tensor.b.dtype}"
    return KIND_WORDS[tensor.kind]


def _count_text(marks: Counter[str]) -> str:
    differing = marks.total() - marks[_SAME]
    return f"{differing:,} of {marks.total():,}" if marks[_SAME] else f"{differing:,}"


def _values_cells(tensors: Iterable[TensorDiff]) -> list[str]:
    """Return the share of changed elements, the largest finite relative norm, and the largest change of an element."""
    values = [tensor.values for tensor in tensors if tensor.values]
    elements = sum(value.elements for value in values)
    if not elements:
        return ["", "", ""]
    changed = sum(value.changed for value in values)
    share = "none" if not changed else f"{max(changed / elements, 0.001):.1%}"
    norms = [value.relative_norm for value in values if not value.was_zero]
    norm = f"{max(norms):.1e}" if norms else FROM_ZERO
    return [share, norm, f"{max(value.max_abs for value in values):.1e}"]


def _shapes_text(tensor: TensorDiff) -> str:
    texts = [facts.shape_text() for facts in (tensor.a, tensor.b) if facts]
    return texts[0] if len(set(texts)) == 1 else "→".join(texts)


def _names_text(tensor: TensorDiff) -> str:
    if tensor.a and tensor.b and tensor.a.name != tensor.b.name:
        return f"{tensor.a.name} → {tensor.b.name}"
    return tensor.name


def _fitted(titles: Sequence[str], rows: Sequence[Sequence[str]], columns: int) -> str:
    """Lay out a table whose last column takes the space that the others leave."""
    others = table(titles[:-1], [row[:-1] for row in rows]).split("\n")
    width = max(20, columns - max(map(len, others)) - 2)
    return table(titles, [[*row[:-1], elide_middle(printable(row[-1]), width)] for row in rows])
