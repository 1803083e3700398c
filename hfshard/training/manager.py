"""`CheckpointManager`: the checkpoints of one run, saved atomically, found, rotated and restored exactly."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch.distributed as dist

from hfshard._util.arguments import wraps_os_errors
from hfshard._util.call_ranks import Session, among, check_process_group, has_other_ranks, together_if
from hfshard.constants import DEFAULT_MAX_SHARD_SIZE
from hfshard.distributed.push_together import agree_on_repo, push_together, send
from hfshard.errors import CheckpointNotFoundError, InvalidArgumentError
from hfshard.format.index import Checksum
from hfshard.hub.directory.directory_hub import absolute_repo_id
from hfshard.hub.push_files import PushOptions
from hfshard.places.place import place_to_save
from hfshard.saving.save_request import SaveOptions
from hfshard.signing.check_signature import required_signature
from hfshard.signing.signer import SignedBy
from hfshard.training.interop.resume_foreign import resume_foreign
from hfshard.training.restoring.resume import resume
from hfshard.training.run.find_checkpoint import (
    Level,
    RunReader,
    absolute_place,
    check_run_checkpoint,
    checked_at,
    checkpoint_of_step,
    newest_intact,
    open_run,
)
from hfshard.training.run.manifest import (
    CheckpointManifest,
    MetricMode,
    RunCheckpoint,
    best_of,
    checked_step,
    checkpoint_path,
    plain_metrics,
)
from hfshard.training.run.push_run import BackgroundPusher, found_to_push, push_all, push_found
from hfshard.training.run.run_writer import RunWriter, check_names
from hfshard.training.run_ranks import SAME, OfEachRank, agree_on_checkpoint, meet_for
from hfshard.training.spread_save import SpreadSaveArguments, save_spread
from hfshard.training.state.collect_state import RankState, collect, collect_rank, encode_components, save_options
from hfshard.training.state.step import RestoredStep
from hfshard.training.state.training_state import TrainingState, checked_state, is_spread_state, reject_meta

if TYPE_CHECKING:
    from hfshard.hub.repo import PushResult
    from hfshard.training.run.push_run import PushArguments


logger = logging.getLogger(__name__)


class CheckpointManager(RunReader):
    """Saves and restores the training states of one run, in one directory or one place of a store.

        manager = CheckpointManager("run", max_to_keep=3, keep_best="eval_loss")
        state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        start = manager.restore_latest(state) or 0

    Each checkpoint is a directory such as `run/checkpoint-00001200`. It is complete in itself, and appears by one
    rename when every byte is on disk. Stock transformers loads it as a model, unless adapters were added to the model.
    No pickle is written or read.

    The directory is locked from the first save until `close()` or the end of the process. In a store, the manager that
    was last to begin saving takes over the run. Threads may share a manager: each call waits until another thread's
    save, restore or query is done. For queries of the run (`latest_step`, `best_step`, `all_steps`, `path_of`,
    `verify`) see `RunReader`.
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
        process_group: dist.ProcessGroup | None = None,
        allow_different_replicas: bool = False,
        progress: bool | None = None,
    ) -> None:
        """Name the run; nothing is created or read yet.

        Args:
            root: The run's directory, created at the first save; or an address, such as "s3://bucket/run".
            max_to_keep: The number of newest checkpoints to keep; None: all. A save needs disk space for one more.
            keep_best: The name of a metric: the checkpoint with its best value stays too.
            metric_mode: Whether the lowest ("min") or the highest ("max") value is best. NaN never is.
            keep_every: Checkpoints whose step is a multiple of it stay too, and do not count towards `max_to_keep`.
            max_shard_size: Like that of `save_model`; for the files of the model, optimizer and everything else.
            checksum: "xxh3" (as fast as memory) or "sha256" (the checksum that the Hub uses).
            push_to_hub: "org/name", or a path or file:// URL of a directory hub, with "@branch" for one other than
                main. Each checkpoint is pushed there after its save, in a thread if the save does not block. A push
                that fails is logged as a warning, and `wait_until_finished` raises its error.
            process_group: The ranks that have this run, and make its calls; None: all, as in the default process group.
                With groups, one job can have several runs, such as those of an actor and a critic, each with its own
                ranks and directory.
            allow_different_replicas: Save even if ranks' copies of a parameter differ. One rank's copy is stored; for
                models without DTensors, the first one's. (Buffers that differ are stored and restored by each rank.)
            progress: Whether to show a bar on stderr during a blocking save or a restore; None: only on a terminal.

        Raises:
            InvalidArgumentError: A number or a name is not valid; or this rank is not in `process_group`.
            InvalidSizeError: `max_shard_size` is not a size.
            HubNotFoundError: `push_to_hub` cannot be the name of a repository.
        """
        check_process_group(process_group)
        rotation = Rotation(max_to_keep, keep_best, metric_mode, keep_every)
        SaveOptions(max_shard_size=max_shard_size, checksum=checksum)  # this checks both
        # Absolute, so that a run that changes its working directory still saves to the same place.
        self.root = place_to_save(root, "root").address
        self.max_to_keep = max_to_keep
        self.keep_best = keep_best
        self.metric_mode = metric_mode
        self.keep_every = keep_every
        self.max_shard_size = max_shard_size
        self.checksum = checksum
        self.push_to_hub = None if push_to_hub is None else absolute_repo_id(push_to_hub)
        self.process_group = process_group
        self.allow_different_replicas = allow_different_replicas
        self.progress = progress
        pusher = BackgroundPusher(push_to_hub, progress) if push_to_hub is not None else None
        self._storage = open_run(self.root)
        rule = None if max_to_keep is None else rotation.to_remove
        self._writer = RunWriter(open_run(self.root), rule, pusher, progress)

    @wraps_os_errors("root")
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
        """Save the state as the checkpoint of a step, durably and all or nothing; then remove old checkpoints.

            manager.save(step, state, metric={"eval_loss": loss}, blocking=False)

        Saving draws no random numbers and changes nothing in the run. With several ranks, every rank must call.

        Args:
            step: The step of the run, from 0. A checkpoint of the same step is replaced once the new one is complete.
            state: What to save.
            metric: The value of the metric that `keep_best` names; or several metrics by name. {}: none. None: those of
                the replaced checkpoint of this step, if its model's files have the same names and checksums.
            extra: More to store: numbers, text, lists, dicts, tensors.
            max_shard_size: Overrides the manager's.
            blocking: False returns as soon as the tensors are copied; a thread does the rest. Only one save runs at a
                time: the next call waits for it, and raises its error if it failed.
            files: Small files to add to the checkpoint: name -> contents.

        Returns:
            The checkpoint's directory or address. With blocking=False, it exists when the save is done.

        Raises:
            InvalidArgumentError, UnstorableTensorError: Nothing was written.
            DirectoryLockedError: Another manager is saving into the directory.
            RemoteChangedError: Another manager has begun to save into the same place of a store.
            StoreError: The store refused or failed. All older checkpoints still exist.
            SaveDirectoryError, AccessDeniedError: The directory is a file, or cannot be written.
            RunRemovedError: The directory was removed or renamed since the last save. The next save creates a new one.
            HfshardError: It was called during another call of this thread, by a signal handler or a hook.
            NotEnoughSpaceError: Nothing was written.
            RankFailedError: Another rank failed, died, or did not call. All older checkpoints still exist. So may the
                new one, if the message says that the outcome is unknown.
            OSError: The disk failed. All older checkpoints still exist, and the next save can succeed.
        """
        limit = max_shard_size or self.max_shard_size

        def write(agreed: int, state: TrainingState, ranks: Sequence[RankState], own: OfEachRank = SAME) -> str:
            metrics = self._metrics_of(agreed, metric)
            options = save_options(limit, self.checksum, self.progress)
            components = encode_components(state, own.objects)
            payload = collect(components, state.components.get("model"), ranks, extra, options)
            payload = payload.of_one_process()
            check_names(files or {}, payload)
            self._writer.save(agreed, payload, metrics, dict(files or {}), blocking=blocking)
            return checkpoint_path(self.root, agreed)

        with among(self.process_group), self._writer.turn("save()"):
            if has_other_ranks():
                order = SpreadSaveArguments(
                    state=state,
                    step=step,
                    extra=extra,
                    metrics_of=lambda agreed: self._metrics_of(agreed, metric),
                    files=dict(files or {}),
                    max_shard_size=limit,
                    checksum=self.checksum,
                    progress=self.progress,
                    blocking=blocking,
                    allow_different_replicas=self.allow_different_replicas,
                )
                return save_spread(order, self._writer, write)
            state = checked_state(state)
            is_spread_state(state)  # this releases gathered parameters
            own = collect_rank(state, 0)
            number = checked_step(step)
            self._writer.wait()
            return write(number, state, [own])

    @wraps_os_errors("root")
    def restore(
        self,
        state: TrainingState,
        step: int | str | os.PathLike[str] | None = None,
        *,
        strict: bool = True,
        verify: Level = "full",
        token: str | bool | None = None,
        keys: Mapping[str, str] | None = None,
        public_key: str | os.PathLike[str] | SignedBy | None = None,
        without: Collection[str] = (),
    ) -> RestoredStep:
        """Restore the state as it was at a step, bit for bit; or raise, and change nothing.

            restored = manager.restore(state, 1200)
            print(restored, restored.metrics, restored.extra)

        With several ranks, every rank must call, for the same step. If one of them refuses, nothing changes on any.

        Args:
            state: Built as for the run that was saved. It is changed, and so are the random number generators.
            step: The checkpoint's step; None or "latest": the one that was saved last; "best": that of `best_step`. Or
                one from elsewhere: the path of its directory, or its address; "org/name" on the Hub, or a path or
                file:// URL of a directory hub, with "@revision" for one other than main; or a file of torch.save, or a
                directory of Trainer, Accelerate or DeepSpeed ZeRO (see GUIDE.md, "Old files").
            strict: Reject any difference; False restores what fits and reports the rest.
            verify: "full" compares every byte with its checksum before anything is changed; "structure" compares sizes,
                headers and fingerprints.
            token: For the Hub, as in huggingface_hub.
            keys: For other programs' checkpoints: name of a part -> its key in a file, with dots: {"model":
                "ema.state_dict"}; or its file in a directory: {"ema": "custom_checkpoint_0"}. None: the usual ones.
            public_key: The file of a public key, or a `hfshard.signing.SignedBy`: its owner must have signed every file
                of the checkpoint, and every rank compares them. Not for stores or other programs' checkpoints.
            without: Names of parts that stay as they were built, such as ["loader"] on another number of ranks.

        Returns:
            The step, with `.path`, `.extra`, `.metrics`, `.differences` and `.lacking`.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
            HubError: The checkpoint could not be downloaded from the Hub.
            DamagedCheckpointError: It is damaged. (Without `step`, damaged ones are skipped with a warning.)
            StateDictMismatchError: The state does not fit; the message says what differs, and what to do.
            UnsafePickleError: A file of torch.save asks for more than plain data; nothing in it was run.
            SignatureError: The required signer has not signed it, or it was changed since; nothing was changed.
            RankFailedError: Another rank could not restore it, died, or did not call.
        """
        with self._restoring("restore", state, without) as (ranks, state):
            if step in ("best", "latest"):
                step = ranks.first(partial(self._step_called, str(step)))
            place = ranks.each(lambda: absolute_place(step))
            if not ranks.is_alone:
                path, what = (place, "a place") if isinstance(place, str) else (self.root, str(place))
                agree_on_checkpoint(ranks, path, what)
            signature = None if public_key is None else required_signature(public_key)
            restored = None
            if isinstance(place, str):
                restored = resume_foreign(
                    state,
                    place,
                    keys=keys,
                    strict=strict,
                    verify=verify,
                    session=ranks,
                    must_be_signed=signature is not None,
                )
            if restored is None:
                if keys is not None:
                    raise InvalidArgumentError(
                        "keys is only for other programs' checkpoints: an hfshard checkpoint has names. Leave it out."
                    )
                choose = partial(self._choose, place, verify, token)
                restored = resume(
                    state,
                    choose,
                    is_newest=place is None,
                    strict=strict,
                    session=ranks,
                    signature=signature,
                    without=without,
                )
        if restored is None:
            raise CheckpointNotFoundError(
                f"There is no checkpoint in '{self.root}'. Check the path, or train from the beginning.", path=self.root
            )
        return restored

    @wraps_os_errors("root")
    def restore_latest(
        self,
        state: TrainingState,
        *,
        strict: bool = True,
        verify: Level = "full",
        public_key: str | os.PathLike[str] | SignedBy | None = None,
        without: Collection[str] = (),
    ) -> RestoredStep | None:
        """Restore the newest intact checkpoint; each damaged one that is skipped is named in a warning.

            step = manager.restore_latest(state) or 0

        Args:
            state, strict, verify, public_key, without: As in `restore`. An unsigned one is rejected, not skipped.

        Returns:
            The step; None if the run has no checkpoint yet.

        Raises:
            DamagedCheckpointError: All checkpoints are damaged.
            StateDictMismatchError, SignatureError: The newest one does not fit, or is not signed, as in `restore`.
        """
        with self._restoring("restore_latest", state, without) as (ranks, state):
            if not ranks.is_alone:
                agree_on_checkpoint(ranks, self.root, "latest")
            signature = None if public_key is None else required_signature(public_key)
            choose = partial(self._choose, None, verify, None)
            return resume(
                state, choose, is_newest=True, strict=strict, session=ranks, signature=signature, without=without
            )

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

    @wraps_os_errors("root")
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

        Its files are compared with its manifest first: a link is pushed as its target, which must be what was saved.
        Files that the hub has are not sent again. Files that the previously pushed checkpoint left there are deleted in
        the same commit; README and other files stay. If nothing changed, no commit is made.

        Args:
            repo_id: "org/name", created if it is missing; or a path or file:// URL of a directory that serves as a hub.
                With several ranks, all call and the first one pushes.
            step: The checkpoint's step; None: the one that was saved last; "best": that of `best_step`; "all": all that
                the branch has not had, in the order in which they were saved, with one commit each.
            revision, private, token, create_pr: As in `push_checkpoint`.
            commit_message: None: "Checkpoint at step 1200".
            progress: Whether to show a bar on stderr; None: as the manager does.

        Returns:
            The commit, and whether it is a new one; for "all" a list of the new ones.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
            DamagedCheckpointError: The checkpoint is damaged; nothing was pushed.
            HubError: The hub refused or failed, as in `push_checkpoint`.
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
            with self._writer.kept(lambda: found_to_push(self._storage, step, self.best_step)) as found:
                return push_all(found, place, options) if step == "all" else [push_found(found[0], place, options)]

        with among(self.process_group), together_if(True, push_together) as ranks:
            place = absolute_repo_id(repo_id)
            agree_on_repo(ranks, place)
            results = send(ranks, work)
        return results if step == "all" else results[0]

    @wraps_os_errors("root")
    def wait_until_finished(self) -> None:
        """Wait for a save and a push that are in progress, and raise the error of the one that failed.

        Example:
            manager.save(step, state, blocking=False)
            manager.wait_until_finished()
        """
        self._writer.wait_until_finished()

    def close(self) -> None:
        """Wait like `wait_until_finished`, and let other managers save into the directory.

        Example:
            manager.save(step, state, blocking=False)
            manager.close()
        """
        self._writer.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _restoring(
        self, what: str, state: TrainingState, without: Collection[str]
    ) -> Iterator[tuple[Session, TrainingState]]:
        """Gather the ranks that restore a state together, by the same method, and return what they restore of it."""
        with self._writer.turn(f"{what}()"):
            self._writer.join()  # on every rank: it may be a save by all of them
            with among(self.process_group), together_if(True, partial(meet_for, what)) as ranks:
                ranks.each(self._writer.wait)
                state = checked_state(state)
                reject_meta(state)
                yield ranks, state.without(without)

    def _metrics_of(self, step: int, metric: float | Mapping[str, float] | None) -> dict[str, float] | None:
        """Return a save's metrics by name, if given; warn if the one that selects the best is missing."""
        if metric is None:
            return None
        metrics = plain_metrics(metric, self.keep_best)
        if metrics and self.keep_best is not None and self.keep_best not in metrics:
            logger.warning("Step %d has no metric '%s', which selects the best checkpoint.", step, self.keep_best)
        return metrics

    def _choose(
        self,
        step: int | str | os.PathLike[str] | None,
        verify: Level,
        token: str | bool | None,
        passed_over: Collection[str],
    ) -> tuple[RunCheckpoint, CheckpointManifest] | None:
        """Find and check the checkpoint to restore, on the first rank; None: the run has none."""
        if step is None:
            return newest_intact(self._storage, verify, self.progress, is_read_next=True, passed_over=passed_over)
        if isinstance(step, str | os.PathLike):
            return checked_at(step, verify, token=token, progress=self.progress)
        checkpoint = checkpoint_of_step(self._storage, step)
        return checkpoint, check_run_checkpoint(checkpoint, verify, self.progress, is_read_next=True)

    def _settled(self) -> AbstractContextManager[None]:
        """Wait for a save in progress, and keep other threads out; the save's error is raised once."""
        return self._writer.settled()


# Rotation, a pure function: the newest checkpoints of a run stay, the best, and those of every Nth step.


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rule for which checkpoints of a run stay."""

    max_to_keep: int | None = None
    """The number of newest checkpoints to keep; None: all."""
    keep_best: str | None = None
    """A metric: the checkpoint with its best value stays too."""
    metric_mode: MetricMode = "min"
    """"min": lower is better; "max": higher is better."""
    keep_every: int | None = None
    """Checkpoints whose step is a multiple of it stay too, and do not count."""

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            InvalidArgumentError: A field would keep nothing, or is not one of the known values.
        """
        for name, value in (("max_to_keep", self.max_to_keep), ("keep_every", self.keep_every)):
            if value is not None and (type(value) is not int or value < 1):
                raise InvalidArgumentError(f"{name} must be a number of at least 1, or None, got {value!r}.")
        if self.keep_best is not None and not (isinstance(self.keep_best, str) and self.keep_best):
            raise InvalidArgumentError(
                f"keep_best must be the name of a metric, such as 'eval_loss', or None, got {self.keep_best!r}."
            )
        if self.metric_mode not in ("min", "max"):
            raise InvalidArgumentError(f"metric_mode must be 'min' or 'max', got {self.metric_mode!r}.")

    def to_remove(self, found: Sequence[RunCheckpoint]) -> list[RunCheckpoint]:
        """List the checkpoints to remove, given all finished ones of a run in any order.

        Their manifests are read only if a metric decides.
        """
        if self.max_to_keep is None:
            return []
        in_order = sorted(found, key=lambda one: one.age)
        counted = [one for one in in_order if not (self.keep_every and one.step % self.keep_every == 0)]
        removed = [one for one in counted[: -self.max_to_keep] if one is not in_order[-1]]
        if not removed or self.keep_best is None:
            return removed
        best = best_of([one.manifest for one in found if one.manifest is not None], self.keep_best, self.metric_mode)
        return [one for one in removed if best is None or one.manifest is not best]
