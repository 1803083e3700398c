"""What one save of a training state writes: three sets of tensors, and a tree of everything else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from hfshard.save import is_pretrained, request_of
from hfshard.size import parse_size
from hfshard.staging import SaveRequest
from hfshard.state_dict import collect_state_dict, unwrap
from hfshard.storage.integrity import Checksum
from hfshard.storage.names import MODEL_BASE, WeightNames
from hfshard.storage.tensor_bytes import tensor_nbytes
from hfshard.tied import find_ties
from hfshard.training.optimizer import pack_optimizer
from hfshard.training.padded_json import padded_json
from hfshard.training.rng import rng_state
from hfshard.training.scheduler import pack_scheduler
from hfshard.training.state import TrainingState
from hfshard.training.tree import pack

TREE_FORMAT: Final = 1
"""Of `training_state.json`."""

PARTS: Final = (MODEL_BASE, "optimizer", "state")
"""The sets of tensors, by how the names of their files begin."""


@dataclass(frozen=True, slots=True)
class Collected:
    """All that one save writes."""

    requests: dict[str, SaveRequest]
    """By part; those that hold tensors, or the model's config."""
    tree: bytes
    """The contents of `training_state.json`."""

    @property
    def nbytes(self) -> int:
        """Bytes of tensors."""
        return sum(tensor_nbytes(tensor) for request in self.requests.values() for tensor in request.tensors.values())


def collect(
    state: TrainingState, extra: Any, max_shard_size: int | str, checksum: Checksum | None, progress: bool | None
) -> Collected:
    """Look at every part of a training state; nothing is changed, drawn or copied.

    Args:
        state: The parts.
        extra: More to be stored: what `tree.pack` takes.
        max_shard_size: Of each set of tensors.
        checksum: Of each file.
        progress: For the bar.

    Raises:
        UnstorableTensorError: A value has no form in a file; the message says where it stands.
        InvalidArgumentError: An optimizer has a parameter without a name.
    """
    limit = parse_size(max_shard_size)
    model, names = state.components.get("model"), state.parameter_names()
    optimizer_tensors: dict[str, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    components: dict[str, Any] = {}
    for name, part in state.components.items():
        kind = state.kinds[name]
        tree: Any
        if name == "model":
            tree = pack(_no_tensors(collect_state_dict(part)), name, tensors)
        elif kind == "optimizer" and name == "optimizer":
            tree = pack_optimizer(part, names, name, optimizer_tensors)
        elif kind == "optimizer":
            tree = pack_optimizer(part, names, name, tensors, f"{name}/")
        elif kind == "scheduler":
            tree = pack_scheduler(part, name, tensors)
        else:
            tree = pack(collect_state_dict(part) if kind == "module" else part.state_dict(), name, tensors)
        components[name] = {"kind": kind, "state": tree}
    rng, extras = pack(rng_state(), "rng", tensors), pack(extra, "extra", tensors)
    raw = padded_json({"format": TREE_FORMAT, "components": components, "rng": rng, "extra": extras})
    requests = {}
    if model is not None:
        requests[MODEL_BASE] = _model_request(model, limit, checksum, progress)
    for part_name, given in (("optimizer", optimizer_tensors), ("state", tensors)):
        if given:
            requests[part_name] = _request(part_name, given, limit, checksum)
    return Collected(requests, raw)


def _model_request(model: torch.nn.Module, limit: int, checksum: Checksum | None, progress: bool | None) -> SaveRequest:
    # Under the model's own names, not those of the original checkpoint: transformers loads both, and a resume finds
    # each tensor where it was.
    own = None
    if not is_pretrained(unwrap(model)):
        own = {name: value for name, value in collect_state_dict(model).items() if isinstance(value, torch.Tensor)}
    return request_of(model, own, limit, None, save_original_format=False, checksum=checksum, progress=progress)


def _request(
    base: str, tensors: Mapping[str, torch.Tensor], max_shard_bytes: int, checksum: Checksum | None
) -> SaveRequest:
    aliases = find_ties(tensors)
    stored = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    return SaveRequest(stored, WeightNames(base=base), max_shard_bytes, checksum=checksum, aliases=aliases)


def _no_tensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """What a module's `get_extra_state` returned that is no tensor."""
    return {name: value for name, value in state_dict.items() if not isinstance(value, torch.Tensor)}
