"""Remove a checkpoint, a run checkpoint, or leftovers of killed saves from a directory or a store."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from hfshard._util.arguments import wraps_os_errors
from hfshard._util.text import shorten_list
from hfshard.checkpoint.check_files import retry_if_replaced
from hfshard.checkpoint.locate import directory_not_found
from hfshard.checkpoint.ranged_folder import RangedFolder
from hfshard.checkpoint.reports import RemovalReport
from hfshard.commit.directory_state import find_enclosing_hub
from hfshard.commit.removal import (
    Removal,
    joined,
    remove_from_directory,
    remove_from_store,
    remove_leftovers_from_directory,
    remove_leftovers_from_store,
)
from hfshard.commit.store_commit import run_of_folder
from hfshard.constants import MARKS
from hfshard.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    RemoteChangedError,
    SaveDirectoryError,
)
from hfshard.format.file_names import WeightNames
from hfshard.places.place import DirectoryPlace, SavePlace, StorePlace, place_to_save
from hfshard.stores.open_store import open_store
from hfshard.stores.store import Store
from hfshard.training.run.find_checkpoint import checkpoint_of_step, is_checkpoint, is_run, open_run
from hfshard.training.run.manifest import CHECKPOINT, folder_at
from hfshard.training.run.run_removal import (
    remove_from_run,
    remove_from_stored_run,
    remove_leftovers_from_run,
    remove_leftovers_from_stored_run,
)

_REPO_ID: Final = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
"""A possible name of a repo, as opposed to a directory."""

_CACHE: Final = re.compile(r"/models--[^/]+/snapshots/")
"""Part of a path in huggingface_hub's cache."""

_TRIES: Final = 5
"""The most times that a place is listed, if a save replaces the listed files before they are read."""

_SHOWN: Final = 5
"""The most steps in a message."""


@wraps_os_errors("path")
def remove_checkpoint(
    path: str | os.PathLike[str],
    *,
    variant: str | None = None,
    step: int | None = None,
    leftovers: bool = False,
    unfinished: bool = False,
    dry_run: bool = False,
) -> RemovalReport:
    """Remove a checkpoint, a run checkpoint, or leftovers of killed saves from a directory or a store.

    A checkpoint is its weights and indexes, and config.json, generation_config.json and model.sig if no other weights
    stay next to them; in a store also its other small files, and leftovers of its earlier saves. Everything else stays,
    such as tokenizers, code and other variants, and the report lists it. At every moment, readers find the complete
    checkpoint or none, never other weights in its place; another removal finishes one that was killed.

    On disk, the directory or the run is locked as by a save. A store has no locks: nothing may save there at that time.

    Args:
        path: A directory or an address of a store, or of one checkpoint of a run. Hubs are rejected.
        variant: As in `save_model`. Other variants stay.
        step: For a run at `path`: remove the checkpoint of this step.
        leftovers: Remove what killed saves have left, and no checkpoint. In a store, these are the objects of saves
            before the newest index, or the newest manifest of a run.
        unfinished: In a store, also remove objects of later saves, which are still running or were killed. A running
            save then fails, or loses its checkpoint.
        dry_run: Remove nothing.

    Returns:
        The removed files, or those that would be removed, with sizes, and the files that stay.

    Raises:
        CheckpointNotFoundError: There is none.
        CheckpointChangedError: Files have changed since they were listed. Nothing was removed.
        DirectoryLockedError: Another process is saving into the directory or the run. Nothing was removed.
        SaveDirectoryError: It is in a hub.
        InvalidArgumentError: `step` or `path` does not name a single checkpoint, or arguments contradict each other.
        RemoteChangedError: A store was replaced each time it was inspected. Nothing was removed.
        StoreError: The store refused, or failed: remove again to finish.

    Example:
        report = hfshard.remove_checkpoint("out", dry_run=True)
        print(report.size, list(report.removed), list(report.kept))
    """
    removal = plan_removal(path, variant=variant, step=step, leftovers=leftovers, unfinished=unfinished)
    if not dry_run:
        removal.carry_out()
    return replace(removal.report, is_done=not dry_run)


@wraps_os_errors("path")
def plan_removal(
    path: str | os.PathLike[str],
    *,
    variant: str | None = None,
    step: int | None = None,
    leftovers: bool = False,
    unfinished: bool = False,
) -> Removal:
    """Find out what `remove_checkpoint` would remove, with the same arguments and errors."""
    if step is not None and (leftovers or variant is not None):
        raise InvalidArgumentError("step is for one checkpoint of a run: leave out leftovers and variant.")
    if step is not None and (type(step) is not int or step < 0):
        raise InvalidArgumentError(f"step must be a non-negative int, got {step!r}.")
    place = place_to_save(path, "path")
    make_plan = REMOVALS.get(type(place))
    if make_plan is None:
        raise InvalidArgumentError(
            f"Cannot remove from '{place.address}'. Pass a directory, or an address in a store.", path=place.address
        )
    names = WeightNames(variant)
    return make_plan(RemovalRequest(str(path), place.address, names, step, leftovers, unfinished))


@dataclass(frozen=True, slots=True)
class RemovalRequest:
    """The checkpoint or leftovers to remove; see `remove_checkpoint`."""

    given: str
    """The path or address as it was passed, for messages."""
    place: str
    """The directory or address."""
    names: WeightNames
    """Names of the checkpoint's files."""
    step: int | None
    leftovers: bool
    unfinished: bool


def _plan_on_disk(request: RemovalRequest) -> Removal:
    directory, names = request.place, request.names
    _check_directory(directory, request.given)
    if request.leftovers:
        of_run, of_place = remove_leftovers_from_run(directory), remove_leftovers_from_directory(directory, names)
        return joined([of_run, of_place], directory)
    return _plan_checkpoint(request, remove_from_run, partial(remove_from_directory, directory, names))


def _plan_in_store(request: RemovalRequest) -> Removal:
    address, unfinished = request.place, request.unfinished

    def plan() -> Removal:
        store = open_store(address)
        if request.leftovers:
            return _plan_leftovers_in_store(request, store)
        return _plan_checkpoint(
            request,
            lambda path: remove_from_stored_run(open_store(path), unfinished=unfinished),
            partial(remove_from_store, store, request.names, unfinished=unfinished),
            lambda: run_of_folder(store) is not None,
        )

    try:
        return retry_if_replaced(plan, replace(RangedFolder.traits, retries=_TRIES), address)
    except CheckpointChangedError as error:
        raise RemoteChangedError(
            f"Other processes replaced the checkpoint in '{address}' on every attempt. Nothing was removed.",
            path=address,
        ) from error


REMOVALS: Final[dict[type[SavePlace], Callable[[RemovalRequest], Removal]]] = {
    DirectoryPlace: _plan_on_disk,
    StorePlace: _plan_in_store,
}
"""Class of a place -> plan of a removal there. What is in a hub is a directory here, and rejected with advice."""


def _check_directory(directory: str, given: str) -> None:
    """Reject a path that is not a directory, or is in a hub or its cache.

    Raises:
        CheckpointNotFoundError: There is no such directory.
        InvalidArgumentError: It is a file.
        SaveDirectoryError: It is in a directory hub, or in the cache of huggingface_hub.
    """
    if os.path.isfile(directory):
        raise InvalidArgumentError(
            f"'{directory}' is a file. Pass its directory, and the variant if it has one.",
            path=directory,
        )
    if not os.path.isdir(directory):
        if _REPO_ID.fullmatch(given) and not given.startswith("."):
            raise CheckpointNotFoundError(
                f"There is no directory '{given}'. To delete a repo of the Hub, run: hf repos delete {given}",
                path=directory,
            )
        raise directory_not_found(directory)
    hub = find_enclosing_hub(directory)
    if hub is not None:
        raise SaveDirectoryError(
            f"'{directory}' is in the directory hub '{hub}'. To remove its commits, run: "
            f"hfshard revisions {hub} --delete REVISION",
            path=directory,
        )
    if _CACHE.search(f"{os.path.realpath(directory)}/"):
        raise SaveDirectoryError(
            f"'{directory}' is in the cache of huggingface_hub. To clear it, run: hf cache rm", path=directory
        )


def _plan_checkpoint(
    request: RemovalRequest,
    from_run: Callable[[str], Removal],
    from_place: Callable[[], Removal],
    is_folder_of_run: Callable[[], bool] = lambda: False,
) -> Removal:
    """Plan the removal of a run's checkpoint, if a step is given or the place is one; or else of any other."""
    place = request.place
    if request.step is not None:
        return from_run(checkpoint_of_step(open_run(place), request.step).path)
    if request.names.variant is None and (is_checkpoint(folder_at(place)) or is_folder_of_run()):
        return from_run(place)
    try:
        return from_place()
    except CheckpointNotFoundError as error:
        if not is_run(folder_at(place)):
            raise
        steps = [str(one.step) for one in open_run(place).checkpoints()]
        raise InvalidArgumentError(
            f"'{place}' is a run. Choose one of its checkpoints by step ({shorten_list(steps, _SHOWN)}), as in: "
            f"hfshard remove {place} --step {steps[-1]}",
            path=place,
        ) from error


def _plan_leftovers_in_store(request: RemovalRequest, store: Store) -> Removal:
    address, names, unfinished = request.place, request.names, request.unfinished
    if run_of_folder(store) is not None or (names.variant is None and is_checkpoint(folder_at(address))):
        raise InvalidArgumentError(
            f"'{address}' is a checkpoint of a run. Pass the address of the run: its folders are checked together.",
            path=address,
        )
    removals = [remove_leftovers_from_store(store, names, unfinished=unfinished)]
    if store.list_objects(MARKS) or any(CHECKPOINT.fullmatch(folder) for folder in store.folders()):
        removals.insert(0, remove_leftovers_from_stored_run(address, unfinished=unfinished))
    return joined(removals, address)
