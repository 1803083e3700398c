"""Take the steps of a commit back, the last one first, when one of them fails before the commit is done."""

from __future__ import annotations

import logging
import os
import stat
from collections import deque
from collections.abc import Callable, Sequence

from hfshard.constants import MAX_CONFIG_BYTES
from hfshard.disk.fsops import NO_LINKS, Unflushed, rename, sync_directory, unlink_if_there
from hfshard.storage.commit.steps import CommitStep

logger = logging.getLogger(__name__)


class Rollback:
    """What takes back the steps that were made so far.

    What the steps replace is copied into the staging directory before the first one, so that nothing has to be written
    when they are taken back: the disk may be full then.
    """

    def __init__(self, directory: str, staging: str) -> None:
        self.directory = directory
        self.staging = staging
        self._prepared: deque[Callable[[], None]] = deque()
        self._undo: list[tuple[CommitStep, Callable[[], None]]] = []

    def prepare(self, steps: Sequence[CommitStep], unflushed: Unflushed) -> None:
        """Get ready to take steps back.

        Args:
            steps: All that may have to be; what they move into place is in the staging directory.
            unflushed: Gets the copies, which must be durable before the first step.

        Raises:
            OSError: What a step replaces could not be copied.
        """
        placed: dict[str, str] = {}
        for number, step in enumerate(steps):
            now = placed.get(step.target, os.path.join(self.directory, step.target))
            self._prepared.append(self._undo_of(step, now, f"{number:03d}.kept", unflushed))
            if step.kind == "rename":
                placed[step.target] = os.path.join(self.staging, step.source)

    def begin(self, step: CommitStep) -> None:
        """Take the next step back, too, whether it will be done or not."""
        self._undo.append((step, self._prepared.popleft()))

    def run(self) -> list[str]:
        """Take all steps back.

        A step that moves a reader to the new checkpoint may resist: then what it leads to stays.

        Returns:
            Who finds the new checkpoint; nobody where all is as it was.
        """
        while self._undo:
            step, undo = self._undo[-1]
            moved = [one.moves for one, _ in self._undo if one.moves]
            try:
                undo()
            except OSError as error:
                logger.error("A step of a failed save into '%s' could not be undone: %s", self.directory, error)
                if moved:
                    return moved
            self._undo.pop()
            if step.moves and not self._is_durable():
                return moved[:-1]  # what it led to stays, in case that a power cut brings the step back
        return []

    def _is_durable(self) -> bool:
        try:
            sync_directory(self.directory)
        except OSError as error:
            logger.error("'%s' could not be flushed after a failed save: %s", self.directory, error)
            return False
        return True

    def _undo_of(self, step: CommitStep, now: str, kept_name: str, unflushed: Unflushed) -> Callable[[], None]:
        """What takes a step back, where `now` is the file that will have its target's name when it comes."""
        target = os.path.join(self.directory, step.target)
        if step.kind == "link":
            is_new = not os.path.lexists(now)
            return lambda: unlink_if_there(target) if is_new else None
        if step.kind == "remove":
            return self._undo_of_removal(target, kept_name)
        if step.kind != "rename":
            return lambda: None
        staged = os.path.join(self.staging, step.source)
        kept = os.path.join(self.staging, kept_name)

        def restore() -> None:
            if not os.path.exists(staged):
                rename(kept, target)

        try:
            status = os.lstat(now)
        except FileNotFoundError:
            return lambda: None if os.path.exists(staged) else unlink_if_there(target)
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(now), kept)
            return restore
        if not stat.S_ISREG(status.st_mode):
            return lambda: None  # a FIFO holds nothing to restore
        is_weights = status.st_size > MAX_CONFIG_BYTES or step.target.endswith(".safetensors")
        if is_weights and not step.moves:
            return lambda: None  # a shard that replaces another is the same, byte for byte; or it is the commit
        if is_weights:
            _link(now, kept)
        else:
            with open(now, "rb") as file:
                old = file.read()
            unflushed.write_file(kept, old, like=status)
        return restore

    def _undo_of_removal(self, target: str, kept_name: str) -> Callable[[], None]:
        kept = os.path.join(self.staging, kept_name)
        if os.path.isfile(target):
            _link(target, kept)

        def restore() -> None:
            if os.path.exists(kept) and not os.path.lexists(target):
                rename(kept, target)

        return restore


def _link(target: str, kept: str) -> None:
    """Give the old file a second name; without one, it can't come back."""
    try:
        os.link(target, kept)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        logger.info("'%s' can't be linked (%s): it can't be restored if the save fails halfway.", target, error)
