"""Remove a checkpoint, a checkpoint of a run, or what killed saves have left, from a directory or a store."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Final

from hfshard._util.addresses import is_address
from hfshard._util.arguments import absolute_path, names_files
from hfshard._util.text import list_some
from hfshard.checkpoint.locate import directory_not_found
from hfshard.commit.hub_marker import enclosing_hub
from hfshard.constants import MARKS
from hfshard.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    InvalidArgumentError,
    RemoteChangedError,
    SaveDirectoryError,
)
from hfshard.format.file_names import WeightNames
from hfshard.removal.from_directory import remove_from_directory, remove_leftovers_from_directory
from hfshard.removal.from_run import remove_from_run, remove_leftovers_from_run
from hfshard.removal.from_store import remove_from_store, remove_leftovers_from_store
from hfshard.removal.from_stored_run import remove_from_stored_run, remove_leftovers_from_stored_run
from hfshard.removal.removal_plan import Removal, RemovalReport, joined
from hfshard.stores.open_store import open_store
from hfshard.stores.store import Store
from hfshard.training.run.find_checkpoint import checkpoint_of_step, run_place
from hfshard.training.run.manifest import CHECKPOINT
from hfshard.training.run.reports import is_checkpoint, is_run

_REPO_ID: Final = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
"""What may be the name of a repo, and not that of a directory."""

_CACHE: Final = re.compile(r"/models--[^/]+/snapshots/")
"""In huggingface_hub's cache."""

_TRIES: Final = 5
"""Times that a place is listed because a save replaced what was listed before it was read."""

_SHOWN: Final = 5
"""Steps in a message."""


@names_files("path")
def remove_checkpoint(
    path: str | os.PathLike[str],
    *,
    variant: str | None = None,
    step: int | None = None,
    leftovers: bool = False,
    unfinished: bool = False,
    dry_run: bool = False,
) -> RemovalReport:
    """Remove a checkpoint from a directory or a store, a checkpoint of a run, or what killed saves have left.

    A checkpoint is its weights and indexes, and config.json, generation_config.json and model.sig where no other
    weights stay next to them; in a store also its other small files, and what its earlier saves have left. Everything
    else stays, as tokenizers, code and other variants do, and the report lists it. At every moment, readers find the
    whole checkpoint or none, never other weights in its place; a removal that was killed is finished by another one.

    On a disk, the directory or the run is locked as by a save. A store has no locks: nothing may save there meanwhile.

    Args:
        path: A directory or an address of a store; or that of one checkpoint of a run. Hubs are refused.
        variant: As in `save_model`. Other variants stay.
        step: Of a run at `path`: the checkpoint of this step.
        leftovers: Remove what killed saves have left, and no checkpoint. In a store that is what is lower than the
            newest index, or manifest of a run.
        unfinished: In a store, also remove what is higher than that: a save is under way, or was killed. A save that
            is under way then fails, or loses its checkpoint.
        dry_run: Remove nothing.

    Returns:
        What was removed, or would be, with sizes, and what stays.

    Raises:
        CheckpointNotFoundError: There is none.
        CheckpointChangedError: Files have changed since they were listed. Nothing was removed.
        DirectoryLockedError: Another process saves into the directory or the run. Nothing was removed.
        SaveDirectoryError: It is in a hub.
        InvalidArgumentError: `step` or `path` names no single checkpoint, or what was asked for contradicts itself.
        StoreError: The store refused, or failed: remove again to finish.

    Example:
        report = hfshard.remove_checkpoint("out", dry_run=True)
        print(report.size, list(report.removed), list(report.kept))
    """
    removal = plan_removal(path, variant=variant, step=step, leftovers=leftovers, unfinished=unfinished)
    if not dry_run:
        removal.carry_out()
    return replace(removal.report, is_done=not dry_run)


@names_files("path")
def plan_removal(
    path: str | os.PathLike[str],
    *,
    variant: str | None = None,
    step: int | None = None,
    leftovers: bool = False,
    unfinished: bool = False,
) -> Removal:
    """Find out what `remove_checkpoint` would remove; arguments and errors are those of it."""
    if step is not None and (leftovers or variant is not None):
        raise InvalidArgumentError("step is for one checkpoint of a run: leave out leftovers and variant.")
    if step is not None and (type(step) is not int or step < 0):
        raise InvalidArgumentError(f"step must be a number of steps, got {step!r}.")
    place = absolute_path(path)
    names = WeightNames(variant)
    if not is_address(place):
        _check_directory(place, str(path))
        if step is not None:
            return remove_from_run(checkpoint_of_step(run_place(place), step).path)
        return _leftovers_on_disk(place, names) if leftovers else _checkpoint_on_disk(place, names)
    for _ in range(_TRIES):
        try:
            if step is not None:
                one = checkpoint_of_step(run_place(place), step)
                return remove_from_stored_run(open_store(one.path), unfinished=unfinished)
            if leftovers:
                return _leftovers_in_store(place, names, unfinished=unfinished)
            return _checkpoint_in_store(place, names, unfinished=unfinished)
        except CheckpointChangedError as error:
            changed = error
    raise RemoteChangedError(
        f"Other processes save into '{place}': it was replaced each time it was inspected. Nothing was removed.",
        path=place,
    ) from changed


def _check_directory(directory: str, given: str) -> None:
    """Refuse what is no directory, or in a hub.

    Raises:
        CheckpointNotFoundError, InvalidArgumentError, SaveDirectoryError: As it is.
    """
    if os.path.isfile(directory):
        raise InvalidArgumentError(
            f"'{directory}' is a file. Give its directory, and the variant if it has one: what goes is a checkpoint.",
            path=directory,
        )
    if not os.path.isdir(directory):
        if _REPO_ID.fullmatch(given) and not given.startswith("."):
            raise CheckpointNotFoundError(
                f"There is no directory '{given}'. A repo of the Hub is removed by the Hub's own means: "
                f"hf repos delete {given}",
                path=directory,
            )
        raise directory_not_found(directory)
    hub = enclosing_hub(directory)
    if hub is not None:
        raise SaveDirectoryError(
            f"'{directory}' is in the directory hub '{hub}': its commits are removed with: "
            f"hfshard revisions {hub} --delete REVISION",
            path=directory,
        )
    if _CACHE.search(f"{directory}/"):
        raise SaveDirectoryError(
            f"'{directory}' is in the cache of huggingface_hub, which is cleared with: hf cache rm", path=directory
        )


def _checkpoint_on_disk(directory: str, names: WeightNames) -> Removal:
    if names.variant is None and is_checkpoint(directory):
        return remove_from_run(directory)
    try:
        return remove_from_directory(directory, names)
    except CheckpointNotFoundError:
        _refuse_run(directory)
        raise


def _leftovers_on_disk(directory: str, names: WeightNames) -> Removal:
    removals = [remove_leftovers_from_run(directory), remove_leftovers_from_directory(directory, names)]
    return joined(removals, directory)


def _checkpoint_in_store(address: str, names: WeightNames, *, unfinished: bool) -> Removal:
    store = open_store(address)
    if names.variant is None and (is_checkpoint(address) or _is_folder_of_run(store)):
        return remove_from_stored_run(store, unfinished=unfinished)
    try:
        return remove_from_store(store, names, unfinished=unfinished)
    except CheckpointNotFoundError:
        _refuse_run(address)
        raise


def _leftovers_in_store(address: str, names: WeightNames, *, unfinished: bool) -> Removal:
    store = open_store(address)
    if _is_folder_of_run(store) or (names.variant is None and is_checkpoint(address)):
        raise InvalidArgumentError(
            f"'{address}' is a checkpoint of a run: give the address of the run, whose folders are looked at together.",
            path=address,
        )
    removals = [remove_leftovers_from_store(store, names, unfinished=unfinished)]
    if store.list_objects(MARKS) or any(CHECKPOINT.fullmatch(folder) for folder in store.folders()):
        removals.insert(0, remove_leftovers_from_stored_run(address, unfinished=unfinished))
    return joined(removals, address)


def _is_folder_of_run(store: Store) -> bool:
    """Whether a place is a folder of a run, be there a manifest or not."""
    parent, _, name = store.address.prefix.rpartition("/")
    if CHECKPOINT.fullmatch(name) is None:
        return False
    return bool(open_store(replace(store.address, prefix=parent)).list_objects(MARKS))


def _refuse_run(place: str) -> None:
    """Refuse a run, of which one checkpoint is to be named.

    Raises:
        InvalidArgumentError: It is one.
    """
    if is_run(place):
        steps = [str(one.step) for one in run_place(place).checkpoints()]
        raise InvalidArgumentError(
            f"'{place}' is a run: choose one of its checkpoints by its step ({list_some(steps, _SHOWN)}), as in: "
            f"hfshard remove {place} --step {steps[-1]}",
            path=place,
        )
