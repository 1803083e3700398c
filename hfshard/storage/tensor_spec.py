"""What a plan has to know of a tensor: its name, and how the format stores it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hfshard.storage.stored_tensor import Storable, stored_form
from hfshard.storage.tensor_bytes import check_storable


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What the plan knows of one tensor."""

    name: str
    dtype: str
    """The format's name: "F32"."""
    shape: tuple[int, ...]
    """As the format counts it."""
    nbytes: int


def tensor_specs(state_dict: Mapping[str, Storable]) -> list[TensorSpec]:
    """What the plan needs to know of each tensor, in state dict order.

    Raises:
        UnstorableTensorError: A value that the format has no bytes for.
    """
    specs = []
    for name, tensor in state_dict.items():
        check_storable(name, tensor)
        form = stored_form(tensor)
        specs.append(TensorSpec(name, form.dtype, form.shape, form.nbytes))
    return specs
