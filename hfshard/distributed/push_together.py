"""Push by many ranks: all meet, the first one sends what was staged, and every rank gets the results."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Final

from hfshard._util.call_ranks import has_other_ranks
from hfshard.distributed.rendezvous import Session, session
from hfshard.distributed.save_on_ranks import write_on_ranks
from hfshard.errors import InvalidArgumentError, NotEnoughSpaceError
from hfshard.format.index import CheckpointIndex
from hfshard.hub.repo import PushResult
from hfshard.saving.save_request import SaveRequest

_CALL: Final = "push_to_hub"
"""The call that the ranks make together."""


class SharedPush:
    """A push that one rank coordinates with the others. A rank that pushes alone is the sender."""

    def __init__(self, session: Session | None) -> None:
        self._session = session

    @property
    def is_collective(self) -> bool:
        """True if other ranks take part."""
        return self._session is not None

    @property
    def is_sender(self) -> bool:
        """True if this rank sends to the hub."""
        return self._session is None or self._session.is_leader

    def agree_on(self, repo_id: str) -> None:
        """Check that all ranks push to the same repo.

        Raises:
            InvalidArgumentError: They do not.
        """
        if self._session is None:
            return
        said = {rank: raw.decode() for rank, raw in self._session.meet("repo", repo_id.encode()).items()}
        first = self._session.leader
        other = next((rank for rank in said if said[rank] != said[first]), None)
        if other is not None:
            raise InvalidArgumentError(
                f"Rank {first} pushes to '{said[first]}', but rank {other} to '{said[other]}'. Make the same call on "
                "every rank."
            )

    def check(self) -> None:
        """Raise if another rank has failed or died.

        Raises:
            RankFailedError: It names the rank.
        """
        if self._session is not None:
            self._session.look()

    @contextmanager
    def folder(self) -> Iterator[StagingFolder]:
        """Create the sender's empty temporary directory. If the sender is killed, the other ranks remove it."""
        session = self._session
        name = f"hfshard-push-{uuid.uuid4().hex}"
        path = os.path.join(tempfile.gettempdir(), name)
        if session is not None:
            path = session.meet("staging", path.encode())[session.leader].decode()
        is_over = False
        try:
            if self.is_sender:
                os.mkdir(path, 0o700)
            yield self._look_at(path)
            is_over = True
        except BaseException as error:
            if session is not None:
                session.fail(error)  # before the files that others may be reading are removed
            raise
        finally:
            if self.is_sender or not is_over:
                shutil.rmtree(path, ignore_errors=True)

    def stage(self, request: SaveRequest, folder: StagingFolder) -> CheckpointIndex | None:
        """Save what the ranks have together; return the index on the sender, None on the others.

        Raises:
            NotEnoughSpaceError: The disk of the folder is too small.
            Everything that `save_on_ranks` raises.
        """
        assert self._session is not None
        try:
            index, _ = write_on_ranks(request, folder.path, self._session, self.check, writers=folder.seen_by)
            self._session.end_step()
            return index
        except NotEnoughSpaceError as error:
            raise NotEnoughSpaceError(
                f"{error.message} A model that is spread over ranks is written to this directory before it is pushed. "
                f"{temporary_directory_hint('has more space')}",
                path=folder.path,
            ) from error

    def send(self, push: Callable[[], Sequence[PushResult]]) -> list[PushResult]:
        """Let the sender push once all ranks have come here, and return its results on every rank.

        Args:
            push: Called on the sender; it calls `check` from time to time.

        Raises:
            RankFailedError: Another rank failed or died: nothing was committed. Or the sender did: the outcome is
                unknown.
        """
        session = self._session
        if session is None:
            return list(push())
        session.meet("send")
        if self.is_sender:
            results = list(push())
            session.finish(json.dumps([asdict(result) for result in results]).encode())
            return results
        outcome = session.finish(timeout_seconds=math.inf)  # a large model over a slow line takes hours
        return [PushResult(**result) for result in json.loads(outcome)]

    def _look_at(self, path: str) -> StagingFolder:
        session = self._session
        if session is None:
            return StagingFolder(path)
        session.meet("made")
        can_write = os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)
        said = session.meet("seen", b"yes" if can_write else b"")
        return StagingFolder(
            path,
            tuple(rank for rank, answer in said.items() if answer),
            tuple(rank for rank, answer in said.items() if not answer),
        )


@contextmanager
def push_together(*, is_collective: bool) -> Iterator[SharedPush]:
    """Run one push by all ranks of the call's process group, or raise on all.

    Args:
        is_collective: Whether every rank makes the call, because it has a part of what is pushed; False: this rank
            pushes alone.

    Raises:
        RankFailedError: Another rank failed, died, or did not come.
    """
    if not is_collective or not has_other_ranks():
        yield SharedPush(None)
        return
    with session(_CALL, needs_all=True) as ranks:
        yield SharedPush(ranks)


# Temporary directory for the files that the ranks stage for one push, and the ranks that see it.


@dataclass(frozen=True, slots=True)
class StagingFolder:
    """A temporary directory for the files of one push."""

    path: str
    seen_by: tuple[int, ...] = ()
    """The ranks that can write there; a rank on another machine may not see it."""
    unseen_by: tuple[int, ...] = ()

    def reject_unseen(self) -> None:
        """Raise if a rank that is needed does not see the directory.

        Raises:
            InvalidArgumentError: It names one.
        """
        if self.unseen_by:
            raise InvalidArgumentError(
                f"Rank {self.unseen_by[0]} does not see '{self.path}' of rank {self.seen_by[0]}, the directory for "
                f"this push's files. Nothing was pushed. {temporary_directory_hint('all ranks see')}",
                path=self.path,
            )


def temporary_directory_hint(need: str) -> str:
    """Describe, for a message, what to do if the temporary directory is unsuitable.

    Args:
        need: What a suitable one does: "has more space".
    """
    return (
        f"Set TMPDIR on rank 0 to a directory that {need}; or call save_pretrained on every rank and then, on one, "
        "hfshard.push_checkpoint."
    )
