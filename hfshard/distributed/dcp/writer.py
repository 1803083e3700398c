"""Saves of torch.distributed.checkpoint as Hugging Face checkpoints: each rank writes its part of each file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch.distributed as dist
import torch.distributed.checkpoint.storage as dcp_storage
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

from hfshard._util.addresses import is_address
from hfshard._util.arguments import absolute_path, names_files
from hfshard._util.text import error_words
from hfshard.constants import DEFAULT_MAX_SHARD_SIZE
from hfshard.disk.fsops import sync
from hfshard.distributed.dcp.chunks import check_held, chunk_box, state_dict_of
from hfshard.distributed.dcp.staged_save import Place, StagedSave, open_staged
from hfshard.distributed.dcp.write_items import (
    check_items,
    chunk_bytes,
    chunk_of,
    data_of,
    described_items,
    resolved_chunk,
    united_layouts,
    write_chunk,
)
from hfshard.errors import InvalidArgumentError, InvalidPathError, RankFailedError
from hfshard.format.digests import Checksum
from hfshard.saving.save_request import SaveOptions
from hfshard.shards.shard_plan import Packing

_SHOWN: Final = 5
"""Names in a message."""


class StorageWriter(dcp_storage.StorageWriter):
    """Lets torch.distributed.checkpoint save a Hugging Face checkpoint, durably and all or nothing.

    `dcp.save` and `dcp.async_save` take it. The files are those of `hfshard.save_state_dict` of the whole state dict,
    with the names that the planner gives ("model.weight" for `{"model": {"weight": ...}}`); names that share a tensor
    are stored one by one. The checkpoint that is there loads until the new one is complete.

    Every rank of the process group calls, and all see the same directory. Each writes and flushes its own parts; the
    coordinating rank reads the files back for their checksums, and commits.

    Errors of any rank are raised on every rank, as torch.distributed.checkpoint does: a `CheckpointException` whose
    `failures` have the errors themselves.

    Args:
        path: The directory, made if it is missing; `checkpoint_id` of `dcp.save` takes its place.
        max_shard_size, packing, variant, metadata, checksum, progress: As in `hfshard.save_state_dict`. Without a
            checksum, nothing but a few bytes of each tensor is read back.

    Example:
        import torch.distributed.checkpoint as dcp

        dcp.save(state_dict, storage_writer=hfshard.distributed.StorageWriter("out", max_shard_size="5GB"))
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
        packing: Packing = "greedy",
        variant: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        checksum: Checksum | None = "sha256",
        progress: bool | None = None,
    ) -> None:
        self.checkpoint_id = None if path is None else _directory_path(path, "path")
        self._options = SaveOptions(
            max_shard_size=max_shard_size,
            packing=packing,
            variant=variant,
            metadata=metadata or {},
            checksum=checksum,
            progress=progress,
        )
        self._save: StagedSave | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it may be the path of a directory."""
        text = os.fspath(checkpoint_id)
        return bool(text) and "://" not in text and not os.path.isfile(text)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, maybe into another directory."""
        self._undo(RankFailedError("The save before this one was not completed."))
        if checkpoint_id is not None:
            self.checkpoint_id = _directory_path(checkpoint_id, "checkpoint_id")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take the role of a rank.

        Raises:
            InvalidArgumentError: There is no path, or each rank is to save by itself.
        """
        self._undo(RankFailedError("The save before this one was not completed."))
        if self.checkpoint_id is None:
            raise InvalidArgumentError("Where to save? Give StorageWriter a path, or dcp.save a checkpoint_id.")
        if not kwargs.get("use_collectives", True):
            raise InvalidArgumentError(
                "use_collectives=False saves a checkpoint of each rank, and the ranks' parts make one Hugging Face "
                "checkpoint. Leave it out."
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse, on every rank, what no Hugging Face checkpoint holds.

        Raises:
            UnstorableTensorError: A value is no tensor, or the format can't store it.
            InvalidArgumentError: The planner sends only what changed since the save before.
        """
        if not plan.usable:
            raise _no_plan_caching()
        check_items(plan.items)
        return replace(plan, storage_data=described_items(plan))

    @names_files("checkpoint_id")
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinating rank: check that the parts of all ranks make whole tensors, and make the files.

        Raises:
            UnstorableTensorError: They do not.
            Everything that `hfshard.save_state_dict` raises before it writes.
        """
        assert self.checkpoint_id is not None
        self._save = StagedSave(self.checkpoint_id, self._options, united_layouts(plans))
        places = self._save.places
        ordered = []
        for plan in plans:
            own = {item.index.fqn: places[item.index.fqn] for item in plan.items}
            ordered.append(replace(plan, storage_data=_Orders(self._save.token, own)))
        return ordered

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[dcp_storage.WriteResult]]:
        """Write and flush this rank's parts.

        An error on another rank than the coordinating one is returned to it: so it ends the save, and all ranks raise.
        """
        try:
            written = self._write(plan, planner)
        except BaseException as error:
            if self._undo(error):
                raise
            rank = dist.get_rank() if dist.is_initialized() else 0
            failure = _Failure(rank, error_words(error))
            written = [dcp_storage.WriteResult(MetadataIndex("failure"), 0, failure)]
        future: Future[list[dcp_storage.WriteResult]] = Future()
        future.set_result(written)
        return future

    @names_files("checkpoint_id")
    def finish(self, metadata: Metadata, results: list[list[dcp_storage.WriteResult]]) -> None:
        """On the coordinating rank, when all have written: commit.

        Raises:
            RankFailedError: A rank could not write; the old checkpoint stays.
            Everything that `hfshard.save_state_dict` raises.
        """
        save = self._save
        assert save is not None
        failures = [one.storage_data for written in results for one in written if type(one.storage_data) is _Failure]
        if failures:
            words = "; ".join(f"rank {rank} failed with {problem}" for rank, problem in failures)
            error = RankFailedError(
                f"Nothing was saved into '{save.directory}', and what was there before stays: {words}",
                rank=failures[0].rank,
                path=save.directory,
            )
            self._undo(error)
            raise error
        self._save = None
        save.commit()

    @names_files("checkpoint_id")
    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[dcp_storage.WriteResult]:
        orders = plan.storage_data
        if type(orders) is not _Orders or getattr(planner, "_enable_plan_caching", False):
            raise _no_plan_caching()
        state_dict = state_dict_of(planner)
        items = [(item, data_of(item)) for item in plan.items]
        for item, data in items:
            check_held(item.index.fqn, state_dict.get(item.index.fqn), chunk_box(chunk_of(data)), "save")
        with ExitStack() as opened:
            files: dict[str, int] = {}
            for item, data in items:
                path, start = orders.places[item.index.fqn]
                if path not in files:
                    files[path] = open_staged(path, orders.token)
                    opened.callback(os.close, files[path])
                if chunk_bytes(data):
                    write_chunk(files[path], start, data, resolved_chunk(item, data, planner))
            for path, fd in files.items():
                sync(fd, path)
        return [
            dcp_storage.WriteResult(item.index, chunk_bytes(data), orders.places[item.index.fqn].path)
            for item, data in items
        ]

    def _undo(self, error: BaseException) -> bool:
        """End a save that has begun and did not come to its commit; False if there is none on this rank."""
        save = self._save
        self._save = None
        if save is not None:
            save.undo(error)
        return save is not None


class _Orders(NamedTuple):
    """What the coordinating rank tells another one."""

    token: bytes
    """See `StagedSave`."""
    places: Mapping[str, Place]
    """FQN -> where the tensor goes."""


class _Failure(NamedTuple):
    """Why a rank could not write."""

    rank: int
    """In the default process group."""
    problem: str


def _no_plan_caching() -> InvalidArgumentError:
    return InvalidArgumentError(
        "The planner sends plans only where they have changed, and hfshard's writer needs them whole. "
        "Leave out enable_plan_caching=True."
    )


def _directory_path(path: str | os.PathLike[str], argument: str) -> str:
    """The absolute path of a directory.

    Raises:
        InvalidPathError: It is the address of a store: the ranks' parts are put together in files on a disk.
    """
    directory = absolute_path(path, argument)
    if is_address(directory):
        raise InvalidPathError(
            f"{argument}={directory!r} is the address of a store, and StorageWriter saves into directories. Call "
            "hfshard.save_state_dict(state_dict, address) on every rank.",
            path=directory,
        )
    return directory
