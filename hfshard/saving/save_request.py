"""Save requests: the data and options of a save, checked once; built from a state dict or a plain module."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from hfshard._util.arguments import parse_size
from hfshard.constants import CONFIG_NAME, DEFAULT_MAX_SHARD_SIZE, MAX_JSON_DEPTH
from hfshard.disk.byte_source import ByteSource
from hfshard.errors import InvalidArgumentError
from hfshard.format.file_names import MODEL_BASE, WeightNames
from hfshard.format.index import Checksum, FileDigest, check_checksum, sha256_of
from hfshard.format.strict_json import is_too_deep
from hfshard.shards.shard_plan import Packing, check_packing
from hfshard.tensors.state_dict import collect_state_dict, has_spread, reject_sharded_tensors
from hfshard.tensors.stored_tensor import TensorLike, is_complete_tensor
from hfshard.tensors.tied import find_shared_tensors
from hfshard.tensors.zero3 import with_partitioned


class WholeModel(NamedTuple):
    """Facts about a complete model whose parts may be on different ranks."""

    names: tuple[str, ...]
    """Names of all stored tensors, in the order of the index."""
    total_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Everything that a save writes, collected and checked, with the options."""

    tensors: Mapping[str, TensorLike] = field(default_factory=dict)
    """FQN -> tensor, or bytes in a file; each is stored once."""
    options: SaveOptions
    tied_names: Mapping[str, str] = field(default_factory=dict)
    """Name -> the stored name that shares its tensor."""
    undeclared_ties: tuple[str, ...] = ()
    """Tied names that the config does not tie."""
    file_metadata: Mapping[str, str] = field(default_factory=dict)
    """Entries for the `__metadata__` of every file."""
    total_parameters: int | None = None
    """Number for the index; None: counted from the tensors."""
    needs_tensors: bool = False
    """Reject a save without any tensor: a state dict was given in the place of a model's tensors."""
    config: bytes | None = None
    """The contents of config.json."""
    drops_config: bool = False
    """Remove an existing config.json, because this checkpoint has none."""
    hides_single: bool = False
    """Hide the old single file during the commit; see `StagedCheckpoint`."""
    model_files: Mapping[str, bytes] = field(default_factory=dict)
    """Other small files that belong to the checkpoint: generation config, custom code."""
    companion_files: Mapping[str, ByteSource] = field(default_factory=dict)
    """Files of another place that are copied along, and are not part of the checkpoint."""
    replaces_readme: bool = False
    """Let a README.md among `companion_files` replace an existing one in a directory."""
    kept_files: tuple[tuple[str, ...], ...] = ()
    """The names in each file, to keep the files of another checkpoint; empty: files are planned by size."""
    separate_names: frozenset[str] = frozenset()
    """Tensors that get separate files, because they change more or less often than the rest."""
    name_order: tuple[str, ...] = ()
    """If this rank lacks some names, as a pipeline stage does: the names of all ranks, in the order of the index."""
    describe_full_model: Callable[[], WholeModel | None] | None = None
    """Function that describes the full model, if ranks turn out to have different names; None: it can't be known."""

    @property
    def small_files(self) -> dict[str, bytes]:
        """The config and the model's other small files."""
        return {**self.model_files, **({CONFIG_NAME: self.config} if self.config is not None else {})}

    @property
    def model_file_digests(self) -> dict[str, FileDigest]:
        """Name -> digest of the small JSON files that belong to the checkpoint."""
        return {
            name: FileDigest(size=len(raw), sha256=sha256_of(raw))
            for name, raw in sorted(self.small_files.items())
            if name.endswith(".json")
        }


def needs_all_ranks(request: SaveRequest) -> bool:
    """Return whether other ranks are known or declared to have parts of its tensors, or tensors that it lacks."""
    return request.options.is_collective or bool(request.name_order) or has_spread(request.tensors)


def request_from_state_dict(state_dict: Mapping[str, Any], options: SaveOptions) -> SaveRequest:
    """Build the request for a state dict; names that share one tensor are stored once.

    Raises:
        InvalidArgumentError: It is not a mapping.
        UnstorableTensorError: It has a ShardedTensor of FSDP1, or copies of parameters that DeepSpeed has partitioned.
    """
    if not isinstance(state_dict, Mapping):
        raise InvalidArgumentError(
            f"state_dict must map names to tensors, got a {type(state_dict).__name__}. "
            "To save a module, call save_model."
        )
    state_dict = with_parts(state_dict)
    tied_names = find_shared_tensors(state_dict)
    stored = {name: tensor for name, tensor in state_dict.items() if name not in tied_names}
    return SaveRequest(tensors=stored, options=options, tied_names=tied_names)


def with_parts(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a state dict that has this rank's part of each parameter that DeepSpeed has partitioned.

    Raises:
        UnstorableTensorError: It has a ShardedTensor of FSDP1, or copies of such parameters.
    """
    if all(map(is_complete_tensor, tensors.values())):
        return dict(tensors)
    reject_sharded_tensors(tensors)
    return with_partitioned(tensors)


def request_from_module(model: nn.Module, state_dict: Mapping[str, Any] | None, options: SaveOptions) -> SaveRequest:
    """Build the request for a module that transformers does not know; wrappers around it are removed.

    A state dict is saved in place of the model's own, and is not mutated.
    """
    request = request_from_state_dict(collect_state_dict(model) if state_dict is None else dict(state_dict), options)
    return replace(request, needs_tensors=state_dict is not None and has_tensors(model))


def has_tensors(model: nn.Module) -> bool:
    """Return whether a module has a parameter or a buffer."""
    return next(chain(model.parameters(), model.buffers()), None) is not None


# Options of a save, taken by every function that saves, and checked once.


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Options for saving a checkpoint.

    Raises:
        InvalidSizeError, InvalidSizeTypeError: max_shard_size is not in the grammar of `parse_size`.
        InvalidArgumentError: Any other value is not allowed.
    """

    max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE
    """Limit for each file, in bytes or as text such as "5GB"; a file with exactly one tensor may exceed it."""
    variant: str | None = None
    """Part of the files' names, as in transformers."""
    base: str = MODEL_BASE
    """Beginning of the files' names."""
    packing: Packing = "greedy"
    """Grouping of tensors into files: in their order, or into as few files as can be found."""
    checksum: Checksum | None = "sha256"
    """Kind of checksum recorded for every file; None: no checksums."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON values for the index's `metadata`, or for the `__metadata__` of a single file."""
    save_original_format: bool = True
    """For transformers models: save under the names of the original checkpoint."""
    is_collective: bool = False
    """True if every rank of the process group takes part in this save, whatever its tensors are."""
    progress: bool | None = None
    """A bar on stderr; None: on a terminal."""
    drop_signature: bool = False
    """Remove the directory's `model.sig` if it is stale; otherwise log a warning."""
    headers_count: bool = True
    """Count the header towards `max_shard_size`; if False, count only the tensors, as transformers does."""
    max_shard_bytes: int = field(init=False)
    """`max_shard_size` in bytes."""
    names: WeightNames = field(init=False)
    """The files' names."""

    def __post_init__(self) -> None:
        """Check every value."""
        object.__setattr__(self, "max_shard_bytes", parse_size(self.max_shard_size))
        check_checksum(self.checksum)
        check_packing(self.packing)
        object.__setattr__(self, "names", WeightNames(self.variant, self.base))
        if self.metadata:
            _check_metadata(self.metadata)


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    try:
        raw = json.dumps(dict(metadata), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"metadata must be JSON, without NaN or other objects: {error}. Pass the values as text."
        ) from error
    if is_too_deep(f"[{raw}]".encode()):  # an index has it one level below
        raise InvalidArgumentError(
            f"metadata is nested too deep: JSON of a checkpoint has at most {MAX_JSON_DEPTH} levels, two of them its "
            "index's. Pass the values as text."
        )
