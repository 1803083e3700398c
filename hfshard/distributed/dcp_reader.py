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

from hfshard._util.addresses import is_address
from hfshard._util.arguments import names_files, path_text
from hfshard.checkpoint.load_options import LoadOptions
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.distributed.dcp_chunks import check_held, chunk_box, state_dict_of
from hfshard.distributed.layout import box_shape, clip_box
from hfshard.distributed.read_parts import BoxTarget, read_parts, stored_tensors
from hfshard.errors import CheckpointChangedError, InvalidArgumentError, StateDictMismatchError
from hfshard.format.digests import Verify
from hfshard.hub.resolve import CheckpointQuery
from hfshard.places.source import CheckpointSource, open_source
from hfshard.tensors.state_dict import is_dtensor, local_tensor

_AT_ONCE_BYTES: Final = 256 * 1024 * 1024
"""Of tensors that a planner hands out before it gets them back: it may make some of them for that."""


class StorageReader(dcp_storage.StorageReader):
    """Lets torch.distributed.checkpoint load a Hugging Face checkpoint, of hfshard or any other library.

    `dcp.load` takes it. Every rank of the process group calls; each reads the bytes of its own parts from files that
    all see, whatever the layout in which they were saved. Where a tensor has another dtype than the stored one, the
    values are cast. Names that hfshard has stored once for several are there under each.

    Errors of any rank are raised on every rank, as torch.distributed.checkpoint does: a `CheckpointException` whose
    `failures` have the errors themselves. Then some tensors may have been filled already.

    Args:
        path: As in `hfshard.load_state_dict`, and so are key, variant, use_safetensors, subfolder, revision, token,
            cache_dir, local_files_only, verify and progress; `checkpoint_id` of `dcp.load` takes its place. What
            verify asks for is checked by every rank.

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
        """Whether it may be a path, an address of a store, or the name of a repository."""
        text = os.fspath(checkpoint_id)
        return bool(text) and ("://" not in text or is_address(text))

    @property
    def checkpoint_id(self) -> str | None:
        """The path."""
        return None if self._source is None else self._source.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, maybe from another directory."""
        self._close()
        if checkpoint_id is not None:
            self._source = self._source_of(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Open and check the checkpoint, and describe its tensors: each is one chunk. It stays open for `read_data`.

        Args:
            args: None.
            kwargs: `rank`, where torch.distributed.checkpoint asks a second time. It has caught what the first call
                raised, and some versions say nothing of it: what is returned now raises it when it is looked at.

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

    @names_files("checkpoint_id")
    def _read_metadata(self) -> Metadata:
        self._close()
        if self._source is None:
            raise InvalidArgumentError("What is to be loaded? Give StorageReader a path, or dcp.load a checkpoint_id.")
        self._checkpoint = self._opened.enter_context(open_source(self._source, self._options))
        described = stored_tensors(self._checkpoint)
        return Metadata(
            state_dict_metadata={name: _metadata_of(tensor) for name, tensor in described.items()},
            planner_data={name: (name,) for name in described},
            storage_meta=StorageMeta(checkpoint_id=self.checkpoint_id),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise what `read_metadata` has raised."""
        if self._problem is not None:
            raise self._problem

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Tell the coordinating rank which checkpoint this one has opened."""
        return replace(plan, storage_data=_token_of(self._open_one()))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinating rank: check that all have opened the same checkpoint.

        Raises:
            CheckpointChangedError: They have not.
        """
        tokens = {plan.storage_data for plan in plans if isinstance(plan.storage_data, str)}
        if len(tokens) > 1:
            path = self._open_one().directory
            raise CheckpointChangedError(
                f"The ranks have opened different checkpoints in '{path}'. Load again when nobody saves there, from a "
                "directory that the machines of all ranks share.",
                path=path,
            )
        return plans

    @names_files("checkpoint_id")
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's parts into place.

        Raises:
            UnstorableTensorError: A rank's part of a DTensor is not what torch.distributed.checkpoint says; nothing was
                read on this rank.
            StateDictMismatchError: The planner asks for what is not there.
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
        return CheckpointSource(path_text(path), self._query, takes_files=True)

    def _open_one(self) -> OpenCheckpoint:
        if self._checkpoint is None:
            raise InvalidArgumentError("The checkpoint is not open: call read_metadata first, as dcp.load does.")
        return self._checkpoint

    def _close(self) -> None:
        self._checkpoint = None
        self._problem = None
        self._opened.close()


class _Unreadable(Mapping[str, TensorStorageMetadata]):
    """In place of the tensors of a checkpoint that can't be opened: says why, whatever is asked."""

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
    """What is the same on all ranks that have opened the same checkpoint: its index, with the sizes of the files."""
    sizes = {file: shard.size for file, shard in sorted(checkpoint.shards.items())}
    return hashlib.sha256(checkpoint.index.to_json() + repr(sizes).encode()).hexdigest()


def _check_held_parts(items: Sequence[ReadItem], planner: LoadPlanner, stored: Collection[str]) -> None:
    """Refuse DTensors of which this rank holds something else than is to be read."""
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
    """Get the tensors to fill from the planner, no more than fit into some memory."""
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
    """What is to be read into a tensor.

    Raises:
        StateDictMismatchError: It is not in the checkpoint, or the tensor has another shape.
    """
    name = item.storage_index.fqn
    box = chunk_box((tuple(item.storage_offsets), tuple(item.lengths)))
    shape = shapes.get(name, ())
    is_tensor = item.type == LoadItemType.TENSOR and len(shape) == len(box)
    if not is_tensor or clip_box(box, [(0, size) for size in shape]) != box or box_shape(box) != tuple(tensor.shape):
        raise StateDictMismatchError(
            f"The planner asks for a part of '{name}' at {list(item.storage_offsets)} of shape {list(item.lengths)}, "
            f"for a tensor of shape {list(tensor.shape)}; the checkpoint has "
            f"{f'the shape {list(shape)}' if name in shapes else 'no such tensor'}.",
            fqn=name,
        )
    return name, BoxTarget(box, tensor)
