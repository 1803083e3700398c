"""Writers of a save of replicated tensors: each rank writes some of the files, with the first rank's bytes."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

from hfshard._util.call_ranks import Session
from hfshard._util.progress import ProgressCallback
from hfshard._util.threads import run_in_threads
from hfshard.commit.transaction import OwnShardWriter
from hfshard.distributed.rank_writer import WriteTask
from hfshard.distributed.tensor_owners import assign_owners
from hfshard.format.index import FileDigest
from hfshard.shards.write_shards import WriteJob, digest_shard, synchronize_devices, write_shards, writer_threads
from hfshard.stores.store import Store
from hfshard.tensors.stored_tensor import TensorLike

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
