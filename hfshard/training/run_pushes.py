"""Pushes of a run's checkpoints to a hub that a caller asks for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal, Unpack, overload

import torch.distributed as dist

from hfshard._util.arguments import names_files
from hfshard.commit.hub_marker import absolute_address
from hfshard.distributed.group_store import among
from hfshard.distributed.push_together import push_together
from hfshard.hub.push_files import PushOptions
from hfshard.training.pushing.hubs import found_to_push, push_run
from hfshard.training.run_reader import RunReader

if TYPE_CHECKING:
    from hfshard.hub.repo import PushResult
    from hfshard.training.pushing.hubs import PushArguments


class RunPushes(RunReader):
    """What a `CheckpointManager` pushes when it is told to; other threads may save meanwhile."""

    process_group: dist.ProcessGroup | None

    @overload
    def push(
        self,
        repo_id: str | os.PathLike[str],
        step: int | Literal["best"] | None = None,
        **options: Unpack[PushArguments],
    ) -> PushResult: ...

    @overload
    def push(
        self, repo_id: str | os.PathLike[str], step: Literal["all"], **options: Unpack[PushArguments]
    ) -> list[PushResult]: ...

    @names_files("root")
    def push(
        self,
        repo_id: str | os.PathLike[str],
        step: int | Literal["best", "all"] | None = None,
        *,
        revision: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str | None = None,
        create_pr: bool = False,
        progress: bool | None = None,
    ) -> PushResult | list[PushResult]:
        """Push a checkpoint as one commit, its files at the top of the repo: stock transformers loads the model there.

            manager.push("org/name", "best")

        Its files are compared with its manifest first: a link is pushed as what it leads to, which must be what was
        saved. Files that the hub has are not sent again. Files that the
        checkpoint pushed before left there are deleted in the same commit; README and other files stay. If nothing
        changed, no commit is made.

        Args:
            repo_id: "org/name", created if it is missing; or a path or file:// URL of a directory that serves as a hub.
                With several ranks, all call and the first one pushes.
            step: Which checkpoint; None: the one that was saved last; "best": see `best_step`; "all": all that the
                branch has not had, in the order in which they were saved, with one commit each.
            revision, private, token, create_pr: As in `push_checkpoint`.
            commit_message: None: "Checkpoint at step 1200".
            progress: Whether to show a bar on stderr; None: as the manager does.

        Returns:
            The commit, and whether it is a new one; for "all" a list of those that were made.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
            DamagedCheckpointError: It is damaged; nothing was pushed.
            HubError: As in `push_checkpoint`.
        """

        def work() -> list[PushResult]:
            options = PushOptions(
                revision=revision,
                private=private,
                token=token,
                commit_message=commit_message,
                create_pr=create_pr,
                progress=self.progress if progress is None else progress,
            )
            with self._writer.kept(lambda: found_to_push(self._place, step, self.best_step)) as found:
                return push_run(found, place, step, options)

        with among(self.process_group), push_together(is_collective=True) as together:
            place = absolute_address(repo_id)
            together.agree_on(place)
            results = together.send(work)
        return results if step == "all" else results[0]
