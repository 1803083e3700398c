"""What a save writes and how, checked once; made from a state dict or a plain module."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from hfshard._util.text import parse_size
from hfshard.constants import CONFIG_NAME, DEFAULT_MAX_SHARD_SIZE
from hfshard.disk.byte_source import ByteSource
from hfshard.errors import InvalidArgumentError
from hfshard.format.digests import Checksum, check_checksum, sha256_of
from hfshard.format.file_names import MODEL_BASE, WeightNames
from hfshard.format.index import FileDigest
from hfshard.shards.shard_plan import Packing, check_packing
from hfshard.tensors.state_dict import collect_state_dict, refuse_partitioned, refuse_sharded_tensors
from hfshard.tensors.stored_tensor import TensorLike
from hfshard.tensors.tied import find_shared_tensors


class WholeModel(NamedTuple):
    """What is known of a model of which ranks may have different parts."""

    names: tuple[str, ...]
    """Of all that is stored, in the order of the index."""
    total_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """What is to be saved, collected and checked, and how."""

    tensors: Mapping[str, TensorLike] = field(default_factory=dict)
    """FQN -> tensor, or bytes in a file; each is stored once."""
    options: SaveOptions
    tied_names: Mapping[str, str] = field(default_factory=dict)
    """Name -> the stored name that shares its tensor."""
    undeclared_ties: tuple[str, ...] = ()
    """Those tied names that the config does not tie."""
    file_metadata: Mapping[str, str] = field(default_factory=dict)
    """For the `__metadata__` of every file."""
    total_parameters: int | None = None
    """For the index; None: counted from the tensors."""
    config: bytes | None = None
    """The contents of config.json."""
    drops_config: bool = False
    """Whether a config.json that is there goes, because this checkpoint has none."""
    hides_single: bool = False
    """As in `NewCheckpoint`."""
    model_files: Mapping[str, bytes] = field(default_factory=dict)
    """Other small files that belong to the checkpoint: generation config, custom code."""
    companion_files: Mapping[str, ByteSource] = field(default_factory=dict)
    """Files of another place that are copied along, and are not part of the checkpoint."""
    replaces_readme: bool = False
    """Whether a README.md among `companion_files` replaces one in a directory, which else stays as it is."""
    kept_files: tuple[tuple[str, ...], ...] = ()
    """The names in each file, where it is to hold what that of another checkpoint does; empty: by their sizes."""
    separate_names: frozenset[str] = frozenset()
    """Tensors that get files of their own, because they change more or less often than the rest."""
    name_order: tuple[str, ...] = ()
    """Where this rank lacks some names, as a pipeline stage does: those of all ranks, in the order of the index."""
    look_at_whole: Callable[[], WholeModel | None] | None = None
    """Finds out what the whole model is, where ranks turn out to have different names; None: it can't be known."""

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


def request_from_state_dict(state_dict: Mapping[str, Any], options: SaveOptions) -> SaveRequest:
    """Request the save of a state dict: names that share one tensor are stored once.

    Raises:
        InvalidArgumentError: It is not a mapping.
        UnstorableTensorError: It has a ShardedTensor of FSDP1, or parameters that DeepSpeed has partitioned.
    """
    if not isinstance(state_dict, Mapping):
        raise InvalidArgumentError(f"state_dict must map names to tensors, got a {type(state_dict).__name__}.")
    refuse_sharded_tensors(state_dict)
    refuse_partitioned(state_dict)
    tied_names = find_shared_tensors(state_dict)
    stored = {name: tensor for name, tensor in state_dict.items() if name not in tied_names}
    return SaveRequest(tensors=stored, options=options, tied_names=tied_names)


def request_from_module(model: nn.Module, state_dict: Mapping[str, Any] | None, options: SaveOptions) -> SaveRequest:
    """Request the save of a module that transformers does not know.

    Args:
        model: Wrappers around it are looked through.
        state_dict: What to save in place of the model's own; not mutated.
        options: How.
    """
    return request_from_state_dict(collect_state_dict(model) if state_dict is None else dict(state_dict), options)


# How a checkpoint is saved: what every function that saves takes, checked once.


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How a checkpoint is saved.

    Raises:
        InvalidSizeError, InvalidSizeTypeError: max_shard_size is not in the grammar of `parse_size`.
        InvalidArgumentError: Any other value is not one of those that are allowed.
    """

    max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE
    """Bytes, or text such as "5GB": the most that a file has, unless it holds exactly one tensor."""
    variant: str | None = None
    """Part of the files' names, as in transformers."""
    base: str = MODEL_BASE
    """How the files' names begin."""
    packing: Packing = "greedy"
    """Which tensors share a file: filled in their order, or as few files as are found."""
    checksum: Checksum | None = "sha256"
    """Of every file; None writes none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON values for the index's `metadata`, or for the `__metadata__` of a single file."""
    save_original_format: bool = True
    """For transformers models: under the names of the original checkpoint."""
    is_collective: bool = False
    """Whether every rank of the process group makes this save with the others, whatever its tensors are."""
    progress: bool | None = None
    """A bar on stderr; None: on a terminal."""
    drop_signature: bool = False
    """Whether `model.sig` of the directory is removed if it no longer holds; else a warning says so."""
    headers_count: bool = True
    """Whether `max_shard_size` is that of a file with its header; else that of its tensors, as in transformers."""
    max_shard_bytes: int = field(init=False)
    """`max_shard_size` in bytes."""
    names: WeightNames = field(init=False)
    """What the files are called."""

    def __post_init__(self) -> None:
        """Check every value."""
        object.__setattr__(self, "max_shard_bytes", parse_size(self.max_shard_size))
        check_checksum(self.checksum)
        check_packing(self.packing)
        object.__setattr__(self, "names", WeightNames(self.variant, self.base))
        _check_metadata(self.metadata)


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    try:
        json.dumps(dict(metadata), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"metadata must be JSON, without NaN and objects: {error}. Write the values as text."
        ) from error
