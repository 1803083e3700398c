"""Writer of one run's checkpoints: it acquires the run, writes one checkpoint after another, removes old ones."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Final

from hfshard._util.progress import byte_progress
from hfshard.commit.transaction import OwnShardWriter, ShardWriter
from hfshard.constants import CONFIG_NAME, GENERATION_CONFIG_NAME, INDEX_SUFFIX, MAX_INDEX_BYTES, SAFETENSORS_SUFFIX
from hfshard.errors import InvalidArgumentError
from hfshard.saving.pipeline import Save
from hfshard.training.run.background import Background, HostBuffers, PinnedSteps, ReentrantLocks
from hfshard.training.run.manifest import MANIFEST, TRAINING_STATE, RunCheckpoint
from hfshard.training.run.push_run import BackgroundPusher
from hfshard.training.run.run_storage import RunSave, RunStorage
from hfshard.training.state.collect_state import SavePayload

logger = logging.getLogger(__name__)

_OWN_SUFFIXES: Final = (SAFETENSORS_SUFFIX, INDEX_SUFFIX)
RotationRule = Callable[[Sequence[RunCheckpoint]], list[RunCheckpoint]]
"""Lists the checkpoints to remove, given all finished ones of a run."""


class RunWriter:
    """The only writer of a run, which it acquires at the first save."""

    def __init__(
        self, storage: RunStorage, rotation: RotationRule | None, pusher: BackgroundPusher | None, progress: bool | None
    ) -> None:
        self.root = storage.root
        self._storage = storage
        self._rotation = rotation
        self._pusher = pusher
        self._progress = progress
        self._turns = ReentrantLocks()
        self._background = Background()
        self.host_copies = HostBuffers()
        self._is_clean = False
        """True if nothing is left of saves that failed or were killed; Ctrl-C may end one anywhere."""
        self._in_use = PinnedSteps()
        """The steps that callers push."""

    def turn(self, changing: str = "") -> AbstractContextManager[None]:
        """Keep other threads out while the block runs, as `ReentrantLocks.taken` does."""
        return self._turns.taken(changing)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Keep other threads out, and wait for a save in progress; its error is raised once."""
        with self._turns.taken():
            self._background.wait()
            yield

    @contextmanager
    def kept(self, choose: Callable[[], list[RunCheckpoint]]) -> Iterator[list[RunCheckpoint]]:
        """Choose checkpoints that stay as they are while the block runs, even if other threads save."""
        self.wait_for_all()
        with ExitStack() as use:
            use.callback(self._rotate_again)
            with self.settled():
                found = choose()
                use.enter_context(self._in_use.used(one.step for one in found))
            yield found

    def save(
        self,
        step: int,
        payload: SavePayload,
        metrics: dict[str, float] | None,
        files: dict[str, bytes],
        *,
        blocking: bool,
    ) -> None:
        """Write a checkpoint; with blocking=False, from a copy in a thread.

        The caller has the mutex, and no other save is in progress. The metrics are as in `write`.

        Raises:
            SaveDirectoryError, AccessDeniedError, RunRemovedError, StoreError: The run cannot be saved there.
        """
        self.begin()
        if not blocking:
            payload = self.host_copies.copy_of(payload)

        def work() -> None:
            self.push_saved(self.write(step, payload, metrics, files, blocking=blocking), blocking=blocking)

        if blocking:
            work()
        else:
            self.start(step, work)

    def begin(self) -> None:
        """Acquire the run, create it if it is missing, and remove what killed saves left.

        Raises:
            The errors of `save`.
        """
        if self._storage.acquire():
            self._is_clean = False
        if not self._is_clean:
            self._storage.clean_up()
            self._is_clean = True

    def write(
        self,
        step: int,
        payload: SavePayload,
        metrics: dict[str, float] | None,
        files: dict[str, bytes],
        *,
        blocking: bool,
        writer: ShardWriter | None = None,
    ) -> RunCheckpoint:
        """Write a checkpoint, after `begin`; `push_saved` pushes it.

        Args:
            step, payload, metrics, files: Those of the checkpoint; metrics=None: those of the one of this step that it
                replaces, if its weights are the same.
            blocking: Whether the caller waits for it.
            writer: Writes the shards, if other ranks take part; None: this process does.

        Raises:
            The errors of `save`.
        """
        requests = payload.requests if self._storage.keeps_names else payload.without_adapter().requests
        self._is_clean = False
        with byte_progress("Saving", payload.nbytes, self._progress if blocking else False) as progress_callback:
            writer = writer or OwnShardWriter()
            save = Save(requests, writer, {**files, TRAINING_STATE: payload.training_state})
            run_save = RunSave(
                step=step, metrics=metrics, new=save.new, writer=writer, progress_callback=progress_callback
            )
            with self._storage.transaction(run_save) as target:
                save.prepare(target)
                save.write(target)
                save.commit(target, partial(self._wait_for_pushes_of, step))
        saved = target.saved
        assert saved is not None
        logger.info("Saved the checkpoint of step %d, %d bytes of tensors, as '%s'.", step, payload.nbytes, saved.path)
        self._rotate()
        self._is_clean = True
        return saved

    def push_saved(self, saved: RunCheckpoint, *, blocking: bool) -> None:
        """Push a checkpoint that was just written, if each one is pushed."""
        if self._pusher is not None:
            self._pusher.push(saved, blocking=blocking)

    def start(self, step: int, work: Callable[[], object]) -> None:
        """Do the work of a save in a thread; the next call waits for it, and raises its error."""
        self._background.start(work, f"Saving the checkpoint of step {step} into '{self.root}'")

    def join(self) -> None:
        """Wait for a save in progress; its error is left to `wait`."""
        with self._turns.taken():
            self._background.join()

    def wait(self) -> None:
        """Wait for a save in progress, and raise its error, once."""
        with self.settled():
            pass

    def wait_for_all(self) -> None:
        """Wait for a save and a push in progress, and raise the save's error, once."""
        try:
            self.wait()
        finally:
            if self._pusher is not None:
                self._pusher.join()  # without the mutex, so that other threads can save
                self._rotate_again()

    def wait_until_finished(self) -> None:
        """Wait like `wait_for_all`, and raise the last push's error, once."""
        self.wait_for_all()
        if self._pusher is not None:
            self._pusher.wait()

    def close(self) -> None:
        """Wait like `wait_until_finished`, and let other managers become the writer."""
        with self._turns.taken("close()"):
            try:
                self.wait_until_finished()
            finally:
                if not self._background.is_running:  # Ctrl-C ends the wait, and the save continues
                    self._storage.release()

    def _wait_for_pushes_of(self, step: int) -> None:
        """Wait until no other thread is reading the checkpoint that is about to be replaced."""
        if self._pusher is not None and step in self._pusher.steps_in_use:
            self._pusher.join()
        self._in_use.wait_for(step)

    def _rotate_again(self) -> None:
        """Remove what had to stay while it was pushed; a save in progress does so itself."""
        with self._turns.taken():
            if self._storage.is_acquired and not self._background.is_running:
                self._rotate()

    def _rotate(self) -> None:
        if self._rotation is None:
            return
        own = [one for one in self._storage.checkpoints() if one.is_own]
        in_use = self._in_use.steps
        if self._pusher is not None:
            in_use |= self._pusher.steps_in_use
        self._storage.remove([one for one in self._rotation(own) if one.step not in in_use])


def check_names(files: Mapping[str, bytes], payload: SavePayload) -> None:
    """Reject small files whose names lead elsewhere or are used by a checkpoint, and plain values that are too long.

    Raises:
        InvalidArgumentError: A name is rejected, or the plain values are longer than a restore reads.
    """
    if len(payload.training_state) > MAX_INDEX_BYTES:
        raise InvalidArgumentError(
            f"The state's plain values take {len(payload.training_state):,} bytes, but a restore reads at most "
            f"{MAX_INDEX_BYTES:,}. Store long lists of numbers as tensors."
        )
    own = {MANIFEST, TRAINING_STATE, CONFIG_NAME, GENERATION_CONFIG_NAME}
    for request in payload.requests.values():
        own |= request.model_files.keys()
    for name in files:
        if (
            not isinstance(name, str)
            or name in own
            or os.path.basename(name) != name
            or name.startswith(".")
            or name.endswith(_OWN_SUFFIXES)
        ):
            raise InvalidArgumentError(
                f"A checkpoint file cannot be named {name!r}. Pass a plain name that the checkpoint does not use "
                "itself."
            )
