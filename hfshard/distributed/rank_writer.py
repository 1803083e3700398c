"""Write the files of a save on all ranks: each file on the rank that owns it, from the parts that all hold."""

from __future__ import annotations

import json
import os
import queue
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from threading import Event
from typing import Any, Final, Literal, Self

from hfshard._util.addresses import is_address
from hfshard._util.progress import ProgressCallback
from hfshard._util.threads import deferred_interrupt, start_thread
from hfshard.commit.transaction import KnownFile, link_if_same, upload_files
from hfshard.constants import FINGERPRINT_BYTES
from hfshard.distributed.exchange import CpuGroup, Exchange
from hfshard.distributed.rendezvous import SaveStatus
from hfshard.distributed.spread_tensor import ByteArray
from hfshard.distributed.tensor_owners import HeldTensor, Holders, assign_owners
from hfshard.errors import HfshardError
from hfshard.format.digests import fingerprint_positions
from hfshard.format.index import FileDigest
from hfshard.shards.write_shards import WriteJob, fingerprint_of_job, write_shards
from hfshard.stores.open_store import open_store
from hfshard.stores.store import Store
from hfshard.tensors.stored_tensor import RawTensor, TensorLayout

_END: Final = b"null"
"""The order after the last one."""
_CONFIRM: Final = b"true"
"""The order to say that this rank still takes part, before the leader commits."""
_CONFIRMS_PER_DEATH: Final = 3
"""Answers that took a longer part of the time after which a silent rank is taken for dead are asked for again."""
_LOOK_SECONDS: Final = 0.2
"""Between two looks whether another rank failed, while the last blocks are flushed."""


class RankWriter:
    """The `ShardWriter` of the leader, and what the other ranks do meanwhile.

    1. The leader orders files; all ranks find the same owner for each.
    2. When all are ready, the bytes go to the owners in rounds. A thread of each owner writes its files with the
       package's ordinary writer: in one pass, with their checksums, flushed.
    3. Each owner tells the digests of its files.
    4. All confirm that they still take part, and the leader commits. So a rank that raises before it has confirmed
       knows that nothing was committed, even where the leader was stopped for a while and then goes on.

    Args:
        status: Of the save; all ranks of the call take part.
        holders: Which rank has what.
        held: This rank's tensors.
        group: Its collectives take tensors of the CPU.
        stored_name: Gives the name in a file of a tensor that the ranks know by another one.
        writers: The ranks that may write; none: all.
    """

    def __init__(
        self,
        status: SaveStatus,
        holders: Holders,
        held: Mapping[str, HeldTensor],
        group: CpuGroup | None,
        stored_name: Callable[[str], str] = str,
        writers: Sequence[int] = (),
    ) -> None:
        self._status, self._holders = status, holders
        self._exchange = Exchange(holders, held, status, group)
        self._names = list(holders.layouts)
        self._stored_name = stored_name
        self._writers = writers or status.ranks
        self._orders = 0

    def fingerprints(self, jobs: Sequence[WriteJob], checksum: str | None) -> Iterable[str]:
        """As in `ShardWriter`; on the leader."""
        return [str(value) for value in self._lead("fingerprint", jobs, checksum, None)]

    def link(self, jobs: Sequence[WriteJob], known: Mapping[str, KnownFile], checksum: str) -> list[FileDigest | None]:
        """As in `ShardWriter`; on the leader. Only of files whose fingerprints are known all bytes are sent."""
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
        """As in `ShardWriter`; on the leader. Each rank opens the store that its files' paths lead to."""
        return [FileDigest(**value) for value in self._lead("write", jobs, checksum, progress_callback)]

    def confirm(self) -> None:
        """As in `ShardWriter`; on the leader.

        Raises:
            RankFailedError: A rank failed, died, or gave up when this one was silent.
        """
        is_fresh = False
        while not is_fresh:
            asked_at = time.monotonic()
            self._status.tell(self._next_order(), _CONFIRM)
            for rank in self._status.ranks[1:]:
                self._status.wait_for(self._answer(), rank)
            is_fresh = time.monotonic() - asked_at < self._status.death_seconds / _CONFIRMS_PER_DEATH
        self._status.begin_step()

    def end(self) -> None:
        """Let the others end `follow`; on the leader."""
        self._status.tell(self._next_order(), _END)

    def follow(self) -> None:
        """Do what the leader orders, until the end; on the other ranks."""
        while (raw := self._status.wait_for(self._next_order(), self._status.leader)) != _END:
            if raw == _CONFIRM:
                self._status.begin_step()
                self._status.tell(self._answer())
            elif found := self._carry_out(Order.from_json(raw, self._names), None):
                self._status.tell(self._answer(), json.dumps(found).encode())

    def _next_order(self) -> str:
        self._orders += 1
        return f"order/{self._orders}"

    def _answer(self) -> str:
        return f"done/{self._orders}"

    def _lead(
        self,
        kind: Kind,
        jobs: Sequence[WriteJob],
        checksum: str | None,
        progress_callback: ProgressCallback | None,
        known: Sequence[KnownFile] = (),
    ) -> list[Any]:
        order = Order.of(kind, jobs, checksum, known)
        self._status.tell(self._next_order(), order.to_json(self._names))
        try:
            found: dict[str, Any] = dict(self._carry_out(order, progress_callback))
            for owner in sorted(set(self._owners(order)) - {self._status.rank}):
                found |= json.loads(self._status.wait_for(self._answer(), owner))
        except BaseException as error:
            self._status.fail(error)  # before the session removes the files that others are writing
            raise
        return [found[str(number)] for number in range(len(order.files))]

    def _owners(self, order: Order) -> list[int]:
        layouts = self._holders.layouts
        sizes = [sum(count for _, count in order.wanted_bytes(file, layouts)) for file in order.files]
        return assign_owners(sizes, self._writers)

    def _carry_out(self, order: Order, progress_callback: ProgressCallback | None) -> dict[str, Any]:
        """Take part in one order; gives what this rank found, by the numbers of its files."""
        mine: dict[str, OrderedFile] = {}
        streams: dict[int, list[tuple[str, int]]] = {}
        for number, (file, owner) in enumerate(zip(order.files, self._owners(order), strict=True)):
            streams.setdefault(owner, []).extend(order.wanted_bytes(file, self._holders.layouts))
            if owner == self._status.rank:
                mine[str(number)] = file
        incoming = Incoming()
        with deferred_interrupt() as was_interrupted:
            self._status.meet("ready")  # from here on each rank takes part in every round
            writer = start_thread(partial(self._write_files, order, mine, incoming), "hfshard-owner")

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
                self._status.check()  # what another rank told, before its directory went away, says more
                raise
            finally:
                incoming.close()
                if writer is not None:
                    wait([writer])

    def _await(self, writer: Future[dict[str, Any]] | None) -> dict[str, Any]:
        """Wait until this rank's files are flushed; give up where another rank fails meanwhile."""
        if writer is None:
            raise _no_thread()
        while not wait([writer], timeout=_LOOK_SECONDS).done:
            self._status.check()
        return writer.result()

    def _write_files(self, order: Order, files: Mapping[str, OrderedFile], incoming: Incoming) -> dict[str, Any]:
        """What an owner's thread does: its files one after another, as their bytes come."""
        found: dict[str, Any] = {}
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
                digest = self._write(job, order.checksum)
                found[number] = digest.as_json() | {"etag": digest.etag}
        return found

    def _write(self, job: WriteJob, checksum: str | None) -> FileDigest:
        if is_address(job.path):
            address, _, name = job.path.rpartition("/")
            return upload_files(open_store(address), {name: job}, checksum)[name]
        try:
            return write_shards([job], checksum=checksum)[0]
        except FileNotFoundError as error:
            raise HfshardError(
                f"Rank {self._status.rank} does not see the directory of '{job.path}', which rank "
                f"{self._status.leader} made. Save into a directory that all ranks see.",
                path=job.path,
            ) from error


def _no_thread() -> HfshardError:
    return HfshardError("No thread can be started to write files. Save before Python exits.")


# What the leader of a save has all ranks do: files to write or to link, or their fingerprints to compute.


Kind = Literal["write", "link", "fingerprint"]


@dataclass(frozen=True, slots=True)
class OrderedFile:
    """One file of an order: a `WriteJob` without its tensors' bytes."""

    path: str
    names: tuple[str, ...]
    """In the order of their bytes."""
    metadata: dict[str, str]
    hfshard_metadata: dict[str, Any] | None
    like: tuple[int, int] | None
    """Mode and group of the file that it will replace."""
    known: KnownFile | None = None
    """To be linked, if it has the very bytes; for an order to link."""

    @property
    def replaced(self) -> os.stat_result | None:
        """The status of the file that it will replace, as far as a new file gets it."""
        if self.like is None:
            return None
        mode, group = self.like
        return os.stat_result((stat.S_IFREG | mode, 0, 0, 1, 0, group, 0, 0, 0, 0))


@dataclass(frozen=True, slots=True)
class Order:
    """Files for all ranks, each of which owns some."""

    kind: Kind
    checksum: str | None
    files: tuple[OrderedFile, ...]

    @classmethod
    def of(cls, kind: Kind, jobs: Sequence[WriteJob], checksum: str | None, known: Sequence[KnownFile] = ()) -> Self:
        """Order what `write_shards` would do with these jobs, or for each of them what `link_if_same` would."""
        files = zip(jobs, known or repeat(None))
        return cls(kind, checksum, tuple(_ordered(job, file) for job, file in files))

    def wanted_bytes(self, file: OrderedFile, layouts: Mapping[str, TensorLayout]) -> list[tuple[str, int]]:
        """(name, how many of its first bytes are needed), in the order of the file."""
        if self.kind == "fingerprint":
            sampled = [file.names[position] for position in fingerprint_positions(len(file.names))]
            return [(name, min(FINGERPRINT_BYTES, layouts[name].nbytes)) for name in sampled]
        return [(name, layouts[name].nbytes) for name in file.names]

    def to_json(self, names: Sequence[str]) -> bytes:
        """Encode it; names are told by their numbers, which all ranks know."""
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
        """Decode it, with the same names."""
        kind, checksum, values = json.loads(raw)
        files = []
        for path, ranges, metadata, hfshard_metadata, like, known in values:
            chosen = tuple(names[number] for start, stop in ranges for number in range(start, stop))
            mode_and_group = None if like is None else tuple(like)
            file = None if known is None else KnownFile(known[0], FileDigest(**known[1]))
            files.append(OrderedFile(path, chosen, metadata, hfshard_metadata, mode_and_group, file))
        return cls(kind, checksum, tuple(files))


def _ordered(job: WriteJob, known: KnownFile | None) -> OrderedFile:
    own = job.hfshard_metadata
    like = None if job.like is None else (stat.S_IMODE(job.like.st_mode), job.like.st_gid)
    own_metadata = None if own is None else dict(own)
    return OrderedFile(job.path, tuple(job.tensors), dict(job.metadata), own_metadata, like, known)


def _ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers as ranges of consecutive ones, in their order."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1] = ranges[-1][0], number + 1
        else:
            ranges.append((number, number + 1))
    return ranges


# The bytes of an owner's files on their way from the exchange to the thread that writes them.


_WINDOWS: Final = 2
"""That wait at most: one is written while the next ones come, and memory stays bounded."""
_INCOMING_LOOK_SECONDS: Final = 0.1
"""Between two looks whether the other side is still there."""


class Incoming:
    """A queue of windows, which are consecutive: one thread puts them, one takes their bytes."""

    def __init__(self) -> None:
        self._windows: queue.Queue[ByteArray] = queue.Queue(_WINDOWS)
        self._left = memoryview(b"")
        self._is_closed = False

    def put(self, window: ByteArray, is_taken: Callable[[], bool]) -> None:
        """Hand on the next bytes, when there is room; they are dropped where nobody takes any more.

        Args:
            window: Not to be changed any more.
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
        """What a `RawTensor` gets its bytes from: the next ones of the queue, once."""

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
                raise InterruptedError("the bytes of this file do not come any more: the save has failed")
            try:
                self._left = self._windows.get(timeout=_INCOMING_LOOK_SECONDS).data
            except queue.Empty:
                continue
        block = self._left[:most_bytes]
        self._left = self._left[most_bytes:]
        return block
