"""Saves of torch.distributed.checkpoint as Hugging Face checkpoints: each rank writes its part of each file."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.storage as dcp_storage
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.futures import Future

from hfshard._util.arguments import wraps_os_errors
from hfshard._util.progress import ProgressCallback
from hfshard._util.text import describe_error, shorten_list
from hfshard._util.threads import run_in_threads
from hfshard.commit.directory_commit import directory_transaction
from hfshard.commit.transaction import NamesTakenError, OwnShardWriter
from hfshard.constants import DEFAULT_MAX_SHARD_SIZE
from hfshard.disk.direct_io import BLOCK_BYTES, read_blocks
from hfshard.disk.fsops import copy_mode, sync, write_all
from hfshard.distributed.dcp_chunks import Chunk, check_held, chunk_box, cover_problem, state_dict_of
from hfshard.distributed.spread_tensor import Runs
from hfshard.errors import (
    InvalidArgumentError,
    InvalidPathError,
    RankFailedError,
    SaveDirectoryError,
    UnstorableTensorError,
)
from hfshard.format.file_names import MODEL_BASE
from hfshard.format.index import Checksum, FileDigest
from hfshard.places.place import place_to_save
from hfshard.saving.pipeline import Save
from hfshard.saving.save_request import SaveOptions, SaveRequest
from hfshard.shards.shard_plan import Packing
from hfshard.shards.write_shards import WriteJob, blank_header, digest_shard, writer_threads
from hfshard.stores.store import Store
from hfshard.tensors.stored_tensor import (
    RawTensor,
    TensorLayout,
    check_storable,
    iter_blocks,
    tensor_layout,
    tensor_nbytes,
    unsupported_layout_reason,
)
from hfshard.tensors.zero3 import reject_partitioned

_SHOWN: Final = 5
"""The number of names that a message lists."""


class StorageWriter(dcp_storage.StorageWriter):
    """Writer with which torch.distributed.checkpoint saves a Hugging Face checkpoint, durably and all or nothing.

    Pass it to `dcp.save` or `dcp.async_save`. The files are those that `hfshard.save_state_dict` writes for the
    complete state dict, with the names that the planner gives ("model.weight" for `{"model": {"weight": ...}}`); names
    that share a tensor are stored one by one. The existing checkpoint loads until the new one is complete.

    Every rank of the process group must call, and all must see the same directory. Each writes and flushes its own
    parts; the coordinating rank reads the files back for their checksums, and commits.

    An error on any rank is raised on every rank, as torch.distributed.checkpoint does it: as a `CheckpointException`
    whose `failures` contain the errors themselves.

    Args:
        path: The directory, created if it is missing; `checkpoint_id` of `dcp.save` replaces it.
        max_shard_size, packing, variant, metadata, checksum, progress: As in `hfshard.save_state_dict`. Without a
            checksum, only a few bytes of each tensor are read back.

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
        """Return whether it may be the path of a directory."""
        text = os.fspath(checkpoint_id)
        return bool(text) and "://" not in text and not os.path.isfile(text)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, optionally into another directory."""
        self._undo(RankFailedError("The previous save was not completed."))
        if checkpoint_id is not None:
            self.checkpoint_id = _directory_path(checkpoint_id, "checkpoint_id")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check the arguments, and undo a save that was not completed.

        Raises:
            InvalidArgumentError: There is no path, or each rank is to save by itself.
        """
        self._undo(RankFailedError("The previous save was not completed."))
        if self.checkpoint_id is None:
            raise InvalidArgumentError(
                "There is nowhere to save. Pass a path to StorageWriter, or a checkpoint_id to dcp.save."
            )
        if not kwargs.get("use_collectives", True):
            raise InvalidArgumentError(
                "use_collectives=False saves one checkpoint per rank, but the ranks' parts form one Hugging Face "
                "checkpoint. Omit it."
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Reject, on every rank, what a Hugging Face checkpoint cannot contain.

        Raises:
            UnstorableTensorError: A value is not a tensor, or the format cannot store it.
            InvalidArgumentError: The planner sends only what changed since the previous save.
        """
        if not plan.usable:
            raise _no_plan_caching()
        _check_items(plan.items)
        return replace(plan, storage_data=_described_items(plan))

    @wraps_os_errors("checkpoint_id")
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check, on the coordinating rank, that all ranks' parts form complete tensors, and create the files.

        Raises:
            UnstorableTensorError: They do not.
            Everything that `hfshard.save_state_dict` raises before it writes.
        """
        assert self.checkpoint_id is not None
        self._save = StagedSave(self.checkpoint_id, self._options, _merge_layouts(plans))
        places = self._save.places
        ordered = []
        for plan in plans:
            own = {item.index.fqn: places[item.index.fqn] for item in plan.items}
            ordered.append(replace(plan, storage_data=_Orders(self._save.token, own)))
        return ordered

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[dcp_storage.WriteResult]]:
        """Write and flush this rank's parts.

        A rank other than the coordinating one returns its error to that one, which ends the save; then all ranks raise.
        """
        try:
            written = self._write(plan, planner)
        except BaseException as error:
            if self._undo(error):
                raise
            rank = dist.get_rank() if dist.is_initialized() else 0
            failure = _Failure(rank, describe_error(error))
            written = [dcp_storage.WriteResult(MetadataIndex("failure"), 0, failure)]
        future: Future[list[dcp_storage.WriteResult]] = Future()
        future.set_result(written)
        return future

    @wraps_os_errors("checkpoint_id")
    def finish(self, metadata: Metadata, results: list[list[dcp_storage.WriteResult]]) -> None:
        """Commit, on the coordinating rank, after all ranks have written.

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
                f"Nothing was saved into '{save.directory}', and its contents are unchanged: {words}",
                rank=failures[0].rank,
                path=save.directory,
            )
            self._undo(error)
            raise error
        self._save = None
        save.commit()

    @wraps_os_errors("checkpoint_id")
    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[dcp_storage.WriteResult]:
        orders = plan.storage_data
        if type(orders) is not _Orders or getattr(planner, "_enable_plan_caching", False):
            raise _no_plan_caching()
        state_dict = state_dict_of(planner)
        items = [(item, data_of(item)) for item in plan.items]
        for item, data in items:
            check_held(item.index.fqn, state_dict.get(item.index.fqn), chunk_box(_chunk_of(data)), "save")
        with ExitStack() as opened:
            files: dict[str, int] = {}
            for item, data in items:
                path, start = orders.places[item.index.fqn]
                if path not in files:
                    files[path] = _open_staged(path, orders.token)
                    opened.callback(os.close, files[path])
                if chunk_bytes(data):
                    _write_chunk(files[path], start, data, _resolved_chunk(item, data, planner))
            for path, fd in files.items():
                sync(fd, path)
        return [
            dcp_storage.WriteResult(item.index, chunk_bytes(data), orders.places[item.index.fqn].path)
            for item, data in items
        ]

    def _undo(self, error: BaseException) -> bool:
        """Undo a save that has begun and was not committed; return False if this rank has none."""
        save = self._save
        self._save = None
        if save is not None:
            save.undo(error)
        return save is not None


class _Orders(NamedTuple):
    """The coordinating rank's instructions to another one."""

    token: bytes
    """`StagedSave.token`, with which the staged files begin."""
    places: Mapping[str, FilePosition]
    """FQN -> the file and offset of the tensor."""


class _Failure(NamedTuple):
    """The reason why a rank could not write."""

    rank: int
    """In the default process group."""
    problem: str


def _no_plan_caching() -> InvalidArgumentError:
    return InvalidArgumentError(
        "The planner sends only changed plans, but hfshard's writer needs complete ones. Omit enable_plan_caching=True."
    )


def _directory_path(path: str | os.PathLike[str], argument: str) -> str:
    """Return a directory's absolute path; reject a store address: the ranks' parts are assembled in files on disk."""
    place = place_to_save(path, argument)
    directory = place.address
    if not place.is_read_from_disk:
        raise InvalidPathError(
            f"{argument}={directory!r} is a store address, but StorageWriter saves into directories. Call "
            "hfshard.save_state_dict(state_dict, address) on every rank.",
            path=directory,
        )
    return directory


# Plan items of a save: each rank's part of a tensor is checked, merged with the others, and written into a file.


def _check_items(items: Iterable[WriteItem]) -> None:
    """Reject what a Hugging Face checkpoint cannot contain, judging by the plan alone."""
    all_items = list(items)
    objects = [item.index.fqn for item in all_items if item.type == WriteItemType.BYTE_IO]
    if objects:
        raise UnstorableTensorError(
            "A Hugging Face checkpoint contains only tensors, but these values are something else: "
            f"{shorten_list(objects, _SHOWN, quote=True)}. Remove them from the state dict; hfshard.CheckpointManager "
            "saves the complete state of a training run.",
            fqn=objects[0],
        )
    for item in all_items:
        data, name = data_of(item), item.index.fqn
        if (problem := unsupported_layout_reason(data.properties.layout)) is not None:
            raise UnstorableTensorError(f"Cannot store {name!r}: {problem}", fqn=name)
        check_storable(name, torch.empty((0,) * len(data.size), dtype=data.properties.dtype, device="cpu"))
    reject_partitioned({item.index.fqn: torch.empty(data_of(item).size, device="meta") for item in all_items})


def data_of(item: WriteItem) -> TensorWriteData:
    """Return what a plan says about a tensor."""
    assert item.tensor_data is not None
    return item.tensor_data


def _chunk_of(data: TensorWriteData) -> Chunk:
    return tuple(data.chunk.offsets), tuple(data.chunk.sizes)


def chunk_bytes(data: TensorWriteData) -> int:
    """Return the size of that rectangle in bytes."""
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _described_items(plan: SavePlan) -> dict[str, TensorWriteData]:
    """Return FQN -> what a plan says about the tensor, in the plan's order."""
    return {item.index.fqn: data_of(item) for item in plan.items}


def _merge_layouts(plans: Sequence[SavePlan]) -> dict[str, TensorLayout]:
    """Return name -> layout of the stored tensor, in the order of the first rank's state dict, then of the next one's.

    The storage_data of each rank's plan is what `_described_items` returned before tensors that several ranks have were
    removed from all plans but one. Reject tensors about which ranks disagree, or that their parts do not cover exactly.
    """
    found: dict[str, TensorWriteData] = {}
    chunks: dict[str, list[Chunk]] = {}
    for plan in plans:
        before = plan.storage_data if isinstance(plan.storage_data, dict) else {}
        for name, data in (before | _described_items(plan)).items():
            _check_agreement(name, found.setdefault(name, data), data)
        for item in plan.items:
            chunks.setdefault(item.index.fqn, []).append(_chunk_of(data_of(item)))
    for name, parts in chunks.items():
        if (problem := cover_problem(found[name].size, parts)) is not None:
            raise UnstorableTensorError(
                f"The ranks' parts of {name!r}, of shape {list(found[name].size)}, do not form the complete tensor: "
                f"{problem}. Call on every rank that has a part, with torch.distributed.checkpoint's own planner.",
                fqn=name,
            )
    return {
        name: tensor_layout(torch.empty(data.size, dtype=data.properties.dtype, device="meta"))
        for name, data in found.items()
        if name in chunks
    }


def _check_agreement(name: str, one: TensorWriteData, other: TensorWriteData) -> None:
    if (one.size, one.properties.dtype) != (other.size, other.properties.dtype):
        raise UnstorableTensorError(
            f"The ranks disagree about {name!r}: one has {one.properties.dtype} of shape {list(one.size)}, but "
            f"another has {other.properties.dtype} of shape {list(other.size)}. Give the tensors of different ranks "
            "different names.",
            fqn=name,
        )


def _resolved_chunk(item: WriteItem, data: TensorWriteData, planner: SavePlanner) -> torch.Tensor:
    """Return the values of a chunk; reject what the plan does not say, or what cannot be stored."""
    name = item.index.fqn
    tensor = planner.resolve_data(item)
    check_storable(name, tensor)
    assert isinstance(tensor, torch.Tensor)
    if (tensor.shape, tensor.dtype) != (data.chunk.sizes, data.properties.dtype):
        raise UnstorableTensorError(
            f"Cannot store {name!r}: this rank has {tensor.dtype} of shape {list(tensor.shape)}, but its plan says "
            f"{data.properties.dtype} of shape {list(data.chunk.sizes)}. Use hfshard.save_state_dict.",
            fqn=name,
        )
    return tensor


def _write_chunk(fd: int, start: int, data: TensorWriteData, tensor: torch.Tensor) -> None:
    """Write a chunk's values to their positions in a file in which the tensor starts at byte `start`."""
    runs = Runs.of_box(tuple(data.size), tensor.element_size(), chunk_box(_chunk_of(data)))
    in_chunk = Runs(runs.positions, runs.lengths, runs.offsets + start)
    done = 0
    for block in iter_blocks(tensor, BLOCK_BYTES):
        some = in_chunk.clip(done, done + len(block))
        begins = (some.offsets - done).tolist()
        for begin, length, offset in zip(begins, some.lengths.tolist(), some.positions.tolist(), strict=True):
            _write_at(fd, block[begin : begin + length], offset)
        done += len(block)


def _write_at(fd: int, raw: memoryview, offset: int) -> None:
    while raw:
        count = os.pwrite(fd, raw, offset)
        raw = raw[count:]
        offset += count


# A save that many writers fill: files of the right size in the staging directory, and their commit.


logger = logging.getLogger(__name__)

TOKEN_BYTES: Final = 16
"""A header is longer."""


class FilePosition(NamedTuple):
    """The location of a tensor's bytes."""

    path: str
    """Of a staged file."""
    start: int
    """The first byte."""


class StagedSave:
    """A save between its plan and its commit: the directory is locked, and its files await the tensors' bytes.

    Exactly one of `commit` and `undo` ends it. If the object is dropped first, the save is undone, too.

    Attributes:
        places: Name -> the file and offset of the tensor.
        token: The bytes with which the staged files begin until the commit. They distinguish these files from others of
            the same path, as on a disk that is not shared with another machine.
    """

    def __init__(self, directory: str, options: SaveOptions, layouts: Mapping[str, TensorLayout]) -> None:
        """Lock the directory, and create files of the right size in its staging directory.

        Raises:
            What `hfshard.save_state_dict` raises before it writes; the directory is unchanged.
        """
        self.directory = directory
        self.places: dict[str, FilePosition] = {}
        self.token = os.urandom(TOKEN_BYTES)
        tensors = {
            name: RawTensor(layout, partial(_blocks, self.places, name, layout.nbytes))
            for name, layout in layouts.items()
        }
        writer = _FilledFiles()
        self._save = Save({MODEL_BASE: SaveRequest(tensors=tensors, options=options)}, writer)
        self._context = directory_transaction(directory, self._save.new, writer)
        self._target = self._context.__enter__()
        try:
            self._save.prepare(self._target)
            try:
                self._make_files()
            except NamesTakenError:
                self._save.add_shard(self._target)
                self._make_files()
        except BaseException as error:
            self.undo(error)
            raise

    def commit(self) -> None:
        """Read the files back for their checksums, complete their headers, and move them into place.

        Raises:
            What `hfshard.save_state_dict` raises; the save is undone if the error says so.
        """
        try:
            self._save.write(self._target)
            self._save.commit(self._target)
        except BaseException as error:
            self.undo(error)
            raise
        self._context.__exit__(None, None, None)
        count, size = len(self._save.index().weight_map), self._save.total_size
        logger.info("Saved %d tensors, %d bytes, into '%s'.", count, size, self.directory)

    def undo(self, error: BaseException) -> None:
        """Remove what was staged, and unlock the directory.

        Args:
            error: The reason.
        """
        self._context.__exit__(type(error), error, error.__traceback__)

    def _make_files(self) -> None:
        """Create the files, and reject a single one that can't be put in place."""
        jobs = self._save.jobs
        for job in self._target.stage(jobs):
            end = len(blank_header(job, self._save.new.checksum))
            for name, tensor in job.tensors.items():
                self.places[name] = FilePosition(job.path, end)
                end += tensor_nbytes(tensor)
            _make_file(job.path, self.token, end)
        self._target.reject_single_without_links(jobs)


def _open_staged(path: str, token: bytes) -> int:
    """Open for writing a file that a `StagedSave` on another rank has created; reject another file of its path."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise _not_shared(path) from error
    try:
        if os.pread(fd, len(token), 0) != token:
            raise _not_shared(path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _not_shared(path: str) -> SaveDirectoryError:
    return SaveDirectoryError(
        f"This rank does not see the file '{path}', which the coordinating rank created: each rank writes its part "
        "into the same files. Save into a directory that the machines of all ranks share.",
        path=path,
    )


def _make_file(path: str, token: bytes, size: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(fd, token)
        os.ftruncate(fd, size)
    finally:
        os.close(fd)


def _blocks(places: Mapping[str, FilePosition], name: str, nbytes: int, block_bytes: int) -> Iterator[memoryview]:
    path, start = places[name]
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield from read_blocks(fd, start, nbytes, block_bytes)
    finally:
        os.close(fd)


class _FilledFiles(OwnShardWriter):
    """Writer that completes files whose tensors are already written."""

    verb = "Hashing"

    def fingerprints(self, jobs: Sequence[WriteJob], checksum: str | None) -> Iterable[str]:
        """Know none: the tensors are not written yet, so each file gets a new name."""
        return [""] * len(jobs)

    def write(
        self,
        jobs: Sequence[WriteJob],
        checksum: str | None,
        progress_callback: ProgressCallback | None,
        store: Store | None = None,
    ) -> list[FileDigest]:
        """Complete the files and return their digests; for directories only."""
        work = partial(_complete, checksum=checksum, progress_callback=progress_callback)
        return run_in_threads(work, jobs, writer_threads())


def _complete(
    job: WriteJob, cancelled: threading.Event, *, checksum: str | None, progress_callback: ProgressCallback | None
) -> FileDigest:
    digest, header = digest_shard(job, checksum, progress_callback, cancelled)
    fd = os.open(job.path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        write_all(fd, header)
        copy_mode(fd, job.like)
        sync(fd, job.path)
    finally:
        os.close(fd)
    return digest
