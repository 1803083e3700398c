"""Page of the differences between two checkpoints: layers x kinds of tensors, and a searchable list."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, zip_longest
from typing import Any, Final

from hfshard._util.text import format_size, printable
from hfshard.viewing.describe import abbreviate_name, headline
from hfshard.viewing.module_tree import LayerStack, layer_grid
from hfshard.viewing.page.page import Fact, Page, printable_value
from hfshard.viewing.results import (
    FROM_ZERO,
    KIND_WORDS,
    CheckpointDiff,
    DiffKind,
    NormScale,
    TensorDiff,
    TensorEntry,
    ValueDiff,
)

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

_SHADES: Final = 5
"""The number of shades of changes in diff.css."""


def make_diff_page(found: CheckpointDiff) -> Page:
    """Build the page of a `diff_checkpoints` result; b is shown, compared with a."""
    by_name: dict[str, list[TensorDiff]] = {}
    for tensor in found.tensors:
        by_name.setdefault(tensor.name, []).append(tensor)
    grid = layer_grid(by_name)
    stacks = _largest_stacks(grid.stacks)
    cells: dict[str, int] = {}
    scale = found.norm_scale()
    drawn = [_drawn_stack(stack, by_name, scale, cells) for stack in sorted(stacks, key=lambda stack: stack.name)]
    differing = found.differing
    listed = _listed(differing)
    return Page(
        kind="diff",
        title=printable(" → ".join(short_names(found.a, found.b))),
        facts=_facts(found),
        view={
            "places": [("A", printable(found.a)), ("B", printable(found.b))],
            "headline": printable_value(headline(found)),
            "kinds": [(kind, KIND_WORDS[kind], found.counts[kind]) for kind in _KINDS if kind in found.counts],
            "has_values": found.has_values,
            "ramp": [f"{scale.norm_of(level, _SHADES):.1e}" for level in range(1, _SHADES + 1)],
            "more": len(differing) - len(listed),
            "more_stacks": len(grid.stacks) - len(drawn),
            "others": len(grid.others),
        },
        data={
            "kinds": _KINDS,
            "words": [KIND_WORDS[kind] for kind in _KINDS],
            "stacks": drawn,
            "tensors": [_row(tensor, cells.get(tensor.name, -1)) for tensor in listed],
        },
    )


def _facts(found: CheckpointDiff) -> tuple[Fact, ...]:
    counts = found.counts
    measured = [(tensor.name, tensor.values) for tensor in found.tensors if tensor.values is not None]
    finite = [(values.relative_norm, name) for name, values in measured if not values.was_zero]
    facts = [
        Fact("tensors", f"{len(found.tensors):,}", f"{counts.get('same', 0):,} are the same"),
        Fact("changed", f"{counts.get('changed', 0):,}"),
        Fact("cast, reshaped", f"{counts.get('cast', 0) + counts.get('reshaped', 0):,}"),
        Fact("renamed", f"{counts.get('renamed', 0):,}"),
        Fact("only in one", f"{counts.get('only_in_a', 0) + counts.get('only_in_b', 0):,}"),
        Fact("read to compare", format_size(found.read_bytes), "" if found.read_bytes else "the digests sufficed"),
    ]
    if finite:
        norm, name = max(finite, key=lambda one: one[0])
        facts.append(Fact("largest change", f"{norm:.3g}", printable_value(name)[:200]))
    zeros = found.zero_in_a
    if zeros:
        facts.append(Fact("zero in A, not in B", f"{len(zeros):,}", printable_value(zeros[0])[:200]))
    return tuple(facts)


def _largest_stacks(stacks: Sequence[LayerStack]) -> list[LayerStack]:
    """Select the stacks with the most cells, as long as they fit."""
    largest = sorted(stacks, key=lambda stack: -len(stack.cells))[:_MOST_STACKS]
    totals = accumulate(min(len(one.layers), _MOST_LAYERS) * min(len(one.kinds), _MOST_ROWS) for one in largest)
    return [stack for stack, total in zip(largest, totals, strict=True) if total <= _MOST_CELLS]


def _drawn_stack(
    stack: LayerStack, by_name: dict[str, list[TensorDiff]], scale: NormScale, cells: dict[str, int]
) -> dict[str, Any]:
    """Lay out a stack as columns of layers and rows of kinds; each name's cell number is added to `cells`."""
    layers = stack.layers[:_MOST_LAYERS]
    kinds = stack.kinds[:_MOST_ROWS]
    first = max(cells.values(), default=-1) + 1
    column_of = {layer: number for number, layer in enumerate(layers)}
    row_of = {kind: number for number, kind in enumerate(kinds)}
    worst = [[-1] * len(layers) for _ in kinds]
    norms: list[list[float | str | None]] = [[None] * len(layers) for _ in kinds]
    shades = [[0] * len(layers) for _ in kinds]
    for (layer, kind), names in stack.cells.items():
        if layer not in column_of or kind not in row_of:
            continue
        row, column = row_of[kind], column_of[layer]
        tensors = [tensor for name in names for tensor in by_name[name]]
        worst[row][column] = max(_KINDS.index(tensor.kind) for tensor in tensors)
        values = max((one.values for one in tensors if one.values), key=lambda one: one.relative_norm, default=None)
        if values is not None:
            norms[row][column] = _norm(values)
            shades[row][column] = scale.level(values.relative_norm, _SHADES)
        cells.update(dict.fromkeys(names, first + row * len(layers) + column))
    return {
        "name": printable_value(stack.name),
        "first": first,
        "layers": layers,
        "kinds": list(map(printable_value, kinds)),
        "worst": worst,
        "norms": norms,
        "shades": shades,
        "more": len(stack.layers) - len(layers) + len(stack.kinds) - len(kinds),
    }


def _listed(differing: Sequence[TensorDiff]) -> list[TensorDiff]:
    """Select the first differing tensors, as long as their names fit."""
    listed = []
    characters = 0
    for tensor in differing[:_MOST_LISTED]:
        characters += sum(min(len(facts.name), 4000) for facts in (tensor.a, tensor.b) if facts is not None)
        if characters > _MOST_CHARACTERS:
            break
        listed.append(tensor)
    return listed


def _row(tensor: TensorDiff, cell: int) -> list[Any]:
    """Build a row: name, kind, cell, old and new form, old name, and how the values differ."""
    old = printable_value(tensor.a.name) if tensor.kind == "renamed" and tensor.a is not None else ""
    a, b = _form(tensor.a), _form(tensor.b)
    what = b if tensor.kind in ("changed", "renamed") and a == b else " → ".join(filter(None, (a, b)))
    row = [printable_value(tensor.name), _KINDS.index(tensor.kind), cell, what, old]
    if tensor.values is None:
        return row
    values = tensor.values
    cosine = None if values.cosine is None else _number(values.cosine)
    changed = values.changed / values.elements if values.elements else 0.0
    odd = [values.nan_a, values.nan_b, values.inf_a, values.inf_b]
    return [*row, _norm(values), _number(values.max_abs), cosine, round(changed, 6), odd]


def _form(facts: TensorEntry | None) -> str:
    return "" if facts is None else printable(f"{facts.dtype} {facts.shape_text(' × ')}")


def _norm(values: ValueDiff) -> float | str:
    return FROM_ZERO if values.was_zero else _number(values.relative_norm)


def _number(value: float) -> float | str:
    """Round a number to the digits that are shown; a string if JSON cannot represent it."""
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)


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
