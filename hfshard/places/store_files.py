"""The files below a place in a store, under the names that they have in a directory, for pushes and copies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

from hfshard._util.threads import run_in_threads
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint, WhenOpen, open_checkpoint, warn_of_others_files
from hfshard.checkpoint.ranged_folder import StoreFolder
from hfshard.commit import store_plan
from hfshard.constants import FILES_AT_ONCE, MANIFEST_NAME
from hfshard.disk.byte_source import ByteSource
from hfshard.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidArgumentError,
    UnsafePathError,
)
from hfshard.format.file_names import INDEX_FILE, WeightNames
from hfshard.format.index import CheckpointIndex
from hfshard.format.stored_save import SaveId, objects_of_saves, split_object_name
from hfshard.hub.directory.commit_graph import check_paths
from hfshard.hub.push_files import detect_variants
from hfshard.hub.repo import is_left_out
from hfshard.stores.byte_budget import store_memory_bytes
from hfshard.stores.open_store import open_store
from hfshard.stores.store import Store, StoredObject, StoredSource


class StoreFiles:
    """The objects below an address, as they are when this is created.

    Args:
        place: The address.

    Raises:
        CheckpointNotFoundError: There are none.
        Everything that a `Store` raises.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self._store = open_store(place)
        listed = self._listed = self._store.list_objects(recursive=True)
        # A folder that was created by hand, "folder/", is listed as an empty "folder", which can't be found.
        found = {name: one for name, one in listed.items() if one.size or self._store.find(name) is not None}
        if not found:
            raise CheckpointNotFoundError(
                f"There is nothing at '{place}'. Check the address: hfshard pushes what is directly below it.",
                path=place,
            )
        self._saves: dict[str | None, SaveId] = {}
        """Variant -> its newest save."""
        self._shown: dict[str, ByteSource] = {}
        """Usual name -> contents."""
        for variant in sorted(_numbered_variants(found), key=lambda name: name or ""):
            self._show(variant, found)
        if not self._saves:
            self._shown = {name: StoredSource(self._store, one) for name, one in found.items()}
            return
        # A folder below the place may be a separate checkpoint, and goes along unchanged.
        of_saves = objects_of_saves(name for name in found if "/" not in name)
        nested = {name: split for name in found if "/" in name and (split := split_object_name(name)) is not None}
        of_saves |= {name for name, split in nested.items() if split[1] in self._saves.values()}
        names = [WeightNames(variant) for variant in self._saves]
        for name, one in found.items():
            is_weights = any(name in (some.index, some.single) or some.is_shard(name) for some in names)
            if not is_weights and name not in of_saves:
                self._shown.setdefault(name, StoredSource(self._store, one))

    def is_unchanged(self) -> bool:
        """Return whether the objects are still the same."""
        return self._store.list_objects(recursive=True) == self._listed

    def contents(self) -> dict[str, ByteSource]:
        """List all files under their usual names, except those that are never pushed.

        They are pinned to the listed objects: if one is replaced meanwhile, reading it is an error.
        """
        return {name: one for name, one in self._shown.items() if not is_left_out(name)}

    @contextmanager
    def open_variant(self, variant: str | None, when_open: WhenOpen | None = None) -> Iterator[OpenCheckpoint]:
        """Open the checkpoint of a variant.

        Raises:
            CheckpointChangedError: It is not the checkpoint that was listed.
        """
        folder = StoreFolder(self._store, self.place, store_memory_bytes())
        with open_checkpoint(folder, variant=variant, when_open=when_open) as checkpoint:
            checkpoint.progress = None
            warn_of_others_files(checkpoint, "structure")
            if folder.save_id != self._saves.get(variant) or not {checkpoint.weights.name, *checkpoint.shards} <= set(
                self._shown
            ):
                raise CheckpointChangedError(
                    f"The checkpoint in '{self.place}' was replaced after it was listed. Retry when no save is "
                    "running.",
                    path=self.place,
                )
            yield checkpoint

    def check(self, paths: Collection[str]) -> None:
        """Reject objects whose names lead elsewhere, or are not valid file names on every system.

        Raises:
            UnsafePathError: There is such an object; the message names it.
        """
        try:
            check_paths(paths)
        except InvalidArgumentError as error:
            raise UnsafePathError(
                f"An object in '{self.place}' cannot be a file of a checkpoint: {error.message} Rename or "
                "delete it, or exclude it with ignore_patterns.",
                path=error.path,
            ) from error

    def _show(self, variant: str | None, found: Mapping[str, StoredObject]) -> None:
        """Show the newest save of a variant, under usual names."""
        names = WeightNames(variant)
        folder = StoreFolder(self._store, self.place)
        folder.show(found, names)
        save = folder.save
        if save is None:
            return
        self._saves[variant] = save.save_id
        for name in (*save.small_files, *save.objects):
            if folder.has(name):
                self._shown[name] = folder.source(name)


def _numbered_variants(names: Iterable[str]) -> set[str | None]:
    """Return the variants for which hfshard has saved a checkpoint; a run's checkpoint has a manifest."""
    usual = [split[0] for name in names if "/" not in name and (split := split_object_name(name)) is not None]
    found = detect_variants(name for name in usual if INDEX_FILE.fullmatch(name))
    return found | {None} if MANIFEST_NAME in usual else found


# Bytes that a copy sends to a store.


def count_sent(store: Store, folders: Collection[str]) -> Callable[[], int | None]:
    """Begin to count what is written; see `SavePlace.count_sent`. What the service copies by itself is not sent."""
    before = _listed_in(store, folders)

    def count() -> int | None:
        after = _listed_in(store, folders)
        earlier = set(_fingerprints(store, before).values())
        copied = {name for name, one in _fingerprints(store, after).items() if name not in before and one in earlier}
        new = [found for name, found in after.items() if before.get(name) != found and found.name not in copied]
        return None if before == after else sum(found.size for found in new)

    return count


def _listed_in(store: Store, folders: Collection[str]) -> dict[str, StoredObject]:
    """List the objects directly in each of these folders only, since a place may have any number of others."""
    listed = run_in_threads(lambda folder, _: store.list_objects(folder), sorted(folders), FILES_AT_ONCE)
    return {name: one for objects in listed for name, one in objects.items()}


def _fingerprints(store: Store, found: Mapping[str, StoredObject]) -> dict[str, str]:
    """Return the fingerprints of the shards that hfshard has saved directly in a store, by object name."""
    fingerprints: dict[str, str] = {}
    for name, one in found.items():
        split = split_object_name(name)
        if split is None or INDEX_FILE.fullmatch(split[0]) is None:
            continue
        with suppress(CheckpointChangedError, DamagedCheckpointError, UnsafePathError):
            save = store_plan.read_save(store, one, split[1])
            index = CheckpointIndex.from_json(save.small_files.get(split[0], b""), split[0])
            fingerprints |= {
                save.save_id.object_name(file): digest.fingerprint
                for file, digest in index.files.items()
                if digest.fingerprint is not None
            }
    return fingerprints
