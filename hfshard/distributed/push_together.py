"""Push by several ranks: all meet, the leader sends what was staged, and every rank gets the results."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Final

from hfshard._util.call_ranks import Session
from hfshard.distributed.rendezvous import session
from hfshard.distributed.save_on_ranks import write_on_ranks
from hfshard.errors import InvalidArgumentError, NotEnoughSpaceError
from hfshard.format.index import CheckpointIndex
from hfshard.hub.repo import PushResult
from hfshard.places.place import DirectoryPlace
from hfshard.saving.save_request import SaveRequest

_CALL: Final = "push_to_hub"
"""The call that the ranks make together."""


def push_together() -> AbstractContextManager[Session]:
    """Run one push by all ranks of the call's process group, or raise on all; the leader sends to the hub.

    Every rank makes the call, because it has a part of what is pushed.

    Raises:
        RankFailedError: Another rank failed, died, or did not come.
    """
    return session(_CALL, needs_all=True)


def agree_on_repo(ranks: Session, repo_id: str) -> None:
    """Check that all ranks push to the same repo.

    Raises:
        InvalidArgumentError: They do not.
    """
    answers = ranks.meet("repo", repo_id.encode(errors="surrogateescape"))
    said = {rank: raw.decode(errors="surrogateescape") for rank, raw in answers.items()}
    first = ranks.leader
    other = next((rank for rank in said if said[rank] != said[first]), None)
    if other is not None:
        raise InvalidArgumentError(
            f"Rank {first} pushes to '{said[first]}', but rank {other} to '{said[other]}'. Make the same call on "
            "every rank."
        )


@contextmanager
def staging_folder(ranks: Session) -> Iterator[StagingFolder]:
    """Create the leader's empty temporary directory. If the leader is killed, the other ranks remove it."""
    own = os.path.join(tempfile.gettempdir(), f"hfshard-push-{uuid.uuid4().hex}")
    path = os.fsdecode(ranks.meet("staging", os.fsencode(own))[ranks.leader])
    is_over = False
    try:
        if ranks.is_leader:
            os.mkdir(path, 0o700)
        yield _inspect(ranks, path)
        is_over = True
    except BaseException as error:
        ranks.fail(error)  # before the files that others may be reading are removed
        raise
    finally:
        if ranks.is_leader or not is_over:
            shutil.rmtree(path, ignore_errors=True)


def _inspect(ranks: Session, path: str) -> StagingFolder:
    """Find out which ranks see the leader's directory."""
    ranks.meet("made")
    can_write = os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)
    said = ranks.meet("seen", b"yes" if can_write else b"")
    return StagingFolder(
        path,
        ranks.leader,
        tuple(rank for rank, answer in said.items() if answer),
        tuple(rank for rank, answer in said.items() if not answer),
    )


def stage(ranks: Session, request: SaveRequest, folder: StagingFolder) -> CheckpointIndex | None:
    """Save what the ranks have together; return the index on the leader, None on the others.

    Raises:
        NotEnoughSpaceError: The disk of the folder is too small.
        Everything that `save_on_ranks` raises.
    """
    try:
        index, _ = write_on_ranks(request, DirectoryPlace(folder.path), ranks, ranks.look, writers=folder.seen_by)
        ranks.end_step()
        return index
    except NotEnoughSpaceError as error:
        raise NotEnoughSpaceError(
            f"{error.message} A model that is spread over ranks is written to this directory before it is pushed. "
            f"{_temporary_directory_hint('has more space')}",
            path=folder.path,
        ) from error


def send(ranks: Session, push: Callable[[], Sequence[PushResult]]) -> list[PushResult]:
    """Let the leader push once all ranks have come here, and return its results on every rank.

    Args:
        ranks: The session of the push.
        push: Called on the leader; it calls `ranks.look` from time to time.

    Raises:
        RankFailedError: Another rank failed or died: nothing was committed. Or the leader did: the outcome is unknown.
    """
    ranks.meet("send")
    if ranks.is_leader:
        results = list(push())
        ranks.finish(json.dumps([asdict(result) for result in results]).encode())
        return results
    outcome = ranks.finish(timeout_seconds=math.inf)  # a large model over a slow line takes hours
    return [PushResult(**result) for result in json.loads(outcome)]


# Temporary directory for the files that the ranks stage for one push, and the ranks that see it.


@dataclass(frozen=True, slots=True)
class StagingFolder:
    """A temporary directory for the files of one push."""

    path: str
    owner: int
    """The rank that created it."""
    seen_by: tuple[int, ...] = ()
    """The ranks that can write there; a rank on another machine may not see it."""
    unseen_by: tuple[int, ...] = ()

    def reject_unseen(self) -> None:
        """Raise if a rank that is needed does not see the directory.

        Raises:
            InvalidArgumentError: It names one.
        """
        if self.unseen_by:
            problem, need = f"does not see '{self.path}' of rank {self.owner}", "all ranks see"
            rank = self.unseen_by[0]
            if self.owner in self.unseen_by:
                problem, need, rank = f"cannot write into '{self.path}'", "it can write into", self.owner
            raise InvalidArgumentError(
                f"Rank {rank} {problem}, the directory for this push's files. Nothing was pushed. "
                f"{_temporary_directory_hint(need)}",
                path=self.path,
            )


def _temporary_directory_hint(need: str) -> str:
    """Say what to do if the temporary directory is not one that, for example, "has more space"."""
    return (
        f"Set TMPDIR on rank 0 to a directory that {need}; or call save_pretrained on every rank and then, on one, "
        "hfshard.push_checkpoint."
    )
