"""How a checkpoint is saved: what every function that saves takes, checked once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hfshard._util.text import parse_size
from hfshard.constants import DEFAULT_MAX_SHARD_SIZE
from hfshard.errors import InvalidArgumentError
from hfshard.format.digests import Checksum, check_checksum
from hfshard.format.file_names import MODEL_BASE, WeightNames
from hfshard.shards.shard_plan import Packing, check_packing


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
