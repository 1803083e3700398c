"""Copy checkpoints between directories and stores: the same tensors in the same files, committed like a save."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

from hfshard._util.addresses import is_store_address
from hfshard._util.threads import run_in_threads
from hfshard.checkpoint.folder import StoreFolder
from hfshard.checkpoint.load_options import LoadOptions
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.commit import store_plan
from hfshard.constants import CONFIG_NAME, FILES_AT_ONCE, GENERATION_CONFIG_NAME, MANIFEST_NAME
from hfshard.disk.byte_source import ByteSource, BytesSource
from hfshard.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    InvalidArgumentError,
    UnsafePathError,
)
from hfshard.format.digests import Verify
from hfshard.format.file_names import INDEX_FILE, WeightNames
from hfshard.format.index import CheckpointIndex, without_commit_keys
from hfshard.format.stored_save import SaveId, StoredSave, objects_of_saves, split_object_name
from hfshard.hub.directory.commit_graph import check_paths
from hfshard.hub.push_files import DirectoryFiles, FilesOfPlace, PushContents, detect_variants
from hfshard.hub.repo import PushResult
from hfshard.hub.resolve import CheckpointQuery, companion_files
from hfshard.places.source import CheckpointSource, open_source
from hfshard.saving.resharding import reshard_source
from hfshard.saving.save_request import SaveOptions
from hfshard.stores.open_store import open_store
from hfshard.stores.store import Store, StoredObject, StoredSource

_OF_WEIGHTS: Final = frozenset({CONFIG_NAME, GENERATION_CONFIG_NAME})
"""Files that are saved along with the weights anyway."""


def copy_to_store(
    files: FilesOfPlace,
    address: str,
    progress: bool | None,
    *,
    allow_patterns: list[str] | str | None = None,
    ignore_patterns: list[str] | str | None = None,
) -> PushResult:
    """Copy all checkpoints of a place into a store, with one commit for each variant, and their companion files.

    Args:
        files: The files of the place.
        address: The target.
        progress: Whether to show a bar.
        allow_patterns, ignore_patterns: Globs that select the companion files.

    Returns:
        Information about what was sent; without a Hub commit.

    Raises:
        Everything that `reshard_checkpoint` raises.
    """
    paths = list(files.contents())
    variants = sorted(detect_variants(name for name in paths if "/" not in name) or {None}, key=lambda name: name or "")
    store = open_store(address)
    folders = {"", *(path.rpartition("/")[0] for path in paths)}
    before = _listed_in(store, folders)
    allowed = listed(allow_patterns)
    ignored = listed(ignore_patterns)
    for variant in variants:
        query = CheckpointQuery(variant=variant, allow_patterns=allowed, ignore_patterns=ignored)
        _copy_one(files, address, query, progress=progress)
    after = _listed_in(store, folders)
    earlier = set(_fingerprints(store, before).values())
    copied = {name for name, one in _fingerprints(store, after).items() if name not in before and one in earlier}
    new = [found for name, found in after.items() if before.get(name) != found and found.name not in copied]
    return PushResult("", address, is_new=before != after, sent_bytes=sum(found.size for found in new))


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
            save = StoredSave.from_json(store_plan.known(store, one) or store.read(one), name, split[1])
            index = CheckpointIndex.from_json(save.small_files.get(split[0], b""), split[0])
            fingerprints |= {
                save.save_id.object_name(file): digest.fingerprint
                for file, digest in index.files.items()
                if digest.fingerprint is not None
            }
    return fingerprints


def copy_checkpoint(
    place: str,
    target: str,
    query: CheckpointQuery,
    *,
    verify: Verify = "structure",
    progress: bool | None = None,
    overwrite: bool = False,
) -> str:
    """Copy one checkpoint, and its companion files.

    Args:
        place: The source, a directory or an address.
        target: The target, a directory or an address.
        query: Selects the checkpoint, and the other files.
        verify: Level of the source's check; see `pull_checkpoint`.
        progress: Whether to show a bar.
        overwrite: Whether to replace files that don't belong to the checkpoint; see `pull_checkpoint`.

    Returns:
        The target.

    Raises:
        Everything that `reshard_checkpoint` raises.
    """
    if is_store_address(place) and query.subfolder:
        place = f"{place}/{query.subfolder.strip('/')}"
    files = StoreFiles(place) if is_store_address(place) else DirectoryFiles(place, follow_links=True)
    _copy_one(files, target, query, verify=verify, progress=progress, overwrite=overwrite)
    return target


def _copy_one(
    files: FilesOfPlace,
    target: str,
    query: CheckpointQuery,
    *,
    verify: Verify = "structure",
    progress: bool | None,
    overwrite: bool = True,
) -> None:
    source = CheckpointSource(files.place, CheckpointQuery(variant=query.variant))
    options = SaveOptions(variant=query.variant, progress=progress)
    beside = partial(_beside, files, query)
    reshard_source(source, target, options, beside=beside, overwrite=overwrite, verify=verify)


def _beside(files: FilesOfPlace, query: CheckpointQuery, checkpoint: OpenCheckpoint) -> dict[str, ByteSource]:
    """Find the files that go along with a checkpoint, as in a pull."""
    contents = files.contents()
    found = companion_files({query.path(name): content.size for name, content in contents.items()}, query)
    names = {path.removeprefix(query.path("")) for path in found} - _OF_WEIGHTS
    names -= objects_of_saves(path for path in contents if "/" not in path)  # of a directory that was synced
    files.check(names)
    return {name: contents[name] for name in sorted(names)}


def listed(patterns: Sequence[str] | str | None) -> list[str] | None:
    """Convert globs to a list.

    Raises:
        InvalidArgumentError: They are not globs.
    """
    if patterns is None:
        return None
    found: Any = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(found, Sequence) or not all(isinstance(one, str) for one in found):
        raise InvalidArgumentError(f"allow_patterns and ignore_patterns must be globs, got {patterns!r:.200}.")
    return list(found)


# Files of a checkpoint in a store, as they are pushed to a hub.


_LEFT_OUT: Final = frozenset({".git", ".cache", "__pycache__"})
"""Folders that are never pushed, also not from a directory."""


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
        """List all files under their usual names, except those in folders that are never pushed.

        They are pinned to the listed objects: if one is replaced meanwhile, reading it is an error.
        """
        return {name: one for name, one in self._shown.items() if _LEFT_OUT.isdisjoint(name.split("/")[:-1])}

    @contextmanager
    def open_variant(self, variant: str | None) -> Iterator[OpenCheckpoint]:
        """Open the checkpoint of a variant.

        Raises:
            CheckpointChangedError: It is not the checkpoint that was listed.
        """
        source = CheckpointSource(self.place, CheckpointQuery(variant=variant))
        with open_source(source, LoadOptions()) as checkpoint:
            folder = checkpoint.folder
            save_id = folder.save_id if isinstance(folder, StoreFolder) else None
            if save_id != self._saves.get(variant) or not {checkpoint.weights.name, *checkpoint.shards} <= set(
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


def without_marks(found: PushContents) -> PushContents:
    """Restore the saved contents of a config.json that was uploaded in the middle of a commit on disk.

    The index that such a config names gets its usual name.
    """
    contents = dict(found.contents)
    for variant, index in found.indexes.items():
        names = WeightNames(variant)
        if names.is_commit_temporary(found.entries[variant]):
            contents.pop(found.entries[variant], None)
            contents[names.index] = BytesSource(index.to_json())
    if CONFIG_NAME in contents:
        with contents[CONFIG_NAME].open() as reader:
            contents[CONFIG_NAME] = BytesSource(without_commit_keys(reader.read()))
    return PushContents(contents, found.indexes, found.entries)


def _numbered_variants(names: Iterable[str]) -> set[str | None]:
    """Return the variants for which hfshard has saved a checkpoint; a run's checkpoint has a manifest."""
    usual = [split[0] for name in names if "/" not in name and (split := split_object_name(name)) is not None]
    found = detect_variants(name for name in usual if INDEX_FILE.fullmatch(name))
    return found | {None} if MANIFEST_NAME in usual else found
