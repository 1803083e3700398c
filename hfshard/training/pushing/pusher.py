"""Pushes what a manager saves to one repo, in the background: one push at a time, and always the newest checkpoint."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from dataclasses import replace
from typing import Final

from hfshard.commit.hub_marker import directory_of, split_address
from hfshard.hub.push_files import PushOptions
from hfshard.training.pushing.contents import Hashes
from hfshard.training.pushing.hubs import check_repo, push_found
from hfshard.training.run.background import Background
from hfshard.training.run.run_checkpoint import RunCheckpoint

logger = logging.getLogger(__name__)

_all: Final[weakref.WeakSet[BackgroundPusher]] = weakref.WeakSet()


class BackgroundPusher:
    """Pushes checkpoints; a failure is a warning, as the checkpoint is on disk, and `wait` raises the last one."""

    def __init__(self, address: str | os.PathLike[str], progress: bool | None) -> None:
        """Check the address; no request is sent yet.

        Args:
            address: "org/name", or a path or `file://` URL of a directory hub; with "@branch" unless it is main.
            progress: Whether to show a bar during a push that blocks.

        Raises:
            InvalidArgumentError, HubNotFoundError: The address is not a valid one.
        """
        self._repo_id, revision = split_address(address)
        if directory_of(self._repo_id) is None:
            check_repo(self._repo_id)
        self._options = PushOptions(revision=revision, progress=progress)
        self._hashes: Hashes = {}
        self._thread = Background()
        self._lock = threading.RLock()  # a signal handler may save amid a look
        self._pushing: RunCheckpoint | None = None
        self._waiting: RunCheckpoint | None = None
        self._error: Exception | None = None
        """The last push's."""
        _all.add(self)

    @property
    def steps_in_use(self) -> set[int]:
        """Steps whose checkpoints must stay where they are."""
        with self._lock:
            return {one.step for one in (self._pushing, self._waiting) if one is not None}

    def push(self, found: RunCheckpoint, *, blocking: bool) -> None:
        """Push a checkpoint now; or in the background, after the push that is running.

        A checkpoint that is still waiting is not pushed any more, as this one is newer.
        """
        if blocking:
            self.join()
            self._push(found, self._options)
            return
        with self._lock:
            if self._pushing is not None:
                self._waiting = found
                return
            self._pushing = found
        self._thread.wait()
        self._thread.start(self._work, f"Pushing to '{self._repo_id}'")

    def forget(self) -> None:
        """Forget the pushes in a forked process, where the thread does not exist."""
        self._lock = threading.RLock()  # a signal handler may save amid a look
        self._pushing = self._waiting = self._error = None

    def join(self) -> None:
        """Wait for the running push."""
        self._thread.wait()

    def wait(self) -> None:
        """Wait for the running push, and raise the last push's error, once."""
        self.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        found = self._pushing
        while found is not None:
            self._push(found, replace(self._options, progress=False))
            with self._lock:
                found = self._pushing = self._waiting
                self._waiting = None

    def _push(self, found: RunCheckpoint, options: PushOptions) -> None:
        try:
            push_found(found, self._repo_id, options, self._hashes)
        except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
            logger.warning(
                "The checkpoint of step %d is saved, but was not pushed to '%s': %s", found.step, self._repo_id, error
            )
            self._error = error
        else:
            self._error = None


def _forget_in_child() -> None:
    for one in list(_all):
        one.forget()


os.register_at_fork(after_in_child=_forget_in_child)
