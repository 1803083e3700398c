"""A tensor of which each rank has an interval of the row-major elements: the counterpart of a DTensor's rectangle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
import torch.distributed as dist

from hfshard.errors import InvalidArgumentError


class PartOfTensor:
    """A tensor to store of which this rank has a part, and which is not a DTensor."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The place of a tensor in a flat one that is cut over ranks as `torch.chunk` cuts it, or of which all have all."""

    ranks: tuple[int, ...]
    """Global ranks, in the order of their parts."""
    is_cut: bool
    """False: every rank has the complete flat tensor."""
    elements: int
    """Of the flat tensor on all ranks, without the padding at its end."""
    first: int
    """The tensor's first element in the flat one."""

    def held(self, elements: int, rank: int) -> tuple[int, int]:
        """Return the interval of the tensor's own elements that a rank has.

        Args:
            elements: Of the tensor.
            rank: A global one, among `ranks`.

        Example:
            >>> FlatLayout(ranks=(4, 5), is_cut=True, elements=9, first=3).held(6, 5)
            (2, 6)
        """
        if not self.is_cut:
            return 0, elements
        length = -(-self.elements // len(self.ranks))
        begin = self.ranks.index(rank) * length - self.first
        start = min(max(begin, 0), elements)
        return start, max(start, min(begin + length, elements))


_aten = torch.ops.aten
_COPIES: Final = frozenset(
    (_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default, _aten.empty_like.default)
)


class FlatTensor(torch.Tensor, PartOfTensor):
    """A tensor of some shape and dtype, of which this process has `local`: some of its elements, in one dimension.

    Like a DTensor it is a torch.Tensor, so that code which looks at names, shapes and dtypes need not know of it. torch
    computes nothing with it.
    """

    local: torch.Tensor
    """This rank's elements; it shares memory with the tensor that they are part of."""
    flat: FlatLayout

    @staticmethod
    def __new__(cls, local: torch.Tensor, shape: Sequence[int], flat: FlatLayout) -> FlatTensor:
        """Describe a tensor; nothing is copied."""
        base: Any = torch.Tensor
        made: FlatTensor = base._make_wrapper_subclass(cls, tuple(shape), dtype=local.dtype, device=local.device)
        made.local = local.detach()
        made.flat = flat
        return made

    @classmethod
    def within(cls, part: torch.Tensor, shape: Sequence[int], flat: FlatLayout, rank: int) -> FlatTensor:
        """Describe a tensor from a rank's part of the flat one, in whose memory its elements are."""
        start, stop = flat.held(prod(shape), rank)
        length = -(-flat.elements // len(flat.ranks)) if flat.is_cut else 0
        offset = flat.first - flat.ranks.index(rank) * length
        return cls(part[offset + start : offset + stop] if stop > start else part[:0], shape, flat)

    def with_local(self, local: torch.Tensor) -> FlatTensor:
        """Return a tensor that is spread in the same way, with other values."""
        return FlatTensor(local, self.shape, self.flat)

    def fill(self, values: torch.Tensor) -> None:
        """Copy this rank's elements from a tensor of the same shape that is complete, or spread in the same way."""
        with torch.no_grad():
            if isinstance(values, FlatTensor):
                self.local.copy_(values.local)
            else:
                start, stop = self.flat.held(prod(self.shape), dist.get_rank())
                self.local.copy_(values.detach().reshape(-1)[start:stop])

    def _description(self, **_: Any) -> str:
        """Describe it without its values."""
        return f"FlatTensor(shape={tuple(self.shape)}, dtype={self.dtype}, local={self.local.numel()} elements)"

    def _dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply what does nothing but copy; reject every other operation."""
        if func in _COPIES:
            return args[0].with_local(func(args[0].local, **(kwargs or {})))
        raise InvalidArgumentError(
            f"{func} needs the values of a tensor of shape {list(args[0].shape)}, of which this rank has only an "
            "interval. Gather it first: with FullyShardedDataParallel.summon_full_params(model)."
        )

    __repr__: Any = _description
    __torch_dispatch__: Any = classmethod(_dispatch)
    __torch_function__: Any = torch._C._disabled_torch_function_impl


@dataclass(frozen=True, slots=True, eq=False)
class PartOfParameter:
    """This rank's part of a module's parameter; subclasses know the framework that keeps it."""

    parameter: Any
    """The variable by which an optimizer knows it."""
    tensor: FlatTensor
    """The part of what the model computes with."""
    target: FlatTensor
    """The part that a load fills: what an optimizer steps on, if that is another tensor."""
    is_whole: bool = False
    """True if every rank has all of the parameter, too."""
    is_gathered: bool = False
    """True if that is so for a block of the program only, which may change the parameter."""

    def load(self, values: torch.Tensor) -> None:
        """Fill the part from a tensor that is complete, or spread in the same way."""
        self.target.fill(values)
        self.take_loaded()

    def take_loaded(self) -> None:
        """Do what the framework needs after `target` was filled: nothing, unless it has another copy."""
