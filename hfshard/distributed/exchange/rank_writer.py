"""Writes the files of a save on all ranks: each file on the rank that owns it, from the parts that all hold."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from threading import Event
from typing import Any, Final

from hfshard._util.addresses import is_address
from hfshard._util.progress import ProgressCallback
from hfshard._util.threads import deferred_interrupt, start_thread
from hfshard.commit.transaction import KnownFile, link_if_same, upload_files
from hfshard.distributed.exchange.holders import Holders
from hfshard.distributed.exchange.incoming import Incoming
from hfshard.distributed.exchange.listing import HeldTensor
from hfshard.distributed.exchange.orders import Kind, Order, OrderedFile
from hfshard.distributed.exchange.owners import assign_owners
from hfshard.distributed.exchange.rounds import CpuGroup, Exchange
from hfshard.distributed.status import SaveStatus
from hfshard.errors import HfshardError
from hfshard.format.index import FileDigest
from hfshard.shards.write_shards import WriteJob, fingerprint_of_job, write_shards
from hfshard.stores.open_store import open_store
from hfshard.stores.store import Store
from hfshard.tensors.stored_tensor import RawTensor

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
