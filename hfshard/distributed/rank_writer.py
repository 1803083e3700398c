"""Writers of a save on all ranks: each file is written by the rank that owns it, from the parts of all ranks."""

from __future__ import annotations

import json
import os
import queue
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import repeat
from threading import Event
from typing import Any, Final, Literal, Self

from hfshard._util.call_ranks import Session
from hfshard._util.progress import ProgressCallback
from hfshard._util.threads import delay_interrupt, run_in_threads, start_worker
from hfshard.commit.transaction import KnownFile, OwnShardWriter, link_if_same, upload_files
from hfshard.constants import FINGERPRINT_BYTES
from hfshard.disk.direct_io import check_setting
from hfshard.distributed.exchange import Exchange
from hfshard.distributed.spread_tensor import ByteArray
from hfshard.distributed.tensor_owners import LocalTensor, TensorOwners, assign_owners
from hfshard.errors import HfshardError
from hfshard.format.index import FileDigest, fingerprint_positions
from hfshard.places.place import place_to_save
from hfshard.shards.write_shards import (
    WriteJob,
    digest_shard,
    fingerprint_of_job,
    synchronize_devices,
    write_shards,
    writer_threads,
)
from hfshard.stores.open_store import open_store
from hfshard.stores.store import Store
from hfshard.tensors.stored_tensor import RawTensor, TensorLayout, TensorLike

_END: Final = b"null"
"""The last order, on which `follow` returns."""
_CONFIRM: Final = b"true"
"""The order to confirm, before the leader commits, that this rank still takes part."""
_CONFIRMS_PER_DEATH: Final = 3
"""Confirmations that took longer than `death_seconds` divided by this are requested again."""
_LOOK_SECONDS: Final = 0.2
"""Between two checks for a failed rank, while the last blocks are flushed."""


@dataclass(frozen=True, slots=True)
class KeyedTensor(RawTensor):
    """A tensor that the ranks know by another name than its file does, as files of one save may have the same names."""

    key: str = field(kw_only=True)


class RankWriter:
    """The leader's `ShardWriter`, and its counterpart on the other ranks.

    1. The leader orders files; all ranks compute the same owner for each.
    2. When all are ready, the bytes go to the owners in rounds. A thread of each owner writes its files with the
       package's ordinary writer: in one pass, with their checksums, flushed.
    3. Each owner reports the digests of its files.
    4. All confirm that they still take part, and the leader commits. So a rank that raises before it has confirmed
       knows that nothing was committed, even if the leader was stopped for a while and then continues.

    Args:
        session: Of the save; all ranks of the call take part.
        holders: Which rank has what.
        held: This rank's tensors.
        stored_name: Returns the name in a file of a `KeyedTensor`, by its key.
        writers: The ranks that may write; empty: all.
    """

    verb = "Saving"

    def __init__(
        self,
        session: Session,
        holders: TensorOwners,
        held: Mapping[str, LocalTensor],
        stored_name: Callable[[str], str] = str,
        writers: Sequence[int] = (),
    ) -> None:
        check_setting()  # raises where the environment asks for what there is not
        self._session, self._holders = session, holders
        self._exchange = Exchange(holders, held, session)
        self._names = list(holders.layouts)
        self._stored_name = stored_name
        self._writers = writers or session.ranks

    def fingerprints(self, jobs: Sequence[WriteJob], checksum: str | None) -> Iterable[str]:
        """Compute the fingerprints of files before they are written; on the leader."""
        return [str(value) for value in self._lead("fingerprint", jobs, checksum, None)]

    def link(self, jobs: Sequence[WriteJob], known: Mapping[str, KnownFile], checksum: str) -> list[FileDigest | None]:
        """Link files that exist already; on the leader. All bytes are sent only for files with known fingerprints."""
        numbered = enumerate(self.fingerprints(jobs, checksum))
        files = {number: known[fingerprint] for number, fingerprint in numbered if fingerprint in known}
        chosen = [jobs[number] for number in files]
        found = self._lead("link", chosen, checksum, None, list(files.values())) if files else []
        digests = {number: FileDigest(**value) for number, value in zip(files, found, strict=True) if value}
        return [digests.get(number) for number in range(len(jobs))]

    def write(
        self,
        jobs: Sequence[WriteJob],
        checksum: str | None,
        progress_callback: ProgressCallback | None,
        store: Store | None = None,
    ) -> list[FileDigest]:
        """Write files; on the leader. Each rank opens the store that its files' paths lead to."""
        return [FileDigest(**value) for value in self._lead("write", jobs, checksum, progress_callback)]

    def confirm(self) -> None:
        """Confirm before a commit that all ranks still take part; on the leader.

        Raises:
            RankFailedError: A rank failed, died, or gave up when this one was silent.
        """
        is_fresh = False
        while not is_fresh:
            asked_at = time.monotonic()
            self._session.order(_CONFIRM)
            self._session.answers(self._session.ranks[1:])
            is_fresh = time.monotonic() - asked_at < self._session.death_seconds / _CONFIRMS_PER_DEATH
        self._session.begin_step()

    def end(self) -> None:
        """Let `follow` return on the others; on the leader."""
        self._session.order(_END)
        self._exchange.close()

    def follow(self) -> None:
        """Carry out the leader's orders, until the end; on the other ranks."""
        while (raw := self._session.next_order()) != _END:
            if raw == _CONFIRM:
                self._session.begin_step()
                self._session.answer()
            elif found := self._carry_out(WriteTask.from_json(raw, self._names), None):
                self._session.answer(json.dumps(found).encode())
        self._exchange.close()

    def _lead(
        self,
        kind: Kind,
        jobs: Sequence[WriteJob],
        checksum: str | None,
        progress_callback: ProgressCallback | None,
        known: Sequence[KnownFile] = (),
    ) -> list[Any]:
        order = WriteTask.of(kind, jobs, checksum, known)
        self._session.order(order.to_json(self._names))
        try:
            found: dict[str, Any] = dict(self._carry_out(order, progress_callback))
            for answer in self._session.answers(set(self._owners(order)) - {self._session.rank}).values():
                found |= json.loads(answer)
        except BaseException as error:
            self._session.fail(error)  # before the session removes the files that others are writing
            raise
        return [found[str(number)] for number in range(len(order.files))]

    def _owners(self, order: WriteTask) -> list[int]:
        layouts = self._holders.layouts
        sizes = [sum(count for _, count in order.wanted_bytes(file, layouts)) for file in order.files]
        return assign_owners(sizes, self._writers)

    def _carry_out(self, order: WriteTask, progress_callback: ProgressCallback | None) -> dict[str, Any]:
        """Take part in one order; return this rank's results by the numbers of its files."""
        mine: dict[str, TaskFile] = {}
        streams: dict[int, list[tuple[str, int]]] = {}
        for number, (file, owner) in enumerate(zip(order.files, self._owners(order), strict=True)):
            streams.setdefault(owner, []).extend(order.wanted_bytes(file, self._holders.layouts))
            if owner == self._session.rank:
                mine[str(number)] = file
        incoming = WindowQueue()
        with delay_interrupt() as was_interrupted:
            self._session.meet("ready")  # from here on each rank takes part in every round
            writer = start_worker(partial(self._write_files, order, mine, incoming), "hfshard-owner")

            def failure() -> BaseException | None:
                if writer is None:
                    return _no_thread()
                if was_interrupted():
                    return KeyboardInterrupt()
                return writer.exception() if writer.done() else None

            try:
                self._exchange.run(
                    streams,
                    lambda window: incoming.put(window, lambda: writer is not None and not writer.done()),
                    failure,
                    progress_callback or (lambda _: None),
                )
                return self._await(writer)
            except Exception:
                self._session.check()  # what another rank reported, before its directory was removed, is more specific
                raise
            finally:
                incoming.close()
                if writer is not None:
                    wait([writer])

    def _await(self, writer: Future[dict[str, Any]] | None) -> dict[str, Any]:
        """Wait until this rank's files are flushed; give up if another rank fails."""
        if writer is None:
            raise _no_thread()
        while not wait([writer], timeout=_LOOK_SECONDS).done:
            self._session.check()
        return writer.result()

    def _write_files(self, order: WriteTask, files: Mapping[str, TaskFile], incoming: WindowQueue) -> dict[str, Any]:
        """Write an owner's files one after another, as their bytes arrive; runs in a thread."""
        found: dict[str, Any] = {}
        store_at = cache(_store_at)  # all files of a save have the same address
        for number, file in files.items():
            wanted = dict(order.wanted_bytes(file, self._holders.layouts))
            tensors = {
                self._stored_name(name): RawTensor(self._holders.layouts[name], incoming.blocks(wanted.get(name, 0)))
                for name in file.names
            }
            job = WriteJob(file.path, tensors, file.metadata, file.hfshard_metadata, file.replaced)
            if order.kind == "fingerprint":
                found[number] = fingerprint_of_job(job, order.checksum)
            elif file.known is not None and order.checksum is not None:
                linked = link_if_same(job, file.known, order.checksum, Event())
                found[number] = linked and linked.as_json()
            else:
                address, _, name = job.path.rpartition("/")
                store = store_at(address or "/")
                if store is None:
                    digest = self._write(job, order.checksum)
                else:
                    digest = upload_files(store, {name: job}, order.checksum)[name]
                found[number] = digest.as_json() | {"etag": digest.etag}
        return found

    def _write(self, job: WriteJob, checksum: str | None) -> FileDigest:
        try:
            return write_shards([job], checksum=checksum)[0]
        except FileNotFoundError as error:
            raise HfshardError(
                f"Rank {self._session.rank} does not see the directory of '{job.path}', which rank "
                f"{self._session.leader} created. Save into a directory that all ranks see.",
                path=job.path,
            ) from error


def _store_at(address: str) -> Store | None:
    """Open the store at an address; None for a directory."""
    return None if place_to_save(address).is_read_from_disk else open_store(address)


def _no_thread() -> HfshardError:
    return HfshardError("Cannot start a thread to write files. Save before Python exits.")


# Orders of a save's leader to all ranks: files to write or to link, or whose fingerprints to compute.


Kind = Literal["write", "link", "fingerprint"]


@dataclass(frozen=True, slots=True)
class TaskFile:
    """One file of an order: a `WriteJob` without its tensors' bytes."""

    path: str
    names: tuple[str, ...]
    """In the order of their bytes."""
    metadata: dict[str, str]
    hfshard_metadata: dict[str, Any] | None
    like: tuple[int, int] | None
    """Mode and group of the file that it will replace."""
    known: KnownFile | None = None
    """The file to link, if it has the same bytes; for an order to link."""

    @property
    def replaced(self) -> os.stat_result | None:
        """The status of the file that it will replace, limited to what a new file inherits."""
        if self.like is None:
            return None
        mode, group = self.like
        return os.stat_result((stat.S_IFREG | mode, 0, 0, 1, 0, group, 0, 0, 0, 0))


@dataclass(frozen=True, slots=True)
class WriteTask:
    """Files for all ranks, each of which owns some."""

    kind: Kind
    checksum: str | None
    files: tuple[TaskFile, ...]

    @classmethod
    def of(cls, kind: Kind, jobs: Sequence[WriteJob], checksum: str | None, known: Sequence[KnownFile] = ()) -> Self:
        """Create an order to do with these jobs what `write_shards` does, or with each what `link_if_same` does."""
        files = zip(jobs, known or repeat(None))
        return cls(kind, checksum, tuple(_ordered(job, file) for job, file in files))

    def wanted_bytes(self, file: TaskFile, layouts: Mapping[str, TensorLayout]) -> list[tuple[str, int]]:
        """List (name, number of its first bytes that are needed), in the order of the file."""
        if self.kind == "fingerprint":
            sampled = [file.names[position] for position in fingerprint_positions(len(file.names))]
            return [(name, min(FINGERPRINT_BYTES, layouts[name].nbytes)) for name in sampled]
        return [(name, layouts[name].nbytes) for name in file.names]

    def to_json(self, names: Sequence[str]) -> bytes:
        """Encode the order, with names as numbers that all ranks know."""
        numbers = {name: number for number, name in enumerate(names)}
        files = [
            [
                file.path,
                _ranges(numbers[name] for name in file.names),
                file.metadata,
                file.hfshard_metadata,
                file.like,
                None if file.known is None else [file.known.path, file.known.digest.as_json()],
            ]
            for file in self.files
        ]
        return json.dumps([self.kind, self.checksum, files]).encode()

    @classmethod
    def from_json(cls, raw: bytes, names: Sequence[str]) -> Self:
        """Decode an order, with the same names."""
        kind, checksum, values = json.loads(raw)
        files = []
        for path, ranges, metadata, hfshard_metadata, like, known in values:
            chosen = tuple(names[number] for start, stop in ranges for number in range(start, stop))
            mode_and_group = None if like is None else tuple(like)
            file = None if known is None else KnownFile(known[0], FileDigest(**known[1]))
            files.append(TaskFile(path, chosen, metadata, hfshard_metadata, mode_and_group, file))
        return cls(kind, checksum, tuple(files))


def _ordered(job: WriteJob, known: KnownFile | None) -> TaskFile:
    own = job.hfshard_metadata
    like = None if job.like is None else (stat.S_IMODE(job.like.st_mode), job.like.st_gid)
    own_metadata = None if own is None else dict(own)
    names = (one.key if isinstance(one, KeyedTensor) else name for name, one in job.tensors.items())
    return TaskFile(job.path, tuple(names), dict(job.metadata), own_metadata, like, known)


def _ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Group numbers into ranges of consecutive ones, in their order."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1] = ranges[-1][0], number + 1
        else:
            ranges.append((number, number + 1))
    return ranges


# Queue between the exchange and the thread that writes an owner's files.


_WINDOWS: Final = 2
"""The most that are queued: one is written while the next ones arrive, and memory stays bounded."""
_INCOMING_LOOK_SECONDS: Final = 0.1
"""Between two checks that the other side still runs."""


class WindowQueue:
    """A queue of consecutive windows: one thread puts them, one takes their bytes."""

    def __init__(self) -> None:
        self._windows: queue.Queue[ByteArray] = queue.Queue(_WINDOWS)
        self._left = memoryview(b"")
        self._is_closed = False

    def put(self, window: ByteArray, is_taken: Callable[[], bool]) -> None:
        """Pass on the next bytes, when there is room; they are dropped if no thread takes them any more.

        Args:
            window: Not to be modified any more.
            is_taken: Whether the other thread still runs.
        """
        while is_taken() and not self._is_closed:
            try:
                self._windows.put(window, timeout=_INCOMING_LOOK_SECONDS)
            except queue.Full:
                continue
            return

    def close(self) -> None:
        """Let the other thread end with an error, unless it has all bytes that it wants."""
        self._is_closed = True

    def blocks(self, nbytes: int) -> Callable[[int], Iterator[memoryview]]:
        """Return a source of bytes for a `RawTensor`: the next ones of the queue, once."""

        def take(block_bytes: int) -> Iterator[memoryview]:
            left = nbytes
            while left:
                block = self._next(min(left, block_bytes))
                left -= len(block)
                yield block

        return take

    def _next(self, most_bytes: int) -> memoryview:
        while not self._left:
            if self._is_closed:
                raise InterruptedError("the save failed before all bytes of this file arrived")
            try:
                self._left = self._windows.get(timeout=_INCOMING_LOOK_SECONDS).data
            except queue.Empty:
                continue
        block = self._left[:most_bytes]
        self._left = self._left[most_bytes:]
        return block


SHARED_FROM_BYTES: Final = 32 << 20
"""A disk writes a smaller save in less time than the ranks need to agree."""
_CONTENT: Final = "xxh3"
"""The checksum by which copies are compared: as fast as memory."""


class ReplicaWriter(OwnShardWriter):
    """The leader's `ShardWriter`, and its counterpart on the other ranks. No bytes are sent.

    1. The leader writes a file into the staging directory: the ranks that find it there may write.
    2. It assigns files to each of them. Both compute what these would contain: copies may differ, as buffers do under
       DistributedDataParallel, and the leader's count.
    3. Each rank writes those of its files that would have the same bytes, and reports their digests. The leader writes
       the rest.

    The leader alone looks for links and compares fingerprints: it has all tensors.

    Args:
        session: Of the save; all of its ranks have the same names, shapes and dtypes.
        tensors: This rank's.
    """

    def __init__(self, session: Session, tensors: Mapping[str, TensorLike]) -> None:
        super().__init__(self._end)
        self._session = session
        self._tensors = tensors
        self._names = list(tensors)

    def write(
        self,
        jobs: Sequence[WriteJob],
        checksum: str | None,
        progress_callback: ProgressCallback | None,
        store: Store | None = None,
    ) -> list[FileDigest]:
        """Write files, shared with the ranks that see the directory; on the leader."""
        if len(jobs) < 2 or store is not None:
            return super().write(jobs, checksum, progress_callback, store)
        try:
            return self._write_together(jobs, checksum, progress_callback)
        except BaseException as error:
            self._session.fail(error)  # before the session removes the files that others are writing
            raise

    def follow(self) -> None:
        """Carry out the leader's requests, until it commits; on the other ranks."""
        jobs: dict[str, WriteJob] = {}
        checksum: str | None = None
        while True:
            self._session.begin_step()  # the leader asks no rank before it commits,
            kind, said = json.loads(self._session.next_order())
            self._session.end_step()  # and cannot while it waits for this rank's answer
            if kind == "end":
                self._session.begin_step()
                return
            if kind == "look":
                self._answer(_has_token(*said))
            elif kind == "compare":
                jobs, checksum = self._own_jobs(*said)
                if jobs:
                    self._answer(dict(zip(jobs, _contents(list(jobs.values())), strict=True)))
            elif mine := {number: jobs[number] for number in said if number in jobs}:
                self._answer(self._written(mine, checksum))

    def _write_together(
        self, jobs: Sequence[WriteJob], checksum: str | None, progress_callback: ProgressCallback | None
    ) -> list[FileDigest]:
        file_bytes = [job.nbytes for job in jobs]
        owners = assign_owners(file_bytes, self._those_who_see(os.path.dirname(jobs[0].path)))
        order = WriteTask.of("write", jobs, checksum).to_json(self._names).decode()
        others = [number for number, owner in enumerate(owners) if owner != self._session.rank]
        self._ask("compare", [order, owners])
        contents = dict(zip(others, _contents([jobs[number] for number in others]), strict=True))
        answers = self._answers({owners[number] for number in others})
        same = {number for number in others if answers[owners[number]][str(number)] == contents[number]}
        self._ask("write", [str(number) for number in sorted(same)])
        written_here = [number for number in range(len(jobs)) if number not in same]
        own = super().write([jobs[number] for number in written_here], checksum, progress_callback)
        digests = dict(zip(written_here, own, strict=True))
        for written in self._answers({owners[number] for number in same}).values():
            digests |= {int(number): FileDigest(**digest) for number, digest in written.items()}
        if progress_callback is not None:
            progress_callback(sum(file_bytes[number] for number in same))
        return [digests[number] for number in range(len(jobs))]

    def _those_who_see(self, directory: str) -> list[int]:
        """Find the ranks that see the leader's staging directory: on another machine the path may lead elsewhere."""
        token = uuid.uuid4().hex
        path = os.path.join(directory, f"seen-{token}")
        with open(path, "x", encoding="ascii") as file:
            file.write(token)
        self._ask("look", [path, token])
        seen = self._answers(set(self._session.ranks[1:]))
        os.unlink(path)
        return [self._session.rank, *(rank for rank, sees in seen.items() if sees)]

    def _own_jobs(self, order_json: str, owners: Sequence[int]) -> tuple[dict[str, WriteJob], str | None]:
        """Return this rank's files (number -> job), and the checksum."""
        order = WriteTask.from_json(order_json.encode(), self._names)
        jobs = {}
        for number, (file, owner) in enumerate(zip(order.files, owners, strict=True)):
            if owner == self._session.rank:
                tensors = {name: self._tensors[name] for name in file.names}
                jobs[str(number)] = WriteJob(file.path, tensors, file.metadata, file.hfshard_metadata, file.replaced)
        return jobs, order.checksum

    def _written(self, jobs: Mapping[str, WriteJob], checksum: str | None) -> dict[str, Any]:
        try:
            digests = write_shards(list(jobs.values()), checksum=checksum)
        except Exception:
            self._session.check()  # what another rank reported, before the directory was removed, is more specific
            raise
        return {number: digest.as_json() for number, digest in zip(jobs, digests, strict=True)}

    def _end(self) -> None:
        self._ask("end", None)
        self._session.begin_step()

    def _ask(self, kind: str, said: Any) -> None:
        self._session.order(json.dumps([kind, said]).encode())

    def _answer(self, value: Any) -> None:
        self._session.answer(json.dumps(value).encode())

    def _answers(self, ranks: set[int]) -> dict[int, Any]:
        """Return these ranks' answers to the last request, in ascending order of rank."""
        return {rank: json.loads(answer) for rank, answer in self._session.answers(ranks).items()}


def _contents(jobs: Sequence[WriteJob]) -> list[str | None]:
    """Compute digests of the files that would be written."""
    synchronize_devices(jobs)
    return run_in_threads(lambda job, stop: digest_shard(job, _CONTENT, None, stop)[0].xxh3, jobs, writer_threads())


def _has_token(path: str, token: str) -> bool:
    try:
        with open(path, encoding="ascii") as file:
            return file.read() == token
    except OSError:
        return False
