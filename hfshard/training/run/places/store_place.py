"""A run in a store: a checkpoint is whole when its manifest is put, and is gone when that is deleted."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Final

from hfshard._util.addresses import parse_address
from hfshard._util.threads import in_threads
from hfshard.constants import FILES_AT_ONCE
from hfshard.errors import (
    CheckpointChangedError,
    HfshardError,
    RemoteChangedError,
    StaleObjectError,
    StoreAccessError,
    StoreError,
)
from hfshard.stores.opening import open_store
from hfshard.stores.protocols import Store, StoredObject
from hfshard.training.run.manifest import MANIFEST, CheckpointManifest
from hfshard.training.run.places.claim import RunClaim
from hfshard.training.run.places.protocols import CheckpointOrder
from hfshard.training.run.places.sending import Sender
from hfshard.training.run.run_checkpoint import (
    CHECKPOINT,
    RunCheckpoint,
    checkpoint_path,
    is_own_name,
    newest_first,
    read_run_checkpoint,
)

logger = logging.getLogger(__name__)

_REPLACED: Final = re.compile(r"\.replaced-(\d{1,18})-\d+")
"""A copy of a checkpoint that another save of the same step is replacing; it counts until the new one is whole."""

_TOMBSTONE: Final = b'{"removed": true}\n'
"""Stands in the place of a manifest while the files of a save that was never finished are deleted: it can't be put any
more, should that save still be under way."""

_LOOKS: Final = 20
"""How often a run is listed again, at most, while another process saves into it."""

_TRIES: Final = 3
"""How often files are sent that somebody takes away."""

Folders = dict[str, dict[str, StoredObject]]
"""Name of a folder of the run -> name of a file in it -> what was listed."""


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
        self._manifests: dict[tuple[str, str], bytes] = {}
        """Manifests that were read: name and ETag -> bytes."""
        self._listed: Folders = {}
        """What the last listing has found."""
        self._is_littered = False
        """Whether something could not be removed."""

    @cached_property
    def _store(self) -> Store:
        return open_store(self._address)

    @cached_property
    def _claim(self) -> RunClaim:
        return RunClaim(self._store)

    def checkpoints(self) -> list[RunCheckpoint]:
        """List the whole run with one request or a few, and read the manifests that were not read before.

        Raises:
            CheckpointChangedError: They kept changing.
        """
        for attempt in range(_LOOKS):
            try:
                self._listed = self._folders()
                return self._checkpoints_of(self._listed)
            except CheckpointChangedError:  # a run that is saving has removed or replaced one since it was listed
                if attempt == _LOOKS - 1:
                    raise
        return []

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
        folders = self._folders()
        whole = {_folder_of(one) for one in self._checkpoints_of(folders)}
        for folder, files in folders.items():
            if (match := _REPLACED.fullmatch(folder)) is not None:
                if folder in whole:
                    self._put_back(folder, files, checkpoint_path("", int(match[1])))
                    whole.add(checkpoint_path("", int(match[1])))
                else:
                    self._remove_folder(folder, files)
        for folder, files in folders.items():
            match = CHECKPOINT.fullmatch(folder)
            if match is not None and is_own_name(folder, int(match[1])) and folder not in whole:
                self._remove_unfinished(folder, files)

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
        sender = Sender(self._store, folder, self._claim.check)
        try:
            if aside is not None:
                self._move_aside(folder, aside)
            if newest is not None:
                before = _folder_of(newest)
                is_aside = aside is not None and before == folder
                sender.know(newest, self._files_in(aside or "") if is_aside else self._listed.get(before, {}))
            manifest = self._send_and_commit(sender, order)
        except BaseException:
            self._take_back(sender, aside)
            raise
        if aside is not None:
            self._remove_or_warn(aside)
        return RunCheckpoint(checkpoint_path(self.root, step), step, manifest)

    def remove(self, checkpoint: RunCheckpoint) -> None:
        """Delete its manifest, and then its files."""
        self._remove_or_warn(_folder_of(checkpoint))

    def _send_and_commit(self, sender: Sender, order: CheckpointOrder) -> CheckpointManifest:
        """Send all files, put the manifest, and look whether all of them are there: once more, if they are not."""
        for attempt in range(_TRIES):
            manifest = sender.send(order)
            if not attempt:
                order.before_commit()
            self._claim.check()
            put = sender.put_manifest(manifest)
            self._manifests[put.name, put.etag] = sender.manifest or b""
            listed = self._files_in(sender.folder)
            if sender.are_there(manifest, listed):
                strays = listed.keys() - manifest.files.keys() - {MANIFEST}
                self._delete(sender.folder, strays)
                return manifest
            self._delete(sender.folder, [MANIFEST])  # a manager that has lost the run took its own files away
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
            listed = self._files_in(folder)
            raw = self._store.read(listed[MANIFEST]) if MANIFEST in listed else None
            if raw is not None and raw == sender.manifest:
                self._delete(folder, [MANIFEST])
                raw = None
            kept = CheckpointManifest.from_json(raw, f"{self.root}/{folder}/{MANIFEST}").files if raw else {}
            self._delete(folder, sender.own_among(listed, is_alone=is_ours) - kept.keys())
            if aside is not None and is_ours:
                copied = self._files_in(aside)
                if MANIFEST in copied and raw is None:
                    self._put_back(aside, copied, folder)
                else:
                    self._remove_folder(aside, copied)
        except HfshardError as error:
            logger.warning(
                "What was put below '%s/%s' can't be removed (%s); the next save tries again.",
                self.root,
                sender.folder,
                error,
            )

    def _move_aside(self, folder: str, aside: str) -> None:
        """Copy the checkpoint that is in the way to another folder, where it counts until the new one is whole."""
        files = self._files_in(folder)
        self._copy_folder(files, aside)
        self._remove_folder(folder, files)

    def _put_back(self, aside: str, files: Mapping[str, StoredObject], folder: str) -> None:
        """Give a checkpoint that was moved aside its own name again."""
        logger.info("Putting '%s/%s' back, which an unfinished save was about to replace.", self.root, folder)
        self._sweep_uploads(folder)
        self._remove_folder(folder, self._files_in(folder))
        self._copy_folder(files, folder)
        self._remove_folder(aside, files)

    def _copy_folder(self, files: Mapping[str, StoredObject], target: str) -> None:
        """Copy all files on the server, the manifest last."""
        others = [(one, f"{target}/{name}") for name, one in files.items() if name != MANIFEST]
        in_threads(lambda item, _: self._store.copy(*item), others, FILES_AT_ONCE)
        if MANIFEST in files:
            self._store.copy(files[MANIFEST], f"{target}/{MANIFEST}")

    def _remove_folder(self, folder: str, files: Collection[str]) -> None:
        """Delete the manifest, and then the rest."""
        self._delete(folder, [MANIFEST] if MANIFEST in files else [])
        self._delete(folder, [name for name in files if name != MANIFEST])

    def _remove_or_warn(self, folder: str) -> None:
        """Remove a checkpoint that another one has replaced; if that fails, the next save tries again."""
        try:
            self._remove_folder(folder, self._files_in(folder))
        except StoreError as error:
            logger.warning("'%s/%s' can't be removed (%s); the next save tries again.", self.root, folder, error)
            self._is_littered = True

    def _remove_unfinished(self, folder: str, files: Collection[str]) -> None:
        """Delete what a save has left that was never finished, and can't be any more."""
        if MANIFEST not in files and self._store.has_conditional_put:
            try:
                self._store.put(f"{folder}/{MANIFEST}", _TOMBSTONE, None)
            except StaleObjectError:
                return  # it was finished at this moment
        logger.info("Removing '%s/%s', left by a save that was never finished.", self.root, folder)
        self._sweep_uploads(folder)
        self._delete(folder, [name for name in files if name != MANIFEST])
        self._delete(folder, [MANIFEST])

    def _sweep_uploads(self, folder: str) -> None:
        """Remove what unfinished uploads of a checkpoint have left, which no manifest will name."""
        try:
            open_store(self._address.joined(folder)).sweep_uploads(lambda name: True)
        except StoreAccessError as error:
            logger.info("Unfinished uploads in '%s/%s' can't be looked for: %s", self.root, folder, error)

    def _delete(self, folder: str, names: Collection[str]) -> None:
        if names:
            self._store.delete([f"{folder}/{name}" for name in names])

    def _folders(self) -> Folders:
        """List the folders that may be checkpoints."""
        folders: Folders = {}
        for name, listed in self._store.list_objects().items():
            folder, _, file = name.partition("/")
            if file and (CHECKPOINT.fullmatch(folder) or _REPLACED.fullmatch(folder)):
                folders.setdefault(folder, {})[file] = listed
        return folders

    def _files_in(self, folder: str) -> dict[str, StoredObject]:
        """List the files of one folder."""
        listed = self._store.list_objects(folder)
        return {name.removeprefix(f"{folder}/"): one for name, one in listed.items()}

    def _checkpoints_of(self, folders: Folders) -> list[RunCheckpoint]:
        """The checkpoints among folders: of several of one step the one that a save has put there."""
        marked = {folder: files[MANIFEST] for folder, files in folders.items() if MANIFEST in files}
        raws = dict(zip(marked, in_threads(lambda one, _: self._read(one), marked.values(), FILES_AT_ONCE)))
        self._manifests = {(one.name, one.etag): raws[folder] for folder, one in marked.items()}
        steps: set[int] = set()
        found = []
        for folder, step in _in_order_of_right(marked):
            path = f"{self.root}/{folder}"
            if raws[folder] != _TOMBSTONE and step not in steps:
                steps.add(step)
                read = partial(CheckpointManifest.from_json, raws[folder], f"{path}/{MANIFEST}")
                found.append(read_run_checkpoint(path, step, read))
        return newest_first(found)

    def _read(self, found: StoredObject) -> bytes:
        """Read a manifest, once."""
        known = self._manifests.get((found.name, found.etag))
        return self._store.read(found) if known is None else known


def _name_aside(folder: str, found: Sequence[RunCheckpoint]) -> str | None:
    """The name by which a checkpoint that is in the way counts while it is replaced; None where there is none."""
    old = next((one for one in found if _folder_of(one) == folder), None)
    if old is None:
        return None
    return f".replaced-{old.step}-{old.manifest.save_number if old.manifest is not None else 0}"


def _in_order_of_right(folders: Iterable[str]) -> list[tuple[str, int]]:
    """Folders and their steps: first those of saves, then what saves are replacing, then copies that users made."""
    ranked = []
    for folder in folders:
        match = CHECKPOINT.fullmatch(folder) or _REPLACED.fullmatch(folder)
        assert match is not None
        step = int(match[1])
        rank = 0 if is_own_name(folder, step) else 1 if folder.startswith(".") else 2
        ranked.append((rank, folder, step))
    return [(folder, step) for _, folder, step in sorted(ranked)]


def _folder_of(checkpoint: RunCheckpoint) -> str:
    return checkpoint.path.rpartition("/")[2]
