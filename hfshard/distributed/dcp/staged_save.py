"""A save that is filled by many writers: files of the right size in the staging directory, and then their commit."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from hfshard._util.progress import ProgressCallback, bytes_bar
from hfshard._util.threads import in_threads
from hfshard.commit.commit_plan import NewCheckpoint, needs_links, plan_commit
from hfshard.commit.directory_commit import save_session
from hfshard.commit.transaction import OwnShardWriter
from hfshard.disk.direct_io import read_blocks
from hfshard.disk.fsops import copy_mode, sync, write_all
from hfshard.errors import SaveDirectoryError
from hfshard.format.index import CheckpointIndex, FileDigest
from hfshard.saving.pipeline import avoid_taken_names, plan_request, staged_jobs, staged_names, write_staged
from hfshard.saving.save_request import SaveOptions, SaveRequest
from hfshard.shards.shard_plan import ShardPlan, with_one_more_shard
from hfshard.shards.write_shards import (
    WriteJob,
    blank_header,
    digest_shard,
    writer_threads,
)
from hfshard.stores.store import Store
from hfshard.tensors.stored_tensor import RawTensor, TensorLayout, tensor_nbytes

logger = logging.getLogger(__name__)

TOKEN_BYTES: Final = 16
"""A header has more."""


class Place(NamedTuple):
    """Where the bytes of a tensor go."""

    path: str
    """Of a staged file."""
    start: int
    """The first byte."""


class StagedSave:
    """A save between its plan and its commit: the directory is locked, and its files wait for the bytes of tensors.

    Exactly one of `commit` and `undo` ends it. If the object is dropped before, it is undone, too.

    Attributes:
        places: Where each tensor goes.
        token: What the staged files begin with until the commit: it tells them from others of the same path, as on a
            disk that another machine does not share.
    """

    def __init__(self, directory: str, options: SaveOptions, layouts: Mapping[str, TensorLayout]) -> None:
        """Lock the directory, and make files of the right size in its staging directory.

        Raises:
            What `hfshard.save_state_dict` raises before it writes: the directory is as it was.
        """
        self.directory = directory
        self.places: dict[str, Place] = {}
        self.token = os.urandom(TOKEN_BYTES)
        tensors = {
            name: RawTensor(layout, partial(_blocks, self.places, name, layout.nbytes))
            for name, layout in layouts.items()
        }
        self._request = SaveRequest(tensors=tensors, options=options)
        writer_threads()  # raises where the environment asks for more than there is
        plan = plan_request(self._request)
        self._context = save_session(directory, options.names)
        self._session = self._context.__enter__()
        try:
            self._plan = self._staged(avoid_taken_names(plan, self._session, options.names))
        except BaseException as error:
            self.undo(error)
            raise

    def commit(self) -> CheckpointIndex:
        """Read the files back for their checksums, complete their headers, and put them in place.

        Raises:
            What `hfshard.save_state_dict` raises; the save is undone where it says so.
        """
        options = self._request.options
        try:
            with bytes_bar("Hashing", self._plan.total_size, options.progress) as progress_callback:
                new, index = write_staged(self._plan, self._session, self._request, _FilledFiles(), progress_callback)
            self._session.commit(plan_commit(self._session.state, new))
        except BaseException as error:
            self.undo(error)
            raise
        self._context.__exit__(None, None, None)
        logger.info(
            "Saved %d tensors, %d bytes, into '%s'.", len(index.weight_map), self._plan.total_size, self.directory
        )
        return index

    def undo(self, error: BaseException) -> None:
        """Remove what was staged, and unlock the directory.

        Args:
            error: Why.
        """
        self._context.__exit__(type(error), error, error.__traceback__)

    def _staged(self, plan: ShardPlan) -> ShardPlan:
        """Make the files of a plan, and return it; or one of shards where a single file can't be put in place."""
        self._session.check_space(plan.total_size)
        self._make_files(plan)
        new = NewCheckpoint(staged_names(plan), list(plan.weight_map), None, None, {}, "")
        if plan.is_sharded or not needs_links(self._session.state, new):
            return plan
        if self._session.can_link(next(iter(new.shards.values()))):
            return plan
        self._session.empty_staging()
        names = self._request.options.names
        plan = avoid_taken_names(with_one_more_shard(plan, names), self._session, names)
        self._make_files(plan)
        return plan

    def _make_files(self, plan: ShardPlan) -> None:
        for job in staged_jobs(plan, self._session, self._request):
            end = len(blank_header(job, self._request.options.checksum))
            for name, tensor in job.tensors.items():
                self.places[name] = Place(job.path, end)
                end += tensor_nbytes(tensor)
            _make_file(job.path, self.token, end)


def open_staged(path: str, token: bytes) -> int:
    """Open a file that a `StagedSave` on another rank has made, for writing.

    Raises:
        SaveDirectoryError: The file is not there, or another one is.
    """
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
        f"The file '{path}', which the coordinating rank has made, is not here: each rank writes its part into the "
        "same files. Save into a directory that the machines of all ranks share.",
        path=path,
    )


def _make_file(path: str, token: bytes, size: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(fd, token)
        os.ftruncate(fd, size)
    finally:
        os.close(fd)


def _blocks(places: Mapping[str, Place], name: str, nbytes: int, block_bytes: int) -> Iterator[memoryview]:
    """What was written of a tensor."""
    path, start = places[name]
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield from read_blocks(fd, start, nbytes, block_bytes)
    finally:
        os.close(fd)


class _FilledFiles(OwnShardWriter):
    """Completes files whose tensors are there already."""

    def write(
        self,
        jobs: Sequence[WriteJob],
        checksum: str | None,
        progress_callback: ProgressCallback | None,
        store: Store | None = None,
    ) -> list[FileDigest]:
        """See `ShardWriter`; it is for directories only."""
        work = partial(_complete, checksum=checksum, progress_callback=progress_callback)
        return in_threads(work, jobs, writer_threads())


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
