"""What the leader of a save tells the others at its end: the index, or only its digest where they can read it."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from os.path import dirname
from typing import Self

from hfshard.constants import MAX_INDEX_BYTES
from hfshard.disk.safe_open import read_small
from hfshard.distributed.status import SaveStatus
from hfshard.errors import HfshardError, RankFailedError
from hfshard.format.digests import sha256_of
from hfshard.format.index import CheckpointIndex, FileDigest


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """How a save ended well.

    An index of many tensors is megabytes, and one process keeps the store that serves all ranks. So ranks that see the
    directory read the index there, and know by its digest that it is the one.
    """

    index_digest: str | None
    """sha256 of the index file; None: the checkpoint is a single file."""
    listing_digest: str
    """What tells the leader's tensors from others."""

    @classmethod
    def tell(cls, status: SaveStatus, index: CheckpointIndex, listing_digest: str) -> None:
        """Tell it, on the leader, and so end the operation."""
        is_sharded = len({*index.weight_map.values()}) > 1
        outcome = cls(sha256_of(index.to_json()) if is_sharded else None, listing_digest)
        with suppress(RankFailedError):  # the store is gone, but it is done
            status.put_key("result", json.dumps(asdict(index)).encode())
        status.finish(json.dumps(asdict(outcome)).encode())

    @classmethod
    def awaited(cls, status: SaveStatus) -> Self:
        """Wait for it, on another rank.

        Raises:
            RankFailedError: A rank failed or died before.
        """
        return cls(**json.loads(status.finish()))

    def index(self, status: SaveStatus, path: str) -> CheckpointIndex:
        """The index: read from its file, where this rank sees the one that the leader has written, or told by it.

        Args:
            status: Of the save.
            path: Of the index file, if there is one.
        """
        if self.index_digest is not None:
            with suppress(OSError, HfshardError):  # another machine's disk, or another save came after
                raw, _ = read_small(path, dirname(path), MAX_INDEX_BYTES)
                if sha256_of(raw) == self.index_digest:
                    return CheckpointIndex.from_json(raw, path)
        value = json.loads(status.await_key("result", status.leader))
        value["files"] = {name: FileDigest(**digest) for name, digest in value["files"].items()}
        value["undeclared_ties"] = tuple(value["undeclared_ties"])
        return CheckpointIndex(**value)
