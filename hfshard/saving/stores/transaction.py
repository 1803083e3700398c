"""Carry out a commit in a store: every put is conditional, and before the deciding one the old checkpoint stays."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final

from hfshard.constants import CONFIG_NAME
from hfshard.errors import (
    CommitUnfinishedError,
    HfshardError,
    RemoteChangedError,
    StaleObjectError,
    StoreError,
)
from hfshard.saving.stores.own_puts import note_put, read_small
from hfshard.saving.stores.store_state import (
    StoreState,
    claiming_index,
    has_bytes,
    is_index_of,
    parsed_index,
    renewed_index,
)
from hfshard.saving.stores.turn import take_turn
from hfshard.saving.stores.upload import remove_unused
from hfshard.storage.commit.interrupts import deferred_interrupt
from hfshard.storage.commit.steps import CommitPlan, CommitStep
from hfshard.storage.disk.byte_source import ByteSource
from hfshard.storage.format.brought_files import BroughtFile
from hfshard.storage.format.names import INDEX_FILE
from hfshard.stores.protocols import Store, StoredObject

logger = logging.getLogger(__name__)

_TRIES: Final = 10
"""Times that a save puts its index over that of others, who do the same."""
_WORDS: Final = {"rename": "put", "remove": "remove"}
"""What a kind of step is in a store."""


class StoreTransaction:
    """The changes that one save makes in a place of a store, beside sending its shards.

    Args:
        store: The place.
        state: What was there.
        digits: 16 hex digits of this save's own.
        companion_files: What the steps with a source that is no small file put.
    """

    def __init__(self, store: Store, state: StoreState, digits: str, companion_files: Mapping[str, ByteSource]) -> None:
        self._store = store
        self._state = state
        self._digits = digits
        self._companion_files = companion_files
        self.known = dict(state.found)
        """What is there, as far as this save knows."""
        self.is_decided = False
        """Whether the deciding put is done, or nobody can tell."""
        self._is_protecting = True
        self._marks: list[str] = []
        """Of the saves that commit, to be removed at the end."""
        self._own: set[str] = set()
        """What this save has put where nothing was, and nobody else refers to."""

    def protect(self, plan: CommitPlan) -> None:
        """Put what comes before the first shard.

        Raises:
            RemoteChangedError: Somebody else was faster.
        """
        try:
            for step in plan.steps:
                self._execute(step, plan)
        except StaleObjectError as error:
            raise self._lost() from error
        self._is_protecting = False

    def commit(self, plan: CommitPlan) -> None:
        """Carry out a plan, and remove unfinished uploads of killed saves.

        Args:
            plan: Of `plan_store_commit`.

        Raises:
            RemoteChangedError: Somebody else has saved meanwhile; nothing was committed.
            CommitUnfinishedError: The new checkpoint is committed, but not all that follows is done; or nobody can
                tell whether it is.
            KeyboardInterrupt: Ctrl-C was pressed: before the deciding put, or after it, and all steps are done.
        """
        deciding = _deciding(plan)
        self._take_turn()
        uploads = self._unfinished_uploads()
        with deferred_interrupt() as was_interrupted:
            try:
                for step in plan.steps[:deciding]:
                    self._execute(step, plan)
            except StaleObjectError as error:
                raise self._lost() from error
            if was_interrupted():
                raise KeyboardInterrupt
            self._decide(plan.steps[deciding], plan)
            self._finish(plan.steps[deciding:], plan, uploads)

    def roll_back(self, shards: Collection[str], *, is_lost: bool) -> None:
        """Remove what this save has sent, before anybody could read it. The index and the config stay as they are.

        Args:
            shards: That were sent.
            is_lost: Whether somebody else has won, who may have found the small files that this save has put, and
                counts on them.
        """
        with deferred_interrupt():
            try:
                removed = {*shards, *self._unneeded(is_lost=is_lost)}
            except HfshardError as error:
                address = self._store.address
                logger.warning("What was sent to '%s' is left there, the next save removes it: %s", address, error)
                return
            remove_unused(self._store, sorted(removed))

    def missing(self, shards: Collection[str]) -> list[str]:
        """The shards that are gone, though the index that this save has put is still there."""
        name = self._state.names.index
        found = self._store.list_objects()
        if not _is_same(found.get(name), self.known.get(name)):
            logger.info("A newer save has replaced the one into '%s'.", self._store.address)
            return []
        return [shard for shard in shards if shard not in found]

    def lost_or(self, error: BaseException) -> BaseException:
        """The error to raise where a shard could not be sent: the winner of two writers may have removed its upload."""
        if not isinstance(error, StoreError):
            return error
        name = self._state.names.index
        try:
            now = self._store.find(name)
            is_ours = now is not None and is_index_of(read_small(self._store, now), self._digits)
        except HfshardError:
            return error
        return error if is_ours or _is_same(now, self.known.get(name)) else self._lost()

    def _unneeded(self, *, is_lost: bool) -> set[str]:
        """What this save has put where nothing was, and which is still its own."""
        if not self._own:
            return set()
        names, found = self._state.names, self._store.list_objects()
        own = {name for name in self._own if name not in self.known or _is_same(found.get(name), self.known[name])}
        passing = set(filter(names.is_transient, own))
        if not is_lost or own == passing:
            return own
        index = found.get(names.index)
        theirs = None if index is None else parsed_index(self._store, index)
        kept = self._companion_files.keys() | theirs.files.keys() if theirs is not None else own
        return passing | (own - kept)

    def _decide(self, step: CommitStep, plan: CommitPlan) -> None:
        """Carry out the deciding put, and find out whether it was done where the store does not say so."""
        try:
            self._execute(step, plan)
        except StaleObjectError as error:
            raise self._lost() from error
        except StoreError as error:
            if not self._was_put(step, plan, error):
                raise
        self.is_decided = True

    def _was_put(self, step: CommitStep, plan: CommitPlan, error: StoreError) -> bool:
        path = str(self._store.address.joined(step.target))
        try:
            now = self._store.find(step.target)
            if _is_same(now, self.known.get(step.target)):
                return False
            if now is not None and has_bytes(self._store, now, self._raw(step, plan)):
                self.known[step.target] = now
                return True
        except HfshardError:
            logger.info("'%s' can't be looked at.", path, exc_info=True)
        self.is_decided = True  # maybe
        raise CommitUnfinishedError(
            f"The put of '{path}' failed, and nobody can tell whether it was done: {error}. What is there loads as a "
            "whole, old or new. Save again.",
            path=path,
        ) from error

    def _finish(self, steps: Sequence[CommitStep], plan: CommitPlan, uploads: Collection[str]) -> None:
        """Carry out what follows the deciding put, which is the first of the steps."""
        doing = steps[0]
        is_committed = doing.is_commit
        marks = [CommitStep("remove", name) for name in self._marks]
        try:
            for together in _grouped([*steps[1:], *marks]):
                doing = together[0]
                if doing.kind == "remove":
                    self._remove([step.target for step in together if self._may_go(step.target)])
                elif not self._put_unless_newer(doing, plan):
                    self._remove(self._marks)
                    return
                is_committed |= any(step.is_commit for step in together)
            if uploads:
                self._store.sweep_uploads(uploads.__contains__)
        except StoreError as error:
            who = "every reader loads it" if is_committed else f"{steps[0].moves} load it, other readers the old one"
            address = str(self._store.address)
            what = f"{_WORDS[doing.kind]} {doing.target}"
            raise CommitUnfinishedError(
                f"The new checkpoint in '{address}' is saved, and {who}; but '{what}' failed: {error}. Save again to "
                "finish.",
                path=address,
            ) from error

    def _may_go(self, name: str) -> bool:
        """Whether an object is not the mark of another save that is alive."""
        return name in self._marks or not self._state.names.is_turn_mark(name)

    def _put_unless_newer(self, step: CommitStep, plan: CommitPlan) -> bool:
        """Put an object, unless a newer save has replaced what this one has committed."""
        index = self._state.names.index
        try:
            if step.target not in (index, CONFIG_NAME) and not self._is_still_there(index):
                raise StaleObjectError(f"'{self._store.address.joined(index)}' is that of another save.")
            self._execute(step, plan)
        except StaleObjectError as error:
            if not self._take_over(step, plan):
                logger.info("A newer save replaces the one into '%s': %s", self._store.address, error)
                return False
        return True

    def _take_over(self, step: CommitStep, plan: CommitPlan) -> bool:
        """Put a file over whoever was faster, as long as this save's checkpoint is the one that is loaded.

        The index is put as long as the config leads to this save's weights: whoever put it did so before this save's
        config, or is going to find that the config has changed. Small files are put as long as the index is this
        save's: the one before has put its own only now. An index that brings nothing any more replaces only the one
        that did: who was faster goes on from there.
        """
        index = self._state.names.index
        if step.target == CONFIG_NAME or (step.target == index and not _decides(step)):
            return False
        for _ in range(_TRIES):
            there = self._store.find(step.target)
            if not self._is_still_there(CONFIG_NAME if step.target == index else index):
                return False
            try:
                self.known[step.target] = self._store.put(step.target, self._raw(step, plan), there)
            except StaleObjectError:
                continue
            return True
        return False

    def _is_still_there(self, name: str) -> bool:
        """Whether an object is the one that this save has put, or found."""
        return _is_same(self._store.find(name), self.known.get(name))

    def _take_turn(self) -> None:
        """Where no put is conditional, let only one save commit at a time."""
        if not self._store.has_conditional_put:
            self._own.add(self._state.names.turn_mark(self._digits))
            self._marks = sorted(take_turn(self._store, self._state.names, self._digits))

    def _unfinished_uploads(self) -> set[str]:
        """The uploads that are there before the first put that stops other saves: none of those is committed any more.

        One that is seen later may belong to a save that began after this commit.
        """
        names: set[str] = set()
        if not (self._state.has_index or self._state.strays or self._state.is_claimed):
            return names  # a save that was killed would have left the placeholder, at least

        def note(name: str) -> bool:
            if self._state.names.is_stored_shard(name):
                names.add(name)
            return False

        try:
            self._store.sweep_uploads(note)
        except StoreError as error:  # not permitted, or not known to this service: no reason not to save
            logger.info("Unfinished uploads in '%s' can't be looked for: %s", self._store.address, error)
        return names

    def _remove(self, names: list[str]) -> None:
        """Remove what was collected, by one request."""
        if names:
            self._store.delete(list(names))
        for name in names:
            self.known.pop(name, None)
        names.clear()

    def _execute(self, step: CommitStep, plan: CommitPlan) -> None:
        if step.kind == "rename":
            self._put(step, plan)
        elif step.kind == "remove":
            self._remove([step.target])

    def _put(self, step: CommitStep, plan: CommitPlan) -> None:
        name = step.target
        if name not in self.known and name not in (self._state.names.index, CONFIG_NAME):
            self._own.add(name)  # also where its answer is lost
        raw = self._raw(step, plan)
        try:
            # Whole, whatever its size: what goes in parts has no condition, and Azure could mix those of two writers.
            put = self._store.put(name, raw, self.known.get(name))
        except StaleObjectError:
            self._own.discard(name)  # it is somebody else's
            raise
        note_put(self._store, put, raw)
        self.known[name] = put

    def _raw(self, step: CommitStep, plan: CommitPlan) -> bytes:
        raw = plan.small_files.get(step.source)
        if raw is None:
            with self._companion_files[step.source].open() as reader:
                return reader.read()
        if step.target == self._state.names.placeholder:
            return self._digits.encode()  # of each save another one
        if step.target == self._state.names.index and not (_decides(step) or self._is_protecting or self.is_decided):
            return claiming_index(raw, self._digits)
        if INDEX_FILE.fullmatch(step.target):
            return renewed_index(raw, self._digits, self._brought(step, plan))
        return raw

    def _brought(self, index: CommitStep, plan: CommitPlan) -> dict[str, BroughtFile]:
        """The small files that are put after the deciding put and an index, of which readers take them meanwhile."""
        if self._is_protecting:
            return {}
        later = plan.steps[max(_deciding(plan), plan.steps.index(index)) :]
        files = {step.target: plan.small_files[step.source] for step in later if step.source in plan.small_files}
        found = {name: self._state.found.get(name) for name in files}
        return {
            name: BroughtFile(raw, None if (there := found[name]) is None else there.etag)
            for name, raw in files.items()
            if name != CONFIG_NAME and not INDEX_FILE.fullmatch(name)
        }

    def _lost(self) -> RemoteChangedError:
        address = str(self._store.address)
        return RemoteChangedError(
            f"Somebody else has saved into '{address}' since this save began: theirs is there, and what this one has "
            "sent is removed. Save again to replace it.",
            path=address,
        )


def _decides(step: CommitStep) -> bool:
    """Whether some readers find the new checkpoint from this step on."""
    return step.is_commit or bool(step.moves)


def _deciding(plan: CommitPlan) -> int:
    """The number of the first step that decides."""
    return next(number for number, step in enumerate(plan.steps) if _decides(step))


def _grouped(steps: Sequence[CommitStep]) -> Iterator[list[CommitStep]]:
    """Each put by itself, and removals that follow each other together."""
    for kind, together in groupby((step for step in steps if step.kind != "sync"), key=lambda step: step.kind):
        found = list(together)
        yield from [found] if kind == "remove" else [[step] for step in found]


def _is_same(one: StoredObject | None, other: StoredObject | None) -> bool:
    return (one and one.etag) == (other and other.etag)
