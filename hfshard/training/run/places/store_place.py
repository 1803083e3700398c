"""A run in a store: a checkpoint is whole when its manifest is put, and is gone when that is deleted."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Final

from hfshard._util.addresses import parse_address
from hfshard.errors import HfshardError, RemoteChangedError, StoreError
from hfshard.stores.opening import open_store
from hfshard.stores.protocols import StoredObject
from hfshard.training.run.manifest import MANIFEST, CheckpointManifest
from hfshard.training.run.places.claim import RunClaim
from hfshard.training.run.places.protocols import CheckpointOrder
from hfshard.training.run.places.sending import Sender
from hfshard.training.run.places.store_folders import REPLACED, StoreFolders, folder_of, is_of_a_save
from hfshard.training.run.run_checkpoint import CHECKPOINT, RunCheckpoint, checkpoint_path, is_own_name

logger = logging.getLogger(__name__)

_TRIES: Final = 3
"""How often files are sent that somebody takes away."""


class StorePlace:
    """A run in a store.

    Every file of a checkpoint is put before its manifest, `checkpoint.json`; that one conditional put makes it whole,
    and deleting the manifest first makes it no checkpoint any more. Folders without a manifest are not listed.

    Who saves has put a claim (see `RunClaim`), and before the manifest it looks whether that is still there. So what is
    found without a manifest by who has just put a claim is of a killed save, or of one that can't be finished any more:
    it is removed, behind a tombstone in the place of the manifest.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self._address = parse_address(root, "root")
        self._is_littered = False
        """Whether something could not be removed."""

    @cached_property
    def _folders(self) -> StoreFolders:
        return StoreFolders(open_store(self._address))

    @cached_property
    def _claim(self) -> RunClaim:
        return RunClaim(self._folders.store)

    def checkpoints(self) -> list[RunCheckpoint]:
        """List the whole run with one request or a few, and read the manifests that were not read before.

        Raises:
            CheckpointChangedError: They kept changing.
        """
        return self._folders.checkpoints()

    def saving(self) -> AbstractContextManager[None]:
        """Nothing is to be translated: a store's errors name it."""
        return nullcontext()

    @property
    def is_taken(self) -> bool:
        """Whether this process has put a claim."""
        return self._claim.is_made

    def take(self) -> bool:
        """Put a claim, or look whether it is still there.

        Raises:
            RemoteChangedError: Another manager has taken the run over.
            StoreError: The store refused or failed.
        """
        if self._claim.is_made:
            self._claim.check()
            return self._is_littered
        self._claim.make()
        return True

    def release(self) -> None:
        """Leave the run to others."""
        self._claim.forget()

    def clean_up(self) -> None:
        """Remove what killed saves left, and put back what they were about to replace."""
        self._is_littered = False
        whole = {folder_of(one) for one in self.checkpoints()}
        folders = self._folders.listed
        for folder, files in folders.items():
            if (match := REPLACED.fullmatch(folder)) is not None:
                if folder in whole:
                    self._put_back(folder, files, checkpoint_path("", int(match[1])))
                    whole.add(checkpoint_path("", int(match[1])))
                else:
                    self._folders.remove(folder, files)
        for folder, files in folders.items():
            match = CHECKPOINT.fullmatch(folder)
            is_own = match is not None and is_own_name(folder, int(match[1]))
            if is_own and folder not in whole and is_of_a_save(files):
                self._folders.remove_unfinished(folder, files)

    def write(self, order: CheckpointOrder, found: Sequence[RunCheckpoint]) -> RunCheckpoint:
        """Put all files, and the manifest last.

        Raises:
            RemoteChangedError: Another manager has taken the run over; what was put is removed again.
            StoreError: The store refused or failed.
        """
        step = order.manifest.step
        folder = checkpoint_path("", step)
        newest = next((one for one in found if one.manifest is not None), None)
        aside = _name_aside(folder, found)
        sender = Sender(self._folders.store, folder, self._claim.check)
        try:
            if aside is not None:
                self._move_aside(folder, aside)
            if newest is not None:
                before = folder_of(newest)
                is_aside = aside is not None and before == folder
                files = self._folders.files_in(aside or "") if is_aside else self._folders.listed.get(before, {})
                sender.know(newest, files)
            manifest = self._send_and_commit(sender, order)
        except BaseException:
            self._take_back(sender, aside)
            raise
        if aside is not None:
            self._remove_or_warn(aside)
        return RunCheckpoint(checkpoint_path(self.root, step), step, manifest)

    def remove(self, checkpoint: RunCheckpoint) -> None:
        """Delete its manifest, and then its files."""
        self._remove_or_warn(folder_of(checkpoint))

    def _send_and_commit(self, sender: Sender, order: CheckpointOrder) -> CheckpointManifest:
        """Send all files, put the manifest, and look whether all of them are there: once more, if they are not."""
        for attempt in range(_TRIES):
            manifest = sender.send(order)
            if not attempt:
                order.before_commit()
            self._claim.check()
            put = sender.put_manifest(manifest)
            self._folders.note_manifest(put, sender.manifest or b"")
            listed = self._folders.files_in(sender.folder)
            if sender.are_there(manifest, listed):
                self._folders.delete(sender.folder, listed.keys() - manifest.files.keys() - {MANIFEST})
                return manifest
            self._claim.check()
            self._folders.delete(sender.folder, [MANIFEST])  # one that has lost the run took its own files away
        raise RemoteChangedError(
            f"Files of '{self.root}/{sender.folder}' were removed or replaced while they were saved. Stop what else "
            "changes the run, and save again.",
            path=self.root,
        )

    def _take_back(self, sender: Sender, aside: str | None) -> None:
        """Remove what an unfinished save has put, and nothing of others; the checkpoint that it replaces comes back."""
        folder = sender.folder
        try:
            is_ours = self._claim.is_there()
            listed = self._folders.files_in(folder)
            raw = self._folders.store.read(listed[MANIFEST]) if MANIFEST in listed else None
            if raw is not None and raw == sender.manifest:
                self._folders.delete(folder, [MANIFEST])
                raw = None
            kept = CheckpointManifest.from_json(raw, f"{self.root}/{folder}/{MANIFEST}").files if raw else {}
            self._folders.delete(folder, sender.own_among(listed, is_alone=is_ours) - kept.keys())
            if aside is not None and is_ours:
                copied = self._folders.files_in(aside)
                if MANIFEST in copied and raw is None:
                    self._put_back(aside, copied, folder)
                else:
                    self._folders.remove(aside, copied)
        except HfshardError as error:
            logger.warning(
                "What was put below '%s/%s' can't be removed (%s); the next save tries again.",
                self.root,
                sender.folder,
                error,
            )

    def _move_aside(self, folder: str, aside: str) -> None:
        """Copy the checkpoint that is in the way to another folder, where it counts until the new one is whole."""
        files = self._folders.files_in(folder)
        self._folders.copy(files, aside)
        self._folders.remove(folder, files)

    def _put_back(self, aside: str, files: Mapping[str, StoredObject], folder: str) -> None:
        """Give a checkpoint that was moved aside its own name again."""
        logger.info("Putting '%s/%s' back, which an unfinished save was about to replace.", self.root, folder)
        self._folders.sweep_uploads(folder)
        self._folders.remove(folder, self._folders.files_in(folder))
        self._folders.copy(files, folder)
        self._folders.remove(aside, files)

    def _remove_or_warn(self, folder: str) -> None:
        """Remove a checkpoint that another one has replaced; if that fails, the next save tries again."""
        try:
            self._folders.remove(folder, self._folders.files_in(folder))
        except StoreError as error:
            logger.warning("'%s/%s' can't be removed (%s); the next save tries again.", self.root, folder, error)
            self._is_littered = True


def _name_aside(folder: str, found: Sequence[RunCheckpoint]) -> str | None:
    """The name by which a checkpoint that is in the way counts while it is replaced; None where there is none."""
    old = next((one for one in found if folder_of(one) == folder), None)
    if old is None:
        return None
    return f".replaced-{old.step}-{old.manifest.save_number if old.manifest is not None else 0}"
