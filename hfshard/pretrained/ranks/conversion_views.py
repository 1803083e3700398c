"""Transformers' weight conversion, traced on tensors without data: what each stored tensor is of the model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hfshard.distributed.layout import Interval
from hfshard.pretrained.class_alias import view_as_alias

_COPIES: Final = frozenset(("contiguous", "clone", "detach"))
"""Functions that change no element and no order: with the argument as their result, a view stays one."""


@dataclass(frozen=True, slots=True)
class ConvertedTensor:
    """A stored tensor: one of the model's, a rectangle of one, or computed from some."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: tuple[str, ...]
    """The model's names; of a rectangle the only one, of a computed tensor all that it is computed from."""
    window: tuple[Interval, ...] | None
    """The rectangle, an interval per dimension of its source, whose row-major elements are stored; None: computed."""


def trace_reverted(model: PreTrainedModel, tensors: Mapping[str, Any]) -> dict[str, ConvertedTensor]:
    """Find out what transformers' `revert_weight_conversion` makes of a model's tensors, without touching their data.

    Experts that were fused are rectangles of one tensor; what is permuted or transposed is computed.

    Args:
        model: The model.
        tensors: Its names -> anything with a shape and a dtype; these are those of the whole tensors.

    Returns:
        Stored name -> what it is, in transformers' order.
    """
    metas = {
        name: torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()
    }
    tracer = _Tracer(metas)
    with tracer:
        reverted = revert_weight_conversion(view_as_alias(model), dict(metas))
    return {name: tracer.describe(result) for name, result in reverted.items()}


class _Tracer(TorchFunctionMode):
    """Follows meta tensors through functions of torch: by its storage, each is known to be of some sources."""

    def __init__(self, metas: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._metas = metas
        self._order = {name: number for number, name in enumerate(metas)}
        self._sources: dict[int, frozenset[str]] = {}
        self._computed: set[int] = set()
        self._kept: list[torch.UntypedStorage] = []  # the address of one that is freed may be used again
        for name, meta in metas.items():
            self._know(meta, frozenset((name,)))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _COPIES:
            return args[0]
        result = func(*args, **(kwargs or {}))
        read = [self._sources.get(_storage_id(tensor), frozenset()) for tensor in _tensors_in((args, kwargs))]
        sources = frozenset[str]().union(*read)
        if sources:
            for tensor in _tensors_in((result, kwargs.get("out") if kwargs else None)):
                self._know_new(tensor, sources)
            if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
                self._know_written(args[0], sources)
        return result

    def describe(self, result: torch.Tensor) -> ConvertedTensor:
        """What a result is of the sources."""
        sources = self._sources.get(_storage_id(result), frozenset())
        window = None
        if len(sources) == 1 and _storage_id(result) not in self._computed:
            window = _rectangle(self._metas[next(iter(sources))], result)
        in_order = tuple(sorted(sources, key=self._order.__getitem__))
        return ConvertedTensor(tuple(result.shape), result.dtype, in_order, window)

    def _know_new(self, tensor: torch.Tensor, sources: frozenset[str]) -> None:
        if _storage_id(tensor) not in self._sources:
            self._know_written(tensor, sources)

    def _know_written(self, tensor: torch.Tensor, sources: frozenset[str]) -> None:
        self._know(tensor, sources)
        self._computed.add(_storage_id(tensor))

    def _know(self, tensor: torch.Tensor, sources: frozenset[str]) -> None:
        self._kept.append(tensor.untyped_storage())
        self._sources[_storage_id(tensor)] = sources


def _rectangle(source: torch.Tensor, result: torch.Tensor) -> tuple[Interval, ...] | None:
    """The rectangle of a contiguous source that a view of it shows element by element; None: it shows another order."""
    if result.dtype != source.dtype:
        return None
    if result.numel() == 0:
        return tuple((0, size) for size in source.shape) if source.numel() == 0 else None
    first = int(result.storage_offset())
    last = first + sum((size - 1) * step for size, step in zip(result.shape, result.stride(), strict=True))
    window = tuple(
        (start, stop + 1) for start, stop in zip(_coordinate(source, first), _coordinate(source, last), strict=True)
    )
    try:
        expected = source[tuple(slice(*interval) for interval in window)].view(result.shape)
    except (RuntimeError, IndexError):
        return None
    return window if _steps(expected) == _steps(result) else None


def _coordinate(source: torch.Tensor, offset: int) -> Iterator[int]:
    """Where an element of a contiguous tensor stands."""
    for step in source.stride():
        index, offset = divmod(offset, step)
        yield index


def _steps(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that matter."""
    return tuple(step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def _storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The meta tensors in an argument or a result, in nested lists, tuples and mappings too."""
    if isinstance(value, torch.Tensor):
        if value.is_meta and type(value) is torch.Tensor:
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
