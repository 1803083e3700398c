"""How much each tensor of each layer changed, drawn with characters: kinds of tensors x layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from hfshard.cli.output import count_of, printable, shortened
from hfshard.viewing.diff.report import CheckpointDiff, TensorDiff
from hfshard.viewing.layers import LayerStack, layer_grid
from hfshard.viewing.values.norm_scale import LEAST, NormScale, norm_scale

_LEVELS: Final = 9
_SHADES: Final = "░░▒▒▓▓███"
_COLORS: Final = (229, 228, 221, 214, 208, 202, 196, 160, 124)
"""Of the 256 of a terminal, from light yellow to dark red; who can't tell them apart sees the shades."""
_MOST_LABEL: Final = 36
_MOST_KINDS: Final = 40
_MOST_STACKS: Final = 4
_NOT_MEASURED: Final = math.ulp(0.0)
"""Stands for what differs in another way than by its numbers: in shape, or it is in one of the two only."""
_DIFFERENT: Final = "?"
_SAME: Final = "·"
_LACKING: Final = " "
_RULER: Final = 5
"""Columns from one number of a layer to the next."""


@dataclass(frozen=True, slots=True)
class HeatMapStyle:
    """How a heat map is drawn."""

    columns: int
    """Characters in a line."""
    has_shades: bool
    """Whether levels are shades; else digits, which a file keeps and a program reads."""
    has_colors: bool


def heat_maps(found: CheckpointDiff, style: HeatMapStyle) -> Iterator[str]:
    """Draw a map of each stack of layers in which values were compared.

    Args:
        found: With values; without, nothing is drawn.
        style: How.

    Yields:
        Lines, of the stacks with the largest changes first.
    """
    norms: dict[str, float] = {}
    for one in found.tensors:  # a name may be in several pairs
        norms[one.name] = max(_heat(one), norms.get(one.name, 0.0))
    scale = norm_scale(norms.values())
    stacks = [
        stack
        for stack in layer_grid(tensor.name for tensor in found.tensors).stacks
        if _hottest(stack, norms) > _NOT_MEASURED
    ]
    stacks.sort(key=lambda stack: -_hottest(stack, norms))
    for stack in stacks[:_MOST_STACKS]:
        yield _map(stack, norms, scale, style)
    if len(stacks) > _MOST_STACKS:
        yield f"{count_of(len(stacks) - _MOST_STACKS, 'more stack')} of layers with smaller changes"
    if stacks:
        yield _legend(scale, style, has_others=_NOT_MEASURED in norms.values())


def _heat(tensor: TensorDiff) -> float:
    """The relative norm; not zero where what differs is not finite, too little for a norm, or the sign of a zero."""
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
    labels = {kind: shortened(printable(kind), _MOST_LABEL) for kind in stack.kinds if kind in hot}
    title = shortened(printable(f"{stack.name}.*" if stack.name else "*"), _MOST_LABEL)
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
        lines.append(f"(each column: the most of {per_column} layers)")
    return "\n".join(lines)


def _ruler(groups: Sequence[Sequence[int]]) -> str:
    """Numbers of layers over their columns."""
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
        return _SAME if style.has_shades else "."
    if norm == _NOT_MEASURED:
        return _DIFFERENT
    return _level_text(scale.level(norm, _LEVELS), style)


def _level_text(level: int, style: HeatMapStyle) -> str:
    text = _SHADES[level - 1] if style.has_shades else str(level)
    return f"\x1b[38;5;{_COLORS[level - 1]}m{text}\x1b[0m" if style.has_colors else text


def _legend(scale: NormScale, style: HeatMapStyle, *, has_others: bool) -> str:
    levels = (1, _LEVELS) if not style.has_shades else (1, 3, 5, 7)
    texts = []
    for level in levels:
        texts.append(f"{_level_text(level, style)} {scale.norm_of(level, _LEVELS):.1e}")
    same = _SAME if style.has_shades else "."
    others = f"  {_DIFFERENT} differs otherwise" if has_others else ""
    return f"relative norm |B-A| / |A|:  {same} same  {'  '.join(texts)}{others}"
