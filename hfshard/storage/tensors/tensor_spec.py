"""What a plan needs to know about a tensor: its name, and how the format stores it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hfshard._util.threads import no_collection
from hfshard.storage.tensors.dtypes import DTYPE_NAMES
from hfshard.storage.tensors.tensor_bytes import check_storable, is_plain
from hfshard.storage.tensors.tensor_layout import TensorLike, tensor_layout


class TensorSpec(NamedTuple):
    """What a plan knows about one tensor (a named tuple for the same reason as `TensorLayout`)."""

    name: str
    dtype: str
    """The format's name: "F32"."""
    shape: tuple[int, ...]
    """As the format counts it."""
    nbytes: int


def tensor_specs(state_dict: Mapping[str, TensorLike]) -> list[TensorSpec]:
    """Describe each tensor for a plan, in state dict order.

    Raises:
        UnstorableTensorError: There is a value that the format can't store.
    """
    specs = []
    with no_collection():
        for name, tensor in state_dict.items():
            if is_plain(tensor, name):
                specs.append(TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes))
                continue
            check_storable(name, tensor)
            dtype, shape, nbytes, _ = tensor_layout(tensor)
            specs.append(TensorSpec(name, dtype, shape, nbytes))
    return specs
