"""Page of the differences between two checkpoints: a heat map of layers, and a table of what changed by how much."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Any, Final

from hfshard._util.text import printable
from hfshard.viewing.describe import abbreviate_name, comparison_method, headline, zero_before
from hfshard.viewing.model_summary import ModelSummary
from hfshard.viewing.module_tree import (
    LayerGrid,
    LayerStack,
    kinds_by_role,
    layer_grid,
    number_ranges,
    split_name,
    without_numbers,
)
from hfshard.viewing.page.page import Fact, Page, describe_model, percent_text, printable_value, share_text
from hfshard.viewing.results import FROM_ZERO, KIND_WORDS, CheckpointDiff, DiffKind, NormScale, TensorDiff, ValueDiff

_KINDS: Final[tuple[DiffKind, ...]] = (
    "same",
    "renamed",
    "cast",
    "reshaped",
    "only_in_a",
    "only_in_b",
    "changed",
)
"""In ascending priority: a cell shows the last of its tensors' kinds."""

_MOST_LISTED: Final = 20_000
_MOST_CHARACTERS: Final = 2_000_000
"""The most characters of names in the list of differences: a page stays small whatever the checkpoints are."""
_MOST_STACKS: Final = 12
_MOST_LAYERS: Final = 200
_MOST_ROWS: Final = 100
"""The most rows of a grid: no model has more, but a hostile one could have any number."""

_MOST_CELLS: Final = 40_000
"""The most cells of all grids: a browser takes three seconds for 200,000."""

_SHADES: Final = 9
"""The number of shades of changes in diff.css."""


def make_diff_page(found: CheckpointDiff) -> Page:
    """Build the page of a `diff_checkpoints` result: b compared with a; or what an adapter changes in its base."""
    whole = found
    found = found.merged or found
    by_name: dict[str, list[TensorDiff]] = {}
    for tensor in found.tensors:
        by_name.setdefault(tensor.name, []).append(tensor)
    grid = layer_grid(by_name)
    stacks = _largest_stacks(grid.stacks)
    scale = found.norm_scale(name for stack in grid.stacks for names in stack.cells.values() for name in names)
    cells: dict[str, int] = {}
    drawn = [_drawn_stack(stack, by_name, scale, cells) for stack in sorted(stacks, key=lambda stack: stack.name)]
    listed = _listed(found.differing)
    labels, folds = _fold_layers(listed, grid)
    columns, same_in_all = _columns(listed)
    models = [describe_model(model) for model in whole.models]
    about = describe_model(found.models[1]) if whole.merged or models[0] == models[1] else ()
    return Page(
        kind="diff",
        title=printable((" + " if whole.merged else " → ").join(short_names(found.a, found.b))),
        about=about,
        facts=_facts(whole),
        view={
            "kind": "adapter and its base" if whole.merged else "what differs",
            "measure": _measure_of_updates(found.models[1]) if whole.merged else "|b − a| / |a|, log scale",
            "places": [
                (side, printable(place), model if model != about else ())
                for side, place, model in zip("AB", (whole.a, whole.b), models, strict=True)
            ],
            "sentences": [
                printable_value(text) for text in (headline(whole), zero_before(found), _hint(found)) if text
            ],
            "kinds": [(kind, KIND_WORDS[kind], found.counts[kind]) for kind in _KINDS if kind in found.counts],
            "columns": columns,
            "same_in_all": same_in_all,
            "method": comparison_method(whole),
            "has_values": found.has_values,
            "has_folds": bool(labels),
            "more": len(found.differing) - len(listed),
            "more_stacks": len(grid.stacks) - len(drawn),
            **_legend(drawn, scale),
        },
        data={
            "kinds": _KINDS,
            "words": [KIND_WORDS[kind] for kind in _KINDS],
            "stacks": drawn,
            "columns": [column.key for column in columns],
            "folds": labels,
            "tensors": [
                _row(tensor, cells.get(tensor.name, -1), fold, scale)
                for tensor, fold in zip(listed, folds, strict=True)
            ],
        },
    )


def _hint(found: CheckpointDiff) -> str:
    """Say how to see what an adapter changes in its base; "" where nothing more can be seen."""
    adapters = [model for model in found.models if model is not None and model.scale is not None]
    is_whole = found.has_values or "same" in found.counts or "changed" in found.counts
    return (
        "" if is_whole or len(adapters) != 1 else "With --values, this page shows what the adapter changes in its base."
    )


def _facts(whole: CheckpointDiff) -> tuple[Fact, ...]:
    found = whole.merged or whole
    counts = found.counts
    facts = [Fact("tensors", f"{len(found.tensors):,}", f"{counts.get('same', 0):,} are the same")]
    if whole.merged is not None:
        facts.insert(0, _adapter_fact(whole, whole.merged))
    for kind in reversed(_KINDS[1:]):
        if kind in counts:
            label, note = KIND_WORDS[kind], ""
            if kind == "changed":
                label = "weights changed" if whole.merged else label
                note = f"they hold {_share_of_b(found)} of {'the base' if whole.merged else 'B'}'s parameters"
            facts.append(Fact(label, f"{counts[kind]:,}", note))
    if found.relative_norm is not None:
        facts.append(Fact("change of the model", percent_text(found.relative_norm), "relative norm of all tensors"))
    measured = [(tensor.values.relative_norm, tensor.name) for tensor in found.tensors if tensor.values is not None]
    finite = [(norm, name) for norm, name in measured if math.isfinite(norm)]
    if finite:
        norm, name = max(finite, key=lambda one: one[0])
        facts.append(Fact("largest change", percent_text(norm), f"relative norm of {printable_value(name)[:200]}"))
    return tuple(facts)


def _measure_of_updates(adapter: ModelSummary | None) -> str:
    """Say what the shades of a LoRA measure."""
    by_rank = adapter.alpha / adapter.rank if adapter and adapter.alpha and adapter.rank else None
    divisor = "rank" if adapter is None or adapter.scale == by_rank else "√rank"
    return f"|update| / |weight|, log scale; the update includes alpha / {divisor}"


def _adapter_fact(whole: CheckpointDiff, merged: CheckpointDiff) -> Fact:
    """Count an adapter's own parameters."""
    sides = [[getattr(tensor, side) for tensor in whole.tensors] for side in ("a", "b")]
    in_a, in_b = (sum(facts.parameters for facts in side if facts is not None) for side in sides)
    base, adapter = (in_a, in_b) if merged.a == whole.a else (in_b, in_a)
    return Fact("adapter's parameters", f"{adapter:,}", f"{share_text(adapter, base)} of the base's")


def _share_of_b(found: CheckpointDiff) -> str:
    in_b = [(tensor.kind, tensor.b.parameters) for tensor in found.tensors if tensor.b is not None]
    changed = sum(parameters for kind, parameters in in_b if kind == "changed")
    return share_text(changed, sum(parameters for _, parameters in in_b))


# The heat maps: stacks of layers as columns of layers and rows of kinds.


def _largest_stacks(stacks: Sequence[LayerStack]) -> list[LayerStack]:
    """Select the stacks with the most cells, as long as they fit."""
    largest = sorted(stacks, key=lambda stack: -len(stack.cells))[:_MOST_STACKS]
    totals = accumulate(min(len(one.layers), _MOST_LAYERS) * min(len(one.kinds), _MOST_ROWS) for one in largest)
    return [stack for stack, total in zip(largest, totals, strict=True) if total <= _MOST_CELLS]


def _drawn_stack(
    stack: LayerStack, by_name: dict[str, list[TensorDiff]], scale: NormScale, cells: dict[str, int]
) -> dict[str, Any]:
    """Lay out a stack; each name's cell number is added to `cells`."""
    layers = stack.layers[:_MOST_LAYERS]
    in_roles = [(role, kind) for role, kinds in kinds_by_role(stack.kinds) for kind in kinds][:_MOST_ROWS]
    first = max(cells.values(), default=-1) + 1
    column_of = {layer: number for number, layer in enumerate(layers)}
    row_of = {kind: number for number, (_, kind) in enumerate(in_roles)}
    worst = [[-1] * len(layers) for _ in in_roles]
    norms: list[list[float | str | None]] = [[None] * len(layers) for _ in in_roles]
    shades = [[0] * len(layers) for _ in in_roles]
    sides = [[0] * len(layers) for _ in in_roles]
    parts: list[list[tuple[int, int] | int]] = [[0] * len(layers) for _ in in_roles]
    for (layer, kind), names in stack.cells.items():
        if layer not in column_of or kind not in row_of:
            continue
        row, column = row_of[kind], column_of[layer]
        tensors = [tensor for name in names for tensor in by_name[name]]
        worst[row][column] = max(_KINDS.index(tensor.kind) for tensor in tensors)
        if len(tensors) > 1:
            parts[row][column] = (sum(tensor.kind != "same" for tensor in tensors), len(tensors))
        values = max((one.values for one in tensors if one.values), key=lambda one: one.relative_norm, default=None)
        if values is not None:
            norms[row][column] = _norm(values)
            shades[row][column] = scale.level(values.relative_norm, _SHADES)
            sides[row][column] = scale.side(values.relative_norm)
        cells.update(dict.fromkeys(names, first + row * len(layers) + column))
    return {
        "name": printable_value(stack.name),
        "first": first,
        "layers": layers,
        "roles": [role for role, _ in in_roles],
        "kinds": [printable_value(kind) for _, kind in in_roles],
        "worst": worst,
        "norms": norms,
        "shades": shades,
        "sides": sides,
        "parts": parts,
        "more": len(stack.layers) - len(layers) + len(stack.kinds) - len(in_roles),
    }


def _legend(drawn: Sequence[Mapping[str, Any]], scale: NormScale) -> dict[str, Any]:
    """Describe what the cells of the heat maps show, and nothing that they do not."""
    cells = [
        (_KINDS[kind], shade, side)
        for stack in drawn
        for row in zip(stack["worst"], stack["shades"], stack["sides"], strict=True)
        for kind, shade, side in zip(*row, strict=True)
        if kind >= 0
    ]
    plain = {kind for kind, shade, _ in cells if kind != "changed" or not shade}
    has_shades = any(kind == "changed" and shade for kind, shade, _ in cells)
    return {
        "signs": [(kind, KIND_WORDS[kind]) for kind in _KINDS if kind in plain],
        "ramp": [percent_text(scale.norm_of(level + 1, _SHADES), 2) for level in range(_SHADES)] if has_shades else [],
        "has_below": any(side < 0 for _, _, side in cells),
        "has_above": any(side > 0 for _, _, side in cells),
    }


# The table: what changed most comes first, layers that changed alike share a row, and no column says one thing only.


def _listed(differing: Sequence[TensorDiff]) -> list[TensorDiff]:
    """Select differing tensors, the largest changes first and those without a norm last, as long as their names fit."""
    listed = []
    characters = 0
    for tensor in sorted(differing, key=_least_change)[:_MOST_LISTED]:
        characters += sum(min(len(facts.name), 4000) for facts in (tensor.a, tensor.b) if facts is not None)
        if characters > _MOST_CHARACTERS:
            break
        listed.append(tensor)
    return listed


def _least_change(tensor: TensorDiff) -> float:
    return 1.0 if tensor.values is None or tensor.values.was_zero else -tensor.values.relative_norm


def _fold_layers(listed: Sequence[TensorDiff], grid: LayerGrid) -> tuple[list[str], list[int]]:
    """Find tensors of one kind that differ alike in several layers, or in several modules of a layer, such as experts.

    Returns:
        The names of the groups: "encoder.layer.{3-5}.mlp.up.weight"; and for each listed tensor the number of its
        group, or -1.
    """
    cell_of = {
        name: (stack.name, kind, layer)
        for stack in grid.stacks
        for (layer, kind), names in stack.cells.items()
        for name in names
    }
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, tensor in enumerate(listed):
        if tensor.name in cell_of:
            stack, kind, _ = cell_of[tensor.name]
            likeness = (tensor.kind, _dtypes(tensor), _shapes(tensor), without_numbers(split_name(_old_name(tensor))))
            groups.setdefault((stack, kind, *likeness), []).append(number)
    labels: list[str] = []
    folds = [-1] * len(listed)
    for (stack, kind, *_), members in groups.items():
        if len(members) > 1:
            for number in members:
                folds[number] = len(labels)
            layers = {cell_of[listed[number].name][2] for number in members}
            layer = number_ranges(layers) if len(layers) == 1 else f"{{{number_ranges(layers)}}}"
            labels.append(printable_value(".".join(filter(None, (stack, layer, kind)))))
    return labels, folds


def _row(tensor: TensorDiff, cell: int, fold: int, scale: NormScale) -> list[Any]:
    """Build a row: name, kind, cell, fold, dtypes, shapes, old name, and how the values differ."""
    name, old = (printable_value(text) for text in (tensor.name, _old_name(tensor)))
    row = [name, _KINDS.index(tensor.kind), cell, fold, _dtypes(tensor), _shapes(tensor), old]
    values = tensor.values
    if values is None:
        return row
    shade = scale.level(values.relative_norm, _SHADES)
    odd = [values.nan_a, values.nan_b, values.inf_a, values.inf_b]
    numbers = [_norm(values), _number(values.max_abs), _turn(tensor), values.changed, values.elements]
    return [*row, shade, *numbers, odd if any(odd) else 0]


def _old_name(tensor: TensorDiff) -> str:
    return tensor.a.name if tensor.kind == "renamed" and tensor.a is not None else ""


def _dtypes(tensor: TensorDiff) -> str:
    return _from_to([facts.dtype for facts in (tensor.a, tensor.b) if facts is not None])


def _shapes(tensor: TensorDiff) -> str:
    return _from_to([facts.shape_text(" × ") for facts in (tensor.a, tensor.b) if facts is not None])


def _from_to(texts: Sequence[str]) -> str:
    return printable(" → ".join(dict.fromkeys(texts)))


def _norm(values: ValueDiff) -> float | str:
    return FROM_ZERO if values.was_zero else _number(values.relative_norm)


def _norm_text(values: ValueDiff) -> str:
    return FROM_ZERO if values.was_zero else percent_text(values.relative_norm)


def _turn(tensor: TensorDiff) -> float | str | None:
    """Return 1 - cosine to the digits that are known of the cosine, which is computed in float32 for small dtypes."""
    if tensor.values is None or tensor.values.cosine_distance is None:
        return None
    is_small = all(facts.nbytes <= 2 * facts.parameters for facts in (tensor.a, tensor.b) if facts is not None)
    return _number(round(tensor.values.cosine_distance, 6 if is_small else 12))


def _number(value: float) -> float | str:
    """Round a number to the digits that are shown; a string if JSON cannot represent it."""
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table, besides the names."""

    key: str
    label: str
    is_number: bool
    text: Callable[[TensorDiff], str]
    """What it says of a tensor, as in the sentence that replaces a column with one text; "" says nothing."""


def _of_values(text: Callable[[ValueDiff], str]) -> Callable[[TensorDiff], str]:
    return lambda tensor: "" if tensor.values is None else text(tensor.values)


_COLUMNS: Final = (
    Column("norm", "relative norm", True, _of_values(lambda values: f"relative norm {_norm_text(values)}")),
    Column("max", "max |b − a|", True, _of_values(lambda values: f"max |b − a| {_number(values.max_abs)}")),
    Column("turn", "1 − cosine", True, lambda tensor: "" if _turn(tensor) is None else f"1 − cosine {_turn(tensor)}"),
    Column(
        "share",
        "elements changed",
        True,
        _of_values(lambda values: f"{share_text(values.changed, values.elements)} of elements changed"),
    ),
    Column("kind", "kind", False, lambda tensor: KIND_WORDS[tensor.kind]),
    Column("dtype", "dtype", False, _dtypes),
    Column("shape", "shape", False, _shapes),
)


def _columns(listed: Sequence[TensorDiff]) -> tuple[list[Column], list[str]]:
    """Select the columns that tell rows apart; the others are what they say in every row."""
    texts = {column.key: {column.text(tensor) for tensor in listed} for column in _COLUMNS}
    columns = [one for one in _COLUMNS if len(texts[one.key]) > 1 or (len(listed) == 1 and texts[one.key] != {""})]
    others = sorted((one for one in _COLUMNS if one not in columns), key=lambda one: one.is_number)
    return columns, [text for one in others for text in texts[one.key] if text]


# Short names that distinguish two places.


_LONGEST: Final = 60
"""The most characters of one name; the middle of a longer one is left out."""


def short_names(a: str, b: str) -> tuple[str, str]:
    """Leave out the folders above the last part in which two places differ.

    Args:
        a: A path, an address, or "org/name@revision".
        b: The other place, in the same forms.

    Example:
        >>> short_names("/models/v1/base", "/models/v2/base")
        ('v1/base', 'v2/base')
    """
    parts_a, parts_b = ([part for part in place.split("/") if part] for place in (a, b))
    pairs = zip_longest(reversed(parts_a), reversed(parts_b))
    count = next((number for number, (one, other) in enumerate(pairs, 1) if one != other), 1)
    return _joined(parts_a[-count:]) or a, _joined(parts_b[-count:]) or b


def _joined(parts: list[str]) -> str:
    """Join the first part, which differs, and the last one, with the ones between them if there is room."""
    whole = "/".join(parts)
    text = whole if len(whole) <= _LONGEST or len(parts) < 3 else f"{parts[0]}/…/{parts[-1]}"
    return abbreviate_name(text, _LONGEST)
