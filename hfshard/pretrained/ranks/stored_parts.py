"""What this rank has of each tensor that transformers would store, by its name on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any, Final

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hfshard.distributed.layout import MeshLayout, Placement, held_box
from hfshard.distributed.spread_tensor import SpreadTensor, with_spread_tensors
from hfshard.errors import UnstorableTensorError
from hfshard.pretrained.class_alias import view_as_alias
from hfshard.pretrained.ranks.conversion_views import ConvertedTensor, trace_reverted
from hfshard.tensors.state_dict import is_dtensor

_GATHERED_BYTES: Final = 256 * 1024**2
"""At most so much is whole on each rank at a time, or else one conversion's sources."""


def stored_parts(model: PreTrainedModel, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Revert transformers' weight conversion of tensors of which each rank has a part.

    What is a rectangle of a tensor needs nobody else. What is computed (permuted for RoPE, transposed, interleaved) is
    computed by all ranks from the whole sources, a few at a time, and each keeps some rows: then every rank that has a
    part of the sources must call it.

    Args:
        model: The model.
        tensors: Name -> tensor; DTensors are spread. Not changed.

    Returns:
        Stored name -> what it is, in transformers' order: the tensor itself; of a DTensor that is converted a
        `SpreadTensor`.

    Raises:
        UnstorableTensorError: A DTensor can't be stored.
    """
    parts = with_spread_tensors(tensors)
    traced = trace_reverted(model, tensors)
    stored: dict[str, Any] = dict.fromkeys(traced)
    computed = {}
    for name, tensor in traced.items():
        if tensor.window is None:
            computed[name] = tensor
        else:
            source = tensor.sources[0]
            stored[name] = tensors[source] if _is_all_of(tensors[source], tensor) else _rectangle(parts[source], tensor)
    for batch in _batches(computed, tensors):
        stored.update(_computed_parts(model, tensors, batch))
    return stored


def _is_all_of(source: Any, tensor: ConvertedTensor) -> bool:
    return tensor.window == tuple((0, size) for size in source.shape) and tuple(source.shape) == tensor.shape


def _rectangle(source: Any, tensor: ConvertedTensor) -> Any:
    window = tensor.window or ()
    if isinstance(source, SpreadTensor):
        return source.view(window, tensor.shape)
    return source[tuple(slice(*interval) for interval in window)].reshape(tensor.shape)


def _batches(
    computed: Mapping[str, ConvertedTensor], tensors: Mapping[str, Any]
) -> Iterator[dict[str, ConvertedTensor]]:
    """Group what is computed, so that the sources of a group are few; those that share sources stay together."""
    batch: dict[str, ConvertedTensor] = {}
    sources: set[str] = set()
    for group in _with_common_sources(computed):
        more = {name for tensor in group.values() for name in tensor.sources}
        if batch and _nbytes(tensors, sources | more) > _GATHERED_BYTES:
            yield batch
            batch = {}
            sources = set()
        batch |= group
        sources |= more
    if batch:
        yield batch


def _with_common_sources(computed: Mapping[str, ConvertedTensor]) -> list[dict[str, ConvertedTensor]]:
    """In the same order on every rank."""
    group_of: dict[str, dict[str, ConvertedTensor]] = {}
    for name, tensor in computed.items():
        touched = [group_of[source] for source in tensor.sources if source in group_of]
        merged = {key: one for group in touched for key, one in group.items()} | {name: tensor}
        for one in merged.values():
            group_of.update(dict.fromkeys(one.sources, merged))
    return list({id(group): group for group in group_of.values()}.values())


def _nbytes(tensors: Mapping[str, Any], names: Iterable[str]) -> int:
    return sum(prod(tensors[name].shape) * tensors[name].dtype.itemsize for name in names)


def _computed_parts(
    model: PreTrainedModel, tensors: Mapping[str, Any], batch: Mapping[str, ConvertedTensor]
) -> dict[str, Any]:
    """Compute some stored tensors from the whole sources, and keep this rank's rows of them."""
    needed = {source: None for tensor in batch.values() for source in tensor.sources}
    values: dict[str, torch.Tensor] = {
        name: torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()
    }
    spread = {name: SpreadTensor.of(tensors[name], name).mesh for name in needed if is_dtensor(tensors[name])}
    for name in needed:
        values[name] = _whole(tensors[name])
    results = revert_weight_conversion(view_as_alias(model), values)
    parts: dict[str, Any] = {}
    for name, tensor in batch.items():
        mesh = next((spread[source] for source in tensor.sources if source in spread), None)
        if results[name].is_meta:
            raise UnstorableTensorError(
                f"Can't store {name!r}: transformers computes it from tensors that are spread over ranks, and from "
                "which ones is not known. Save with save_original_format=False.",
                fqn=name,
            )
        parts[name] = results[name] if mesh is None else _own_rows(results[name], mesh.ranks)
    return parts


def _whole(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor
    return whole.detach()


def _own_rows(whole: torch.Tensor, ranks: tuple[int, ...]) -> SpreadTensor:
    """Keep the rows of a tensor that are this rank's, where all ranks have computed it."""
    shape = tuple(whole.shape)
    layout = MeshLayout((len(ranks),), ranks, (Placement(0 if shape else None),))
    coordinate = (ranks.index(torch.distributed.get_rank()),)
    box = held_box(shape, layout, coordinate)
    rows = whole[tuple(slice(*(intervals[0] if intervals else (0, 0))) for intervals in box)].clone()
    return SpreadTensor(shape, whole.dtype, layout, shape, None, coordinate, rows)
