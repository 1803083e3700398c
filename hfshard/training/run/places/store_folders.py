"""The folders of a run in a store: listed, copied and deleted so that one without a manifest is no checkpoint."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Final

from hfshard._util.threads import in_threads
from hfshard.constants import FILES_AT_ONCE, MAX_INDEX_BYTES
from hfshard.errors import CheckpointChangedError, DamagedCheckpointError, StaleObjectError, StoreAccessError
from hfshard.stores.opening import open_store
from hfshard.stores.protocols import Store, StoredObject
from hfshard.training.run.manifest import MANIFEST, CheckpointManifest
from hfshard.training.run.run_checkpoint import (
    CHECKPOINT,
    RunCheckpoint,
    is_own_name,
    newest_first,
    read_run_checkpoint,
)
from hfshard.training.run.writing import TRAINING_STATE

logger = logging.getLogger(__name__)

REPLACED: Final = re.compile(r"\.replaced-(\d{1,18})-\d+")
"""A copy of a checkpoint that another save of the same step is replacing; it counts until the new one is whole."""

_TOMBSTONE: Final = b'{"removed": true}\n'
"""Stands in the place of a manifest while the files of a save that was never finished are deleted: it can't be put any
more, should that save still be under way."""

_LOOKS: Final = 20
"""How often a run is listed again, at most, while another process saves into it."""

Folders = dict[str, dict[str, StoredObject]]
"""Name of a folder of the run -> name of a file in it -> what was listed."""


class StoreFolders:
    """The folders of a run.

    Attributes:
        listed: What the last look at all of them has found.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.listed: Folders = {}
        self._manifests: dict[tuple[str, str], bytes] = {}
        """Manifests that were read or put: name and ETag -> bytes."""

    def checkpoints(self) -> list[RunCheckpoint]:
        """List all folders, and read the manifests that are not known; those without one are left out.

        Raises:
            CheckpointChangedError: They kept changing.
        """
        for _ in range(_LOOKS - 1):
            try:
                return self._checkpoints()
            except CheckpointChangedError:  # a run that is saving has removed or replaced one since it was listed
                continue
        return self._checkpoints()

    def files_in(self, folder: str) -> dict[str, StoredObject]:
        """List the files of one folder."""
        listed = self.store.list_objects(folder)
        return {name.removeprefix(f"{folder}/"): one for name, one in listed.items()}

    def note_manifest(self, put: StoredObject, raw: bytes) -> None:
        """Remember a manifest that was put, which need not be read then."""
        self._manifests[put.name, put.etag] = raw

    def copy(self, files: Mapping[str, StoredObject], target: str) -> None:
        """Copy the files of a folder, the manifest last."""
        others = [(one, f"{target}/{name}") for name, one in files.items() if name != MANIFEST]
        in_threads(lambda item, _: self.store.copy(*item), others, FILES_AT_ONCE)
        if MANIFEST in files:
            self.store.copy(files[MANIFEST], f"{target}/{MANIFEST}")

    def remove(self, folder: str, files: Collection[str]) -> None:
        """Delete the files of a folder, the manifest first, and last the one by which the rest is known."""
        self.delete(folder, [name for name in files if name == MANIFEST])
        self._remove_rest(folder, files)

    def _remove_rest(self, folder: str, files: Collection[str]) -> None:
        self.delete(folder, [name for name in files if name not in (MANIFEST, TRAINING_STATE)])
        self.delete(folder, [name for name in files if name == TRAINING_STATE])

    def remove_unfinished(self, folder: str, files: Collection[str]) -> None:
        """Delete what a save has left that was never finished, and can't be any more."""
        if MANIFEST not in files and self.store.has_conditional_put:
            try:
                self.store.put(f"{folder}/{MANIFEST}", _TOMBSTONE, None)
            except StaleObjectError:
                return  # it was finished at this moment
        logger.info("Removing '%s/%s', left by a save that was never finished.", self.store.address, folder)
        self.sweep_uploads(folder)
        self._remove_rest(folder, files)
        self.delete(folder, [MANIFEST])

    def sweep_uploads(self, folder: str) -> None:
        """Remove what unfinished uploads into a folder have left, which no manifest will name."""
        try:
            open_store(self.store.address.joined(folder)).sweep_uploads(lambda name: True)
        except StoreAccessError as error:
            logger.info("Unfinished uploads in '%s/%s' can't be looked for: %s", self.store.address, folder, error)

    def delete(self, folder: str, names: Collection[str]) -> None:
        """Delete files of a folder."""
        if names:
            self.store.delete([f"{folder}/{name}" for name in names])

    def _checkpoints(self) -> list[RunCheckpoint]:
        self.listed = {}
        for name, one in self.store.list_objects().items():
            folder, _, file = name.partition("/")
            if file and (CHECKPOINT.fullmatch(folder) or REPLACED.fullmatch(folder)):
                self.listed.setdefault(folder, {})[file] = one
        marked = {folder: files[MANIFEST] for folder, files in self.listed.items() if MANIFEST in files}
        raws = dict(zip(marked, in_threads(lambda one, _: self._read(one), marked.values(), FILES_AT_ONCE)))
        self._manifests = {(one.name, one.etag): raws[folder] for folder, one in marked.items()}
        steps: set[int] = set()
        found = []
        for folder, step in _in_order_of_right(marked):
            if raws[folder] != _TOMBSTONE and step not in steps:
                steps.add(step)
                path = f"{self.store.address}/{folder}"
                found.append(read_run_checkpoint(path, step, partial(_parsed, raws[folder], f"{path}/{MANIFEST}")))
        return newest_first(found)

    def _read(self, found: StoredObject) -> bytes:
        """Read a manifest, once; of one that is too large, only the beginning."""
        known = self._manifests.get((found.name, found.etag))
        if known is not None:
            return known
        target = bytearray(min(found.size, MAX_INDEX_BYTES + 1))
        self.store.read_into(found, 0, memoryview(target))
        return bytes(target)


def is_of_a_save(files: Collection[str]) -> bool:
    """Whether a folder is what a run's save has begun, or begun to remove, and not somebody else's."""
    return TRAINING_STATE in files or MANIFEST in files


def folder_of(checkpoint: RunCheckpoint) -> str:
    """The name of a checkpoint's folder."""
    return checkpoint.path.rpartition("/")[2]


def _parsed(raw: bytes, path: str) -> CheckpointManifest:
    if len(raw) > MAX_INDEX_BYTES:
        raise DamagedCheckpointError(
            f"'{path}' has more than {MAX_INDEX_BYTES} bytes, which no manifest has. Restore another checkpoint.",
            path=path,
        )
    return CheckpointManifest.from_json(raw, path)


def _in_order_of_right(folders: Iterable[str]) -> list[tuple[str, int]]:
    """Folders and their steps: first those of saves, then what saves are replacing, then copies that users made."""
    ranked = []
    for folder in folders:
        match = CHECKPOINT.fullmatch(folder) or REPLACED.fullmatch(folder)
        assert match is not None
        step = int(match[1])
        rank = 0 if is_own_name(folder, step) else 1 if folder.startswith(".") else 2
        ranked.append((rank, folder, step))
    return [(folder, step) for _, folder, step in sorted(ranked)]
