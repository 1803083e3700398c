"""Work out what a LoRA adapter changes in its base: pairs of factors, and the values that merging them would give."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from hfshard._util.progress import ProgressCallback
from hfshard.viewing.describe import PEFT_FRONT
from hfshard.viewing.diff_tensors import ComparedTensor, Side, TensorPair
from hfshard.viewing.diff_values import ValueMeasure, is_numeric_dtype, numbers_in
from hfshard.viewing.model_summary import ModelSummary
from hfshard.viewing.results import ValueDiff

_DOWN: Final = ".lora_A.weight"
_UP: Final = ".lora_B.weight"
_MOST_DROPPED: Final = 2
"""The most parts that only one of the two names has in front: "bert.encoder..." is "encoder..."."""


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """A weight of the base, and the factors of what is added to it: scale x up x down."""

    weight: ComparedTensor
    down: ComparedTensor
    """Rank x columns of the weight."""
    up: ComparedTensor
    """Rows of the weight x rank."""
    scale: float

    @property
    def nbytes(self) -> int:
        """Bytes that are read to measure it."""
        return sum(one.facts.nbytes for one in (self.weight, self.down, self.up))

    def measure(self, report: ProgressCallback) -> ValueDiff:
        """Measure how much the weight would change, in float64 and block by block."""
        assert self.weight.torch_dtype is not None
        down = _matrix(self.down, report)
        up = _matrix(self.up, report) * self.scale
        columns = down.shape[1]
        measure = ValueMeasure(self.weight.torch_dtype, torch.float64)
        at = 0
        for block in self.weight.blocks():
            report(len(block))
            numbers = numbers_in(block, self.weight.torch_dtype)
            first, end = at // columns, math.ceil((at + len(numbers)) / columns)
            added = (up[first:end] @ down).flatten()[at - first * columns :][: len(numbers)]
            measure.add(block, (numbers.double() + added).numpy().data.cast("B"))
            at += len(numbers)
        return measure.result()


@dataclass(frozen=True, slots=True)
class AdapterMerge:
    """What an adapter changes in its base."""

    updates: tuple[LowRankUpdate, ...]
    replaced: tuple[TensorPair, ...]
    """Tensors that were trained as a whole, with those of the base in their place."""
    added: tuple[ComparedTensor, ...]
    """Tensors trained as a whole that the base lacks, such as a head."""


def plan_merge(base: Side, adapter: Side, model: ModelSummary | None) -> AdapterMerge | None:
    """Find what each tensor of an adapter changes in another checkpoint, the base.

    Returns:
        None if this is not a LoRA of plain matrices with one scale, or if it is not one of this base.
    """
    if model is None or model.scale is None:
        return None
    found = _by_tail(base.tensors)
    factors: dict[str, dict[str, ComparedTensor]] = {}
    replaced, added = [], []
    for tensor in adapter.tensors:
        name = tensor.facts.name.removeprefix(PEFT_FRONT)
        ending = next((one for one in (_DOWN, _UP) if name.endswith(one)), None)
        if ending is not None:
            factors.setdefault(name.removesuffix(ending), {})[ending] = tensor
        elif ".lora_" in name:
            return None
        elif (other := _find(found, name)) is not None:
            replaced.append(TensorPair(other, tensor, other.facts.name, other.facts.name))
        else:
            added.append(tensor)
    updates = []
    for module, pair in factors.items():
        weight = _find(found, f"{module}.weight")
        if weight is None or len(pair) != 2 or not _fits(weight, pair[_DOWN], pair[_UP]):
            return None
        updates.append(LowRankUpdate(weight, pair[_DOWN], pair[_UP], model.scale))
    return AdapterMerge(tuple(updates), tuple(replaced), tuple(added)) if updates else None


def _by_tail(tensors: Iterable[ComparedTensor]) -> dict[str, ComparedTensor | None]:
    """Map names, and their ends without the first parts, to tensors; None where several have the same end."""
    found: dict[str, ComparedTensor | None] = {}
    tails: dict[str, ComparedTensor | None] = {}
    for tensor in tensors:
        found[tensor.facts.name] = tensor
        for tail in _tails(tensor.facts.name):
            tails[tail] = None if tail in tails else tensor
    return tails | found


def _tails(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[count:]) for count in range(1, min(_MOST_DROPPED, len(parts) - 2) + 1)]


def _find(found: Mapping[str, ComparedTensor | None], name: str) -> ComparedTensor | None:
    return next((tensor for one in (name, *_tails(name)) if (tensor := found.get(one)) is not None), None)


def _fits(weight: ComparedTensor, down: ComparedTensor, up: ComparedTensor) -> bool:
    if not all(len(one.facts.shape) == 2 and _is_float(one) for one in (weight, down, up)):
        return False
    (rows, rank), (other_rank, columns) = up.facts.shape, down.facts.shape
    return rank == other_rank and weight.facts.shape == (rows, columns) and columns > 0


def _is_float(tensor: ComparedTensor) -> bool:
    dtype = tensor.torch_dtype
    return dtype is not None and is_numeric_dtype(dtype) and dtype.is_floating_point


def _matrix(tensor: ComparedTensor, report: ProgressCallback) -> torch.Tensor:
    assert tensor.torch_dtype is not None
    numbers = torch.empty(tensor.facts.parameters, dtype=torch.float64)
    at = 0
    for block in tensor.blocks():
        report(len(block))
        some = numbers_in(block, tensor.torch_dtype)
        numbers[at : at + len(some)] = some  # a copy: the next block may be in the same memory
        at += len(some)
    return numbers.reshape(tensor.facts.shape)
