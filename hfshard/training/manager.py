"""`CheckpointManager`: the checkpoints of one run, saved whole, found again, rotated, restored exactly."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist

from hfshard._util.arguments import absolute_path, names_files
from hfshard.commit.hub_marker import absolute_address
from hfshard.constants import DEFAULT_MAX_SHARD_SIZE
from hfshard.distributed.group_store import among, check_process_group, has_other_ranks
from hfshard.errors import CheckpointNotFoundError
from hfshard.format.digests import Checksum
from hfshard.saving.save_request import SaveOptions
from hfshard.signing.check_signature import required_signature
from hfshard.signing.signer import SignedBy
from hfshard.training.collecting import collect, encode_components, save_options
from hfshard.training.foreign.resuming import resume_foreign
from hfshard.training.pushing.pusher import BackgroundPusher
from hfshard.training.ranks import ALONE, Ranks
from hfshard.training.restoring.resume import absolute_place, choose_checkpoint, resume
from hfshard.training.run.finding import Level, newest_whole
from hfshard.training.run.manifest import CheckpointManifest, plain_metrics
from hfshard.training.run.places.opening import run_place
from hfshard.training.run.rotation import MetricMode, Rotation
from hfshard.training.run.run_checkpoint import RunCheckpoint, checkpoint_path
from hfshard.training.run.writing import check_names
from hfshard.training.run_pushes import RunPushes
from hfshard.training.run_writer import RunWriter
from hfshard.training.saving import RankContribution, agreed_step, save_on_all_ranks
from hfshard.training.spread.replicas import SAME, OfEachRank
from hfshard.training.spread.states import is_spread_state
from hfshard.training.spread_saving import SpreadSave, save_spread
from hfshard.training.state import TrainingState, check_state, refuse_meta
from hfshard.training.step import RestoredStep

logger = logging.getLogger(__name__)


class CheckpointManager(RunPushes):
    """Saves and restores the training states of one run in one directory, or in one place of a store.

        manager = CheckpointManager("run", max_to_keep=3, keep_best="eval_loss")
        state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        start = manager.restore_latest(state) or 0

    Each checkpoint is a directory such as `run/checkpoint-00001200`. It is complete in itself, and appears by one
    rename when every byte is on the disk; stock transformers loads it as a model, unless adapters were added to that.
    No pickle is written or read.

    The directory is locked from the first save until `close()` or the end of the process; in a store, the manager that
    begins to save last takes the run over. Threads may share a manager:
    each call waits until the save, the restore or the question of another thread is done. For questions about the run
    (`latest_step`, `best_step`, `all_steps`, `path_of`, `verify`) see `RunReader`.
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
            max_to_keep: How many of the newest checkpoints stay; None: all. A save needs disk space for one more.
            keep_best: The name of a metric: the checkpoint with its best value stays too.
            metric_mode: Whether the lowest ("min") or the highest ("max") value is best. NaN never is.
            keep_every: Checkpoints whose step is a multiple of it stay too.
            max_shard_size: As in `save_model`; for the files of the model, of the optimizer and of everything else.
            checksum: "xxh3" (as fast as memory) or "sha256" (the checksum that the Hub uses).
            push_to_hub: "org/name", or a path or file:// URL of a directory hub, with "@branch" for one other than
                main. Each checkpoint is pushed there after its save, in a thread where the save does not block. A push
                that fails is logged as a warning, and `wait_until_finished` raises its error.
            process_group: Whose ranks have this run, and make its calls; None: all, as of the default process group. So
                several runs may be in one job, such as those of an actor and a critic, each with ranks and a directory
                of its own.
            allow_different_replicas: Save though ranks have copies of a parameter that differ: one rank's is stored, of
                models without DTensors the first one's. (Buffers that differ are stored and restored by each rank.)
            progress: Whether to show a bar on stderr during a blocking save or a restore; None: only on a terminal.

        Raises:
            InvalidArgumentError: A number or a name is not valid; or this rank is not in `process_group`.
            InvalidSizeError: `max_shard_size` is not a size.
            HubNotFoundError: `push_to_hub` can't be the name of a repository.
        """
        check_process_group(process_group)
        rotation = Rotation(max_to_keep, keep_best, metric_mode, keep_every)
        SaveOptions(max_shard_size=max_shard_size, checksum=checksum)  # which checks both
        # Absolute, so that a run that changes its working directory goes on saving to the same place.
        self.root = absolute_path(root, "root")
        self.max_to_keep = max_to_keep
        self.keep_best = keep_best
        self.metric_mode = metric_mode
        self.keep_every = keep_every
        self.max_shard_size = max_shard_size
        self.checksum = checksum
        self.push_to_hub = None if push_to_hub is None else absolute_address(push_to_hub)
        self.process_group = process_group
        self.allow_different_replicas = allow_different_replicas
        self.progress = progress
        pusher = BackgroundPusher(push_to_hub, progress) if push_to_hub is not None else None
        self._place = run_place(self.root)
        self._writer = RunWriter(self._place, rotation, pusher, progress)

    @names_files("root")
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
            metric: The value of the metric that `keep_best` names; or several metrics by name. None: those of the
                checkpoint of this step that is replaced, if any; {}: none.
            extra: More to store: numbers, text, lists, dicts, tensors.
            max_shard_size: Overrides the manager's.
            blocking: False returns as soon as the tensors are copied; a thread does the rest. Only one save runs at a
                time: the next call waits for it, and raises its error if it failed.
            files: Small files to put into the checkpoint: name -> contents.

        Returns:
            The checkpoint's directory, or its address; with blocking=False it exists when the save is done.

        Raises:
            InvalidArgumentError, UnstorableTensorError: Nothing was written.
            DirectoryLockedError: Another manager is saving into the directory.
            RemoteChangedError: Another manager has begun to save into the same place of a store.
            StoreError: The store refused or failed. All older checkpoints are still there.
            SaveDirectoryError, AccessDeniedError: The directory is a file, or may not be written.
            RunRemovedError: It was removed or renamed since the last save. The next save makes a new one.
            HfshardError: It was called in the middle of another call of this thread, by a signal handler or a hook.
            NotEnoughSpaceError: Nothing was written.
            RankFailedError: Another rank failed, died, or did not come. All older checkpoints are still there. The new
                one may be, where the message says that nobody has told the outcome.
            OSError: The disk failed. All older checkpoints are still there, and the next save may succeed.
        """
        check_state(state)
        limit = max_shard_size or self.max_shard_size

        def write(contributions: Sequence[RankContribution], own: OfEachRank = SAME) -> str:
            self._writer.wait()
            agreed, ranks = agreed_step(contributions)
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
                order = SpreadSave(
                    state=state,
                    step=step,
                    extra=extra,
                    metrics_of=lambda agreed: self._metrics_of(agreed, metric),
                    files=files or {},
                    max_shard_size=limit,
                    checksum=self.checksum,
                    progress=self.progress,
                    blocking=blocking,
                    allow_different_replicas=self.allow_different_replicas,
                )
                return save_spread(
                    order,
                    self._writer,
                    lambda ranks, own: save_on_all_ranks(step, state, partial(write, own=own), ranks, own),
                )
            is_spread_state(state)  # which lets gathered parameters go
            return save_on_all_ranks(step, state, write, ALONE)

    @names_files("root")
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

        With several ranks, every rank must call, for the same step; what one of them refuses changes nothing on any.

        Args:
            state: Built as for the run that was saved. It is changed, and so are the random number generators.
            step: Which checkpoint; None or "latest": the one that was saved last; "best": see `best_step`. Or one from
                elsewhere: the path of its directory, or its address; "org/name" on the Hub, or a path or file:// URL of
                a directory hub, with "@revision" for one other than main; or a file of torch.save, or a directory of
                Trainer's or Accelerate's (README, "Old files").
            strict: Refuse any difference; False restores what fits and reports the rest.
            verify: "full" compares every byte with its checksum before anything is changed; "structure" compares sizes,
                headers and fingerprints.
            token: For the Hub, as in huggingface_hub.
            keys: Of what other programs have saved: name of a part -> its key in a file, with dots: {"model":
                "ema.state_dict"}; or its file in a directory: {"ema": "custom_checkpoint_0"}. None: the usual ones.
            public_key: The file of a public key, or a `hfshard.signing.SignedBy`: its holder must have signed every
                file of the checkpoint, which every rank compares. Not for stores, nor what other programs have saved.
            without: Names of parts that stay as they were built, such as ["loader"] on another number of ranks.

        Returns:
            The step, with `.path`, `.extra`, `.metrics`, `.differences` and `.lacking`.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
            HubError: It could not be downloaded from the Hub.
            DamagedCheckpointError: It is damaged. (Without `step`, damaged ones are passed over with a warning.)
            StateDictMismatchError: The state does not fit; the message says what differs, and what to do.
            UnsafePickleError: A file of torch.save asks for more than plain data; nothing of it was run.
            SignatureError: It is not signed by whom it must be, or was changed since; nothing was changed.
            RankFailedError: Another rank could not restore it, died, or did not come.
        """
        with self._writer.turn("restore()"), self._ranks("restore") as ranks:
            check_state(state)
            refuse_meta(state)
            state = state.without(without)
            if step in ("best", "latest"):
                step = ranks.first(partial(self._step_called, str(step)))
            place = ranks.on_each(lambda: absolute_place(step))
            ranks.refuse_other_places(place if isinstance(place, str) else self.root, "restores from")
            signature = required_signature(public_key)
            is_signed = signature is not None
            restored = resume_foreign(
                state, place, keys=keys, strict=strict, verify=verify, ranks=ranks, must_be_signed=is_signed
            )
            if restored is None:
                choose = partial(self._choose, place, verify, token)
                restored = resume(state, choose, step, strict=strict, ranks=ranks, signature=signature, without=without)
        if restored is None:
            raise CheckpointNotFoundError(
                f"There is no checkpoint in '{self.root}'. Check the path, or train from the beginning.", path=self.root
            )
        return restored

    @names_files("root")
    def restore_latest(
        self,
        state: TrainingState,
        *,
        strict: bool = True,
        verify: Level = "full",
        public_key: str | os.PathLike[str] | SignedBy | None = None,
        without: Collection[str] = (),
    ) -> RestoredStep | None:
        """Restore the newest whole checkpoint; each damaged one that is passed over is named in a warning.

            step = manager.restore_latest(state) or 0

        Args:
            state, strict, verify, public_key, without: As in `restore`. One that is not signed is refused, and is not
                passed over.

        Returns:
            The step; None where the run has no checkpoint yet.

        Raises:
            DamagedCheckpointError: All checkpoints are damaged.
            StateDictMismatchError, SignatureError: As in `restore`.
        """
        with self._writer.turn("restore_latest()"), self._ranks("restore_latest") as ranks:
            check_state(state)
            refuse_meta(state)
            state = state.without(without)
            ranks.refuse_other_places(self.root, "restores from")
            signature = required_signature(public_key)
            choose = partial(self._choose, None, verify, None)
            return resume(state, choose, strict=strict, ranks=ranks, signature=signature, without=without)

    @names_files("root")
    def wait_until_finished(self) -> None:
        """Wait for a save and a push that are under way, and raise the error of the one that failed.

        Example:
            manager.save(step, state, blocking=False)
            manager.wait_until_finished()
        """
        self._writer.wait_until_finished()

    def close(self) -> None:
        """Wait as `wait_until_finished` does, and let other managers save into the directory.

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
    def _ranks(self, what: str) -> Iterator[Ranks]:
        """Those that restore a state together, by the same method."""
        self._writer.join()  # on every rank: it may be a save of them all
        with among(self.process_group), Ranks.meeting(what) as ranks:
            ranks.on_each(self._writer.wait)
            yield ranks

    def _metrics_of(self, step: int, metric: float | Mapping[str, float] | None) -> dict[str, float] | None:
        """The metrics of a save by name, if given, with a warning where the one that decides is missing."""
        if metric is None:
            return None
        metrics = plain_metrics(metric, self.keep_best)
        if metrics and self.keep_best is not None and self.keep_best not in metrics:
            logger.warning("The metrics of step %d lack '%s', by which the best is kept.", step, self.keep_best)
        return metrics

    def _choose(
        self,
        step: int | str | os.PathLike[str] | None,
        verify: Level,
        token: str | bool | None,
        passed_over: Collection[str],
    ) -> tuple[RunCheckpoint, CheckpointManifest] | None:
        """On the first rank: find and check the checkpoint to restore; None: the run has none."""
        self._writer.wait()
        if step is None:
            return newest_whole(self._place, verify, self.progress, is_read_next=True, passed_over=passed_over)
        return choose_checkpoint(self._place, step, verify, token, self.progress)
