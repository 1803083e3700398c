"""`CheckpointManager`: the checkpoints of one run, saved whole, found again, rotated, restored exactly."""

from __future__ import annotations

import logging
import os
import shutil
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch

from hfshard.constants import DEFAULT_MAX_SHARD_SIZE
from hfshard.errors import CheckpointNotFoundError, HfshardError, InvalidArgumentError
from hfshard.progress import bytes_bar
from hfshard.size import parse_size
from hfshard.storage.durable import make_directories
from hfshard.storage.integrity import Checksum, check_checksum
from hfshard.training.background import Background
from hfshard.training.collecting import Collected, collect
from hfshard.training.finding import Level, checked, manifests_in, newest_whole, of_step, problems_of
from hfshard.training.hub_runs import PushOptions, choose_to_push, found_at, push_all, push_found
from hfshard.training.manifest import Manifest, plain_metrics
from hfshard.training.publisher import Publisher
from hfshard.training.restoring import prepare
from hfshard.training.rotation import MetricMode, best_of, check_rotation, steps_to_remove
from hfshard.training.run_directory import (
    Found,
    checkpoint_path,
    found_in,
    put_in_place,
    remove,
    sweep,
    writing_path,
)
from hfshard.training.run_lock import RunLock
from hfshard.training.snapshot import Snapshots
from hfshard.training.state import TrainingState
from hfshard.training.step import RestoredStep, checked_step
from hfshard.training.writing import Linkable, check_names, write_checkpoint

if TYPE_CHECKING:
    from hfshard.hub.listing import PushResult
    from hfshard.training.hub_runs import PushArguments

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
            max_to_keep: How many of the last checkpoints stay; None: all.
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
        check_rotation(max_to_keep, keep_best, metric_mode, keep_every)
        parse_size(max_shard_size)
        check_checksum(checksum)
        self.root = os.path.abspath(os.fspath(root))  # a run that changes its directory saves where it did
        self.max_to_keep, self.keep_best, self.metric_mode = max_to_keep, keep_best, metric_mode
        self.keep_every, self.max_shard_size, self.checksum = keep_every, max_shard_size, checksum
        self.push_to_hub, self.progress = push_to_hub, progress
        self._lock: RunLock | None = None
        self._background = Background()
        self._publisher = Publisher(push_to_hub, progress) if push_to_hub is not None else None
        self._snapshots = Snapshots()
        self._is_swept = False
        """Whether nothing is left of saves that were killed or failed."""

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
        self._background.wait()
        step = checked_step(step)
        _refuse_several_processes()
        metrics = plain_metrics(metric, self.keep_best)
        collected = collect(state, extra, max_shard_size or self.max_shard_size, self.checksum, self.progress)
        check_names(files or {}, collected)
        self._begin()
        if blocking:
            self._write(step, collected, metrics, dict(files or {}), self.progress, blocking=True)
        else:
            copied, small = self._snapshots.copy_of(collected), dict(files or {})
            what = f"Saving the checkpoint of step {step} into '{self.root}'"
            self._background.start(lambda: self._write(step, copied, metrics, small, False, blocking=False), what)
        return checkpoint_path(self.root, step)

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
                headers and samples.
            token: For the Hub, as in huggingface_hub.

        Raises:
            CheckpointNotFoundError: There is none.
            HubError: It can't be fetched from the Hub.
            DamagedCheckpointError: It is damaged. (Without a step, damaged ones are passed over with a warning.)
            StateDictMismatchError: The state is another one; the message says what, and what to do.
        """
        if step is not None:
            self._background.wait()
            if isinstance(step, str | os.PathLike):
                found = found_at(step, token=token, progress=self.progress)
            else:
                found = of_step(self.root, step)
            return self._restored(found, checked(found, verify, self.progress), state, strict=strict)
        restored = self.restore_latest(state, strict=strict, verify=verify)
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
        self._background.wait()
        newest = newest_whole(self.root, verify, self.progress)
        return None if newest is None else self._restored(*newest, state, strict=strict)

    def latest_step(self, verify: Level | None = None) -> int | None:
        """The step of the checkpoint that was saved last; None where there is none.

        Args:
            verify: Check its files as `restore` does: then damaged ones are passed over with a warning. None: only
                that it was finished.
        """
        self._background.wait()
        if verify is not None:
            newest = newest_whole(self.root, verify, self.progress)
            return None if newest is None else newest[0].step
        return next((one.step for one in found_in(self.root) if one.manifest is not None), None)

    def best_step(self) -> int | None:
        """The step of the checkpoint with the best value of the metric that `keep_best` names; None where none has."""
        if self.keep_best is None:
            raise InvalidArgumentError("The manager has no metric: CheckpointManager(..., keep_best='eval_loss').")
        self._background.wait()
        best = best_of(manifests_in(self.root), self.keep_best, self.metric_mode)
        return None if best is None else best.step

    def all_steps(self) -> list[int]:
        """The steps of all checkpoints that were finished, in ascending order."""
        self._background.wait()
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
        self._background.wait()
        found = found_in(self.root) if step is None else [of_step(self.root, step)]
        return {one.step: problems_of(one, level) for one in sorted(found, key=lambda one: one.step)}

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
            repo_id: "org/name", made if it is missing; or a path or file:// URL of a directory that serves as a hub.
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
        self._background.wait()
        if self._publisher is not None:
            self._publisher.join()
        progress = self.progress if progress is None else progress
        options = PushOptions(revision, private, token, commit_message, create_pr, progress)
        if step == "all":
            return push_all(found_in(self.root), repo_id, options)
        wanted = self.best_step() if step == "best" else step
        return push_found(choose_to_push(self.root, wanted, is_best=step == "best"), repo_id, options)

    def wait_until_finished(self) -> None:
        """Wait for a save and a push that are under way, and raise the error of the last one if it failed."""
        try:
            self._background.wait()
        finally:
            if self._publisher is not None:
                self._publisher.join()
                if self._lock is not None:
                    self._rotate(found_in(self.root))  # what was being pushed stayed
                self._publisher.wait()

    def close(self) -> None:
        """Do as `wait_until_finished`, and let other managers save into the directory."""
        try:
            self.wait_until_finished()
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Saving

    def _begin(self) -> None:
        """At the first save: make the directory, lock it, remove what killed saves left."""
        if self._lock is None or not self._lock.is_held:  # a forked process has to ask for itself
            make_directories(self.root)
            self._lock = RunLock(self.root)
            weakref.finalize(self, self._lock.release)
            self._is_swept = False
        if not self._is_swept:
            sweep(self.root)
            self._is_swept = True

    def _write(
        self,
        step: int,
        collected: Collected,
        metrics: dict[str, float],
        files: dict[str, bytes],
        progress: bool | None,
        *,
        blocking: bool,
    ) -> None:
        found = found_in(self.root)
        manifests = [one.manifest for one in found if one.manifest is not None]
        newest = next((one for one in found if one.manifest is not None), None)
        sequence = max((one.sequence for one in manifests), default=0) + 1
        linkable = Linkable.of(newest.path, newest.manifest) if newest and newest.manifest else Linkable()
        directory = writing_path(self.root, step)
        if os.path.lexists(directory):
            shutil.rmtree(directory)
        os.mkdir(directory)
        try:
            with bytes_bar("Saving", collected.nbytes, progress) as on_bytes:
                manifest = Manifest(step, sequence, metrics)
                manifest = write_checkpoint(directory, collected, manifest, files, linkable, on_bytes)
            path = put_in_place(directory, self.root, step)
        except BaseException:
            self._is_swept = False
            shutil.rmtree(directory, ignore_errors=True)  # the next save tries again
            raise
        logger.info("Saved the checkpoint of step %d, %d bytes of tensors, as '%s'.", step, collected.nbytes, path)
        saved = Found(path, step, manifest)
        self._rotate([one for one in found if one.step != step] + [saved])
        if self._publisher is not None:
            self._publisher.publish(saved, blocking=blocking)

    def _rotate(self, found: list[Found]) -> None:
        steps = steps_to_remove(
            [one.manifest for one in found if one.manifest is not None],
            max_to_keep=self.max_to_keep,
            keep_best=self.keep_best,
            metric_mode=self.metric_mode,
            keep_every=self.keep_every,
        )
        in_use = self._publisher.steps_in_use if self._publisher is not None else set()
        for one in found:
            if one.manifest is not None and one.step in steps and one.step not in in_use:
                remove(one, self.root)

    # Restoring

    def _restored(self, found: Found, manifest: Manifest, state: TrainingState, *, strict: bool) -> RestoredStep:
        restoration = prepare(state, found.path, manifest, strict=strict)
        for difference in restoration.differences:
            logger.warning("%s", difference)
        restoration.apply()
        restored = RestoredStep(manifest.step)
        restored.path, restored.extra, restored.metrics = found.path, restoration.extra, manifest.metrics
        restored.differences = tuple(restoration.differences)
        logger.info("Restored the checkpoint of step %d from '%s'.", manifest.step, found.path)
        return restored


def _refuse_several_processes() -> None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise InvalidArgumentError(
            "A CheckpointManager saves the state of one process, and this run has "
            f"{distributed.get_world_size()}: the random state and data position of the others would be lost. "
            "Save the model alone on rank 0: hfshard.save_model(model, directory, is_main_process=rank == 0)."
        )
