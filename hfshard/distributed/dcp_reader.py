"""Loads of torch.distributed.checkpoint from Hugging Face checkpoints: each rank reads the bytes of its part."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from typing import Any, Final

import torch
import torch.distributed.checkpoint.storage as dcp_storage
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from hfshard._util.arguments import checked_path_text, wraps_os_errors
from hfshard.checkpoint.load_options import LoadOptions
from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.distributed.dcp_chunks import check_held, chunk_box, state_dict_of
from hfshard.distributed.layout import box_shape, clip_box
from hfshard.distributed.read_parts import BoxTarget, read_parts, stored_tensors
from hfshard.errors import CheckpointChangedError, InvalidArgumentError, StateDictMismatchError
from hfshard.format.index import Verify
from hfshard.places.source import CheckpointSource, open_source
from hfshard.tensors.state_dict import is_dtensor, local_tensor

_AT_ONCE_BYTES: Final = 256 * 1024 * 1024
"""Bytes of tensors that a planner hands out before it gets them back: it may allocate some of them for that."""


class StorageReader(dcp_storage.StorageReader):
    """Reader with which torch.distributed.checkpoint loads a Hugging Face checkpoint, of hfshard or any other library.

    Pass it to `dcp.load`. Every rank of the process group must call; each reads the bytes of its own parts from files
    that all ranks see, whatever layout they were saved in. If a tensor has another dtype than the stored one, the
    values are cast. A tensor that hfshard has stored once for several names is available under each of them.

    An error on any rank is raised on every rank, as torch.distributed.checkpoint does it: as a `CheckpointException`
    whose `failures` contain the errors themselves. Some tensors may have been filled by then.

    Args:
        path: As in `hfshard.load_state_dict`, like key, variant, use_safetensors, subfolder, revision, token,
            cache_dir, local_files_only, verify and progress. `checkpoint_id` of `dcp.load` replaces it. Every rank
            checks what verify asks for.

    Example:
        import torch.distributed.checkpoint as dcp

        dcp.load(state_dict, storage_reader=hfshard.distributed.StorageReader("out"))
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        key: str | None = None,
        variant: str | None = None,
        use_safetensors: bool | None = None,
        subfolder: str = "",
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        verify: Verify = "structure",
        progress: bool | None = None,
    ) -> None:
        self._query = CheckpointQuery(
            variant=variant,
            use_safetensors=use_safetensors,
            subfolder=subfolder,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
        )
        self._options = LoadOptions(verify=verify, progress=progress, key=key)
        self._source = None if path is None else self._source_of(path)
        self._opened = ExitStack()
        self._checkpoint: OpenCheckpoint | None = None
        self._problem: Exception | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it may be a path, a store address, or a repository name."""
        text = os.fspath(checkpoint_id)
        return bool(text) and not text.lower().startswith("file://")

    @property
    def checkpoint_id(self) -> str | None:
        """The path."""
        return None if self._source is None else self._source.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, optionally from another directory."""
        self._close()
        if checkpoint_id is not None:
            self._source = self._source_of(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Open and check the checkpoint, and describe its tensors, one chunk each. It stays open for `read_data`.

        Args:
            args: None.
            kwargs: `rank`, when torch.distributed.checkpoint asks a second time. It has caught what the first call
                raised, and some versions do not report it: the metadata returned now raises it on access.

        Raises:
            Everything that `hfshard.load_state_dict` raises before it reads tensors.
        """
        if "rank" in kwargs and self._problem is not None:
            return Metadata(_Unreadable(self._problem))  # type: ignore[arg-type]
        try:
            return self._read_metadata()
        except Exception as error:
            self._problem = error
            raise

    @wraps_os_errors("checkpoint_id")
    def _read_metadata(self) -> Metadata:
        self._close()
        if self._source is None:
            raise InvalidArgumentError(
                "There is nothing to load. Pass a path to StorageReader, or a checkpoint_id to dcp.load."
            )
        self._checkpoint = self._opened.enter_context(open_source(self._source, self._options))
        described = stored_tensors(self._checkpoint)
        return Metadata(
            state_dict_metadata={name: _metadata_of(tensor) for name, tensor in described.items()},
            planner_data={name: (name,) for name in described},
            storage_meta=StorageMeta(checkpoint_id=self.checkpoint_id),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise the error that `read_metadata` has raised, if any."""
        if self._problem is not None:
            raise self._problem

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add to the plan, for the coordinating rank, which checkpoint this rank has opened."""
        return replace(plan, storage_data=_token_of(self._open_one()))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check, on the coordinating rank, that all ranks have opened the same checkpoint.

        Raises:
            CheckpointChangedError: They have not.
        """
        tokens = {plan.storage_data for plan in plans if isinstance(plan.storage_data, str)}
        if len(tokens) > 1:
            path = self._open_one().directory
            raise CheckpointChangedError(
                f"The ranks opened different checkpoints in '{path}'. Retry when no save is running, from a directory "
                "that the machines of all ranks share.",
                path=path,
            )
        return plans

    @wraps_os_errors("checkpoint_id")
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's parts into place.

        Raises:
            UnstorableTensorError: A rank's part of a DTensor is not what torch.distributed.checkpoint says; nothing was
                read on this rank.
            StateDictMismatchError: The planner asks for what the checkpoint does not have.
            DamagedCheckpointError: A file was truncated since it was opened.
        """
        checkpoint = self._open_one()
        try:
            shapes = {name: tuple(tensor.shape) for name, tensor in stored_tensors(checkpoint).items()}
            _check_held_parts(plan.items, planner, shapes)
            for batch in _batches(plan.items, planner):
                read_parts(checkpoint, [_wanted(item, tensor, shapes) for item, tensor in batch])
                for item, tensor in batch:
                    planner.commit_tensor(item, tensor)
        finally:
            self._close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _source_of(self, path: str | os.PathLike[str]) -> CheckpointSource:
        return CheckpointSource(checked_path_text(path), self._query, takes_files=True)

    def _open_one(self) -> OpenCheckpoint:
        if self._checkpoint is None:
            raise InvalidArgumentError("The checkpoint is not open. Call read_metadata first, as dcp.load does.")
        return self._checkpoint

    def _close(self) -> None:
        self._checkpoint = None
        self._problem = None
        self._opened.close()


class _Unreadable(Mapping[str, TensorStorageMetadata]):
    """Replacement for the tensors of a checkpoint that cannot be opened: every access raises the reason."""

    def __init__(self, problem: Exception) -> None:
        self._problem = problem

    def __getitem__(self, name: str) -> TensorStorageMetadata:
        raise self._problem

    def __iter__(self) -> Iterator[str]:
        raise self._problem

    def __len__(self) -> int:
        raise self._problem


def _metadata_of(tensor: torch.Tensor) -> TensorStorageMetadata:
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * tensor.dim()), sizes=tensor.size())
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.size(), [whole])


def _token_of(checkpoint: OpenCheckpoint) -> str:
    """Return a digest of the index and the file sizes: ranks that opened the same checkpoint get the same one."""
    sizes = {file: shard.size for file, shard in sorted(checkpoint.shards.items())}
    return hashlib.sha256(checkpoint.index.to_json() + repr(sizes).encode()).hexdigest()


def _check_held_parts(items: Sequence[ReadItem], planner: LoadPlanner, stored: Collection[str]) -> None:
    """Reject DTensors of which this rank has another part than is to be read."""
    read_elements: Counter[str] = Counter()
    offsets: dict[str, tuple[int, ...]] = {}
    for item in items:
        read_elements[item.dest_index.fqn] += prod(item.lengths)
        offsets[item.dest_index.fqn] = tuple(item.dest_index.offset or ())
    for name, value in state_dict_of(planner).items():
        if is_dtensor(value) and name in stored:
            shape = tuple(local_tensor(value).shape)
            is_whole = read_elements[name] == prod(shape)
            nothing = (0,) * len(shape)
            check_held(name, value, chunk_box((offsets.get(name, nothing), shape if is_whole else nothing)), "load")


def _batches(items: Sequence[ReadItem], planner: LoadPlanner) -> Iterator[list[tuple[ReadItem, torch.Tensor]]]:
    """Get the tensors to fill from the planner, in batches that limit the memory in use."""
    batch: list[tuple[ReadItem, torch.Tensor]] = []
    nbytes = 0
    for item in items:
        tensor = planner.resolve_tensor(item)
        batch.append((item, tensor))
        nbytes += tensor.numel() * tensor.element_size()
        if nbytes >= _AT_ONCE_BYTES:
            yield batch
            batch = []
            nbytes = 0
    yield batch


def _wanted(item: ReadItem, tensor: torch.Tensor, shapes: Mapping[str, Sequence[int]]) -> tuple[str, BoxTarget]:
    """Return the stored name and the target of a read; reject what the checkpoint does not have in this shape."""
    name = item.storage_index.fqn
    box = chunk_box((tuple(item.storage_offsets), tuple(item.lengths)))
    shape = shapes.get(name, ())
    is_tensor = item.type == LoadItemType.TENSOR and len(shape) == len(box)
    if not is_tensor or clip_box(box, [(0, size) for size in shape]) != box or box_shape(box) != tuple(tensor.shape):
        raise StateDictMismatchError(
            f"The planner asked for a part of '{name}' at {list(item.storage_offsets)} of shape {list(item.lengths)}, "
            f"for a tensor of shape {list(tensor.shape)}, but the checkpoint has "
            f"{f'the shape {list(shape)}' if name in shapes else 'no such tensor'}.",
            fqn=name,
        )
    return name, BoxTarget(box, tensor)
