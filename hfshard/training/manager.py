"""`CheckpointManager`: the checkpoints of one run, saved whole, found again, rotated, restored exactly."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from hfshard.constants import DEFAULT_MAX_SHARD_SIZE
from hfshard.errors import CheckpointNotFoundError, HfshardError, InvalidArgumentError
from hfshard.hub.pushing.request import PushOptions
from hfshard.planning.size import parse_size
from hfshard.storage.format.integrity import Checksum, check_checksum
from hfshard.training.collecting import RankState, collect, collect_rank
from hfshard.training.pushing.hubs import push_run
from hfshard.training.pushing.pusher import BackgroundPusher
from hfshard.training.ranks import Ranks
from hfshard.training.restoring.resume import choose_checkpoint, resume
from hfshard.training.run.directory import RunCheckpoint, checkpoint_path, checkpoints_in
from hfshard.training.run.finding import Level, checkpoint_of_step, checkpoint_problems, manifests_in, newest_whole
from hfshard.training.run.manifest import CheckpointManifest, plain_metrics
from hfshard.training.run.rotation import MetricMode, Rotation, best_of
from hfshard.training.run.writing import check_names
from hfshard.training.run_writer import RunWriter
from hfshard.training.state import TrainingState
from hfshard.training.step import RestoredStep, checked_step

if TYPE_CHECKING:
    from hfshard.hub.repo_tree import PushResult
    from hfshard.training.pushing.hubs import PushArguments

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Saves and restores the training states of one run in one directory.

        manager = CheckpointManager("run", max_to_keep=3, keep_best="eval_loss")
        state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        start = manager.restore_latest(state) or 0

    Each checkpoint is a directory `run/checkpoint-00001200` that is whole by itself, and that stock transformers loads
    as a model. It comes into being by one rename, when every byte is on the disk. No pickle is written or read.

    The directory is locked from the first save on, until `close()` or the end of the process.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        max_to_keep: int | None = None,
        keep_best: str | None = None,
        metric_mode: MetricMode = "min",
        keep_every: int | None = None,
        max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
        *,
        checksum: Checksum = "xxh3",
        push_to_hub: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
    ) -> None:
        """Name the run; nothing is made or read yet.

        Args:
            root: The run's directory, made at the first save.
            max_to_keep: How many of the last checkpoints stay; None: all. A save needs the disk for one more.
            keep_best: The name of a metric: the checkpoint with its best value stays too.
            metric_mode: "min" or "max": which value is best. NaN never is.
            keep_every: Checkpoints of steps that it divides stay too.
            max_shard_size: As in `save_model`, for model, optimizer and everything else.
            checksum: "xxh3" (at the memory's speed) or "sha256" (the Hub's own).
            push_to_hub: "org/name", or a path or file:// URL of a directory hub (with "@branch", if not main): each
                checkpoint is pushed there when it is saved; by a thread, where the save does not block. A push that
                fails is a warning, and `wait_until_finished` raises it.
            progress: A bar on stderr while a blocking save or a restore runs: None: on a terminal.

        Raises:
            InvalidArgumentError, InvalidSizeError, HubNotFoundError: An argument that can't be served.
        """
        rotation = Rotation(max_to_keep, keep_best, metric_mode, keep_every)
        parse_size(max_shard_size)
        check_checksum(checksum)
        self.root = os.path.abspath(
            os.path.expanduser(os.fspath(root))
        )  # a run that changes its directory saves where it did
        self.max_to_keep, self.keep_best, self.metric_mode = max_to_keep, keep_best, metric_mode
        self.keep_every, self.max_shard_size, self.checksum = keep_every, max_shard_size, checksum
        self.push_to_hub, self.progress = push_to_hub, progress
        pusher = BackgroundPusher(push_to_hub, progress) if push_to_hub is not None else None
        self._writer = RunWriter(self.root, rotation, pusher, progress)

    def save(
        self,
        step: int,
        state: TrainingState,
        *,
        metric: float | Mapping[str, float] | None = None,
        extra: Any = None,
        max_shard_size: int | str | None = None,
        blocking: bool = True,
        files: Mapping[str, bytes] | None = None,
    ) -> str:
        """Save the state as the checkpoint of a step, durably and all or nothing; then old ones go.

        It draws no random number and changes nothing of the run.

        Args:
            step: Of the run, from 0. A checkpoint of the same step is replaced when the new one is whole.
            state: What to save.
            metric: A number, which is the metric that `keep_best` names; or several by name.
            extra: More to be stored: numbers, text, lists, dicts, tensors.
            max_shard_size: In place of the manager's.
            blocking: False: return when the tensors are copied; the rest is done by a thread. One save is under way at
                a time: the next call waits for it, and raises its error if it failed.
            files: Small files to put into the checkpoint: name -> contents.

        Returns:
            The checkpoint's directory; with blocking=False it is there when the save is done.

        Raises:
            InvalidArgumentError, UnstorableTensorError: Before anything is written.
            DirectoryLockedError: Another manager is saving there.
            NotEnoughSpaceError: Before the first byte is written.
            OSError: The disk failed. All older checkpoints are there, and the next save may succeed.
        """
        ranks = Ranks.current()
        given, error = None, None
        try:
            given = checked_step(step), collect_rank(state, ranks.rank)
        except Exception as caught:  # noqa: BLE001 - raised below, when the first rank knows
            error = caught
        gathered = ranks.gather((given, None if error is None else f"{type(error).__name__}: {error}"))
        limit = max_shard_size or self.max_shard_size
        try:
            return ranks.first(
                lambda: self._save_all(gathered, state, metric, extra, limit, files or {}, blocking=blocking)
            )
        except HfshardError:
            if error is not None:
                raise error from None
            raise

    def restore(
        self,
        state: TrainingState,
        step: int | str | os.PathLike[str] | None = None,
        *,
        strict: bool = True,
        verify: Level = "full",
        token: str | bool | None = None,
    ) -> RestoredStep:
        """Restore the state as it was at a step, to the bit, or raise and change nothing.

        Args:
            state: Built as for the run that was saved; it is changed. Random number generators too.
            step: Which checkpoint; None: the one that was saved last. Or one from elsewhere: the path of its directory;
                or "org/name" on the Hub, or a path or file:// URL of a directory hub, with "@revision" if not main.
            strict: Refuse any difference; False: restore what fits, and report the rest.
            verify: "full": every byte is compared with its checksum before anything is changed; "structure": sizes,
                headers and fingerprints.
            token: For the Hub, as in huggingface_hub.

        Raises:
            CheckpointNotFoundError: There is none.
            HubError: It can't be fetched from the Hub.
            DamagedCheckpointError: It is damaged. (Without a step, damaged ones are passed over with a warning.)
            StateDictMismatchError: The state is another one; the message says what, and what to do.
        """
        restored = resume(state, lambda: self._chosen(step, verify, token), strict=strict)
        if restored is None:
            raise CheckpointNotFoundError(
                f"There is no checkpoint in '{self.root}'. Check the path, or train from the beginning.", path=self.root
            )
        return restored

    def restore_latest(
        self, state: TrainingState, *, strict: bool = True, verify: Level = "full"
    ) -> RestoredStep | None:
        """Restore the newest whole checkpoint; damaged ones are passed over, each with a warning that names it.

        Args:
            state, strict, verify: As in `restore`.

        Returns:
            The step; None where the run has no checkpoint yet.

        Raises:
            DamagedCheckpointError: All checkpoints are damaged.
            StateDictMismatchError: As in `restore`.
        """
        return resume(state, lambda: self._chosen(None, verify, None), strict=strict)

    def latest_step(self, verify: Level | None = None) -> int | None:
        """The step of the checkpoint that was saved last; None where there is none.

        Args:
            verify: Check its files as `restore` does: then damaged ones are passed over with a warning. None: only
                that it was finished.
        """
        self._writer.wait()
        if verify is not None:
            newest = newest_whole(self.root, verify, self.progress)
            return None if newest is None else newest[0].step
        return next((one.step for one in checkpoints_in(self.root) if one.manifest is not None), None)

    def best_step(self) -> int | None:
        """The step of the checkpoint with the best value of the metric that `keep_best` names; None where none has."""
        if self.keep_best is None:
            raise InvalidArgumentError("The manager has no metric: CheckpointManager(..., keep_best='eval_loss').")
        self._writer.wait()
        best = best_of(manifests_in(self.root), self.keep_best, self.metric_mode)
        return None if best is None else best.step

    def all_steps(self) -> list[int]:
        """The steps of all checkpoints that were finished, in ascending order."""
        self._writer.wait()
        return sorted(manifest.step for manifest in manifests_in(self.root))

    def path_of(self, step: int) -> str:
        """Where the checkpoint of a step lies, or would."""
        return checkpoint_path(self.root, step)

    def verify(self, step: int | None = None, *, level: Level = "full") -> dict[int, list[HfshardError]]:
        """Check every file of one checkpoint, or of all.

        Args:
            step: Which one; None: all.
            level: As `verify` in `restore`.

        Returns:
            Step -> what is wrong with its checkpoint; an empty list for a whole one. It does not raise for damage.

        Raises:
            CheckpointNotFoundError: There is no checkpoint of this step.
        """
        self._writer.wait()
        found = checkpoints_in(self.root) if step is None else [checkpoint_of_step(self.root, step)]
        return {one.step: checkpoint_problems(one, level) for one in sorted(found, key=lambda one: one.step)}

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

        It is compared with its manifest first. What the hub has is not sent, and what the checkpoint that was pushed
        before left there goes in the same commit; README and other files stay. An unchanged push makes no commit.

        Args:
            repo_id: "org/name", made if it is missing; or a path or file:// URL of a directory that serves as a hub. Of
                several ranks, which all call, the first one pushes.
            step: Which one; None: the one that was saved last; "best": see `best_step`; "all": all in the order in
                which they were saved, a commit each, but those that the branch has had.
            revision, private, token, create_pr: As in `push_checkpoint`.
            commit_message: None: "Checkpoint at step 1200".
            progress: A bar on stderr: None: as the manager's.

        Returns:
            The commit, and whether it is a new one; for "all" a list of those that were made.

        Raises:
            CheckpointNotFoundError: There is none.
            DamagedCheckpointError: It is damaged; nothing was pushed.
            HubError: As `push_checkpoint` raises it.
        """
        progress = self.progress if progress is None else progress
        options = PushOptions(
            revision=revision,
            private=private,
            token=token,
            commit_message=commit_message,
            create_pr=create_pr,
            progress=progress,
        )

        def work() -> PushResult | list[PushResult]:
            self._writer.wait_for_all()
            return push_run(self.root, repo_id, step, self.best_step, options)

        return Ranks.current().first(work)

    def wait_until_finished(self) -> None:
        """Wait for a save and a push that are under way, and raise the error of the last one if it failed."""
        self._writer.wait_until_finished()

    def close(self) -> None:
        """Do as `wait_until_finished`, and let other managers save into the directory."""
        self._writer.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # How

    def _save_all(
        self,
        given: Sequence[tuple[tuple[int, RankState] | None, str | None]],
        state: TrainingState,
        metric: float | Mapping[str, float] | None,
        extra: Any,
        limit: int | str,
        files: Mapping[str, bytes],
        *,
        blocking: bool,
    ) -> str:
        """On the first rank: what all ranks gave, and everything that is the same on them."""
        self._writer.wait()
        parts: list[RankState] = []
        steps: list[int] = []
        for rank, (part, problem) in enumerate(given):
            if part is None:
                raise HfshardError(f"Rank {rank} can't save: {problem}")
            steps.append(part[0])
            parts.append(part[1])
        step = steps[0]
        if any(other != step for other in steps):
            raise InvalidArgumentError(f"The ranks save different steps: {steps}.")
        metrics = plain_metrics(metric, self.keep_best)
        if metrics and self.keep_best is not None and self.keep_best not in metrics:
            logger.warning("The metrics of step %d lack '%s', by which the best is kept.", step, self.keep_best)
        payload = collect(state, parts, extra, limit, self.checksum, self.progress)
        check_names(files, payload)
        self._writer.save(step, payload, metrics, dict(files), blocking=blocking)
        return checkpoint_path(self.root, step)

    def _chosen(
        self, step: int | str | os.PathLike[str] | None, verify: Level, token: str | bool | None
    ) -> tuple[RunCheckpoint, CheckpointManifest] | None:
        """On the first rank: the checkpoint to restore, checked; None: the run has none."""
        self._writer.wait()
        if step is None:
            return newest_whole(self.root, verify, self.progress)
        return choose_checkpoint(self.root, step, verify, token, self.progress)
