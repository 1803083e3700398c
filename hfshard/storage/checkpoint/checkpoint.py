"""A checkpoint in a directory, or far away, opened for reading: checked as a whole, and all of one save."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

from hfshard._util.progress import ProgressCallback
from hfshard._util.threads import cancellable, result_of, start_thread, wait_for
from hfshard.constants import MAX_INDEX_BYTES, METADATA_KEY, SAFETENSORS_SUFFIX
from hfshard.errors import CheckpointChangedError, DamagedCheckpointError, HfshardError, InvalidArgumentError
from hfshard.format.digests import Verify as Verify
from hfshard.format.digests import check_verify_level as check_verify_level
from hfshard.format.file_names import MODEL_BASE, WeightNames
from hfshard.format.index import CheckpointIndex, FileDigest, check_tied_names
from hfshard.shards.ranged_shard import RangedShard
from hfshard.storage.checkpoint.checks import (
    check_checksums,
    check_fingerprints,
    check_keys,
    check_pickles,
    check_small_files,
    find_places,
    refuse_unverifiable,
)
from hfshard.storage.checkpoint.folder import CheckpointFolder, folder_of
from hfshard.storage.checkpoint.locate import (
    WeightsEntry,
    adapter_alone,
    checked_weights_override,
    config_in,
    find_weights,
    state_token,
)
from hfshard.storage.checkpoint.open_files import OpenCheckpoint as OpenCheckpoint

FilesOf = Callable[[CheckpointIndex], Collection[str]]
"""Chooses the files that are needed, of those that an index names."""

WhenOpen = Callable[[OpenCheckpoint], None]
"""Reads what else belongs to a checkpoint; a CheckpointChangedError of it has all of it opened again."""

_FULL: Final = ("full", "sha256")


@contextmanager
def open_checkpoint(
    directory: str | CheckpointFolder,
    *,
    variant: str | None = None,
    use_safetensors: bool | None = None,
    verify: Verify = "structure",
    progress_callback: ProgressCallback | None = None,
    files_of: FilesOf | None = None,
    base: str = MODEL_BASE,
    weights_name: str | None = None,
    check_beside: bool = False,
    key: str | None = None,
    when_open: WhenOpen | None = None,
    keeps_index: bool = False,
    opens_adapter: bool = False,
) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint: its structure is checked, and with verify="full" every byte.

    If a save replaces it meanwhile, it is opened again, until all its files belong to one save.

    Args:
        directory: Where it is: the path of a directory, or a folder.
        variant: Which variant; see `from_pretrained`.
        use_safetensors: None: safetensors before pickles; True: only them; False: only pickles.
        verify: "none": only what reading needs; "structure": sizes, fingerprints and the total too; "full" (or
            "sha256"): the checksums of all files too.
        progress_callback: Called from any thread with numbers of bytes that were checked.
        files_of: Chooses which files of an index to open and check; the others may be missing.
        base: The beginning of the names of its files.
        weights_name: The index or single file to open, whatever else lies there. None: the one that transformers finds.
        check_beside: Compare the checksums while the block runs, not before it: what is damaged is raised at its end,
            also in place of an error of its own. For a block that keeps nothing of what it read if that happens.
        key: Of a single pickle: the key of the weights in it, as for `choose_weights`.
        when_open: Called with what was opened, before it is sure that all of it is of one save; again where it is not.
        keeps_index: Keep the bytes of the index, for `raw_index`.
        opens_adapter: Open the weights of an adapter where there is no model.

    Raises:
        CheckpointNotFoundError: There are no weights.
        InvalidArgumentError: `key` does not say which weights of a pickle; or it is no single pickle.
        CheckpointChangedError: It kept changing.
        DamagedCheckpointError, UnsafePathError, UnsafePickleError: Something is wrong with a file.
    """
    check_verify_level(verify)
    names = WeightNames(variant, base)
    folder = folder_of(directory)

    def finish(opened: OpenCheckpoint) -> None:
        if verify in _FULL and opened.is_ranged:  # the weights are compared while they are read: no byte comes twice
            refuse_unverifiable(opened.weights_path, opened.index, opened.shards)
            check_small_files(folder, opened.index)
        if when_open is not None:
            when_open(opened)

    open_once = partial(
        _open_once, folder, names, verify=verify, files_of=files_of, key=key, finish=finish, keeps_index=keeps_index
    )
    find_name = partial(_name_in, folder, names, weights_name, opens_adapter=opens_adapter)
    checkpoint = _open_until_whole(folder, names, use_safetensors, weights_name, find_name, open_once)
    checkpoint.level = verify
    try:
        if verify not in _FULL or checkpoint.is_ranged:
            yield checkpoint
        elif check_beside:
            with _checked_beside(checkpoint, progress_callback):
                yield checkpoint
        else:
            _check_contents(checkpoint, progress_callback, threading.Event())
            yield checkpoint
    finally:
        checkpoint.close()


def _check_contents(
    checkpoint: OpenCheckpoint, progress_callback: ProgressCallback | None, cancelled: threading.Event
) -> None:
    if checkpoint.pickles:
        check_pickles(checkpoint.pickles, cancellable(progress_callback, cancelled))
    else:
        path, index, shards = checkpoint.weights_path, checkpoint.index, checkpoint.shards
        check_checksums(checkpoint.folder, path, index, shards, progress_callback, cancelled)


@contextmanager
def _checked_beside(checkpoint: OpenCheckpoint, progress_callback: ProgressCallback | None) -> Iterator[None]:
    """Compare every byte in another thread while the block runs; what is found is raised at its end."""
    cancelled = threading.Event()
    checking = start_thread(partial(_check_contents, checkpoint, progress_callback, cancelled), "hfshard-check")
    if checking is None:
        _check_contents(checkpoint, progress_callback, cancelled)
        yield
        return
    checkpoint.check = checking
    try:
        try:
            yield
        except Exception:
            result_of(checking)  # damage is the cause of what it brings about
            raise
        result_of(checking)
    finally:
        cancelled.set()  # Ctrl-C
        wait_for([checking])


def _open_until_whole(
    folder: CheckpointFolder,
    names: WeightNames,
    use_safetensors: bool | None,
    weights_name: str | None,
    find_name: Callable[[], str | None],
    open_once: Callable[[WeightsEntry], OpenCheckpoint],
) -> OpenCheckpoint:
    last: HfshardError | None = None
    for _ in range(folder.most_tries):
        weights_override = weights_name
        folder.look()
        if weights_name is None:
            folder.enter(names)
        before = _token(folder, names, weights_override)
        try:
            weights_override = find_name()
            if weights_override != weights_name:
                before = (*before, *state_token(folder, names, weights_override)[len(before) :])
            weights = find_weights(folder, names, use_safetensors, weights_override)
            checkpoint = open_once(weights)
        except HfshardError as error:
            folder.look()
            is_unchanged = before == _token(folder, names, weights_override)
            if is_unchanged and not isinstance(error, CheckpointChangedError):
                raise
            last = error
        else:
            checkpoint.weights_override, checkpoint.state_token = weights_override, before
            if checkpoint.is_of_one_save():
                return checkpoint
            checkpoint.close()
        time.sleep(folder.wait_seconds)
    raise CheckpointChangedError(
        f"The checkpoint in '{folder.path}' was replaced {folder.most_tries} times while it was being opened. "
        "Load it when that process has finished saving.",
        path=folder.path,
    ) from last


def _token(folder: CheckpointFolder, names: WeightNames, weights_override: str | None) -> tuple[Hashable, ...]:
    """Return what `state_token` does; of the index of a save that can't be read, what is wrong with it."""
    try:
        return state_token(folder, names, weights_override)
    except CheckpointChangedError:
        return (object(),)  # which nothing is equal to
    except HfshardError as error:
        return (error.message,)


def _name_in(folder: CheckpointFolder, names: WeightNames, given: str | None, *, opens_adapter: bool) -> str | None:
    """The file to open, whatever else lies there; None: the one that transformers finds."""
    found = given or checked_weights_override(config_in(folder), folder.path, names, folder.pass_over)
    return adapter_alone(folder, names) if found is None and opens_adapter else found


def _open_once(
    folder: CheckpointFolder,
    names: WeightNames,
    weights: WeightsEntry,
    *,
    verify: Verify,
    files_of: FilesOf | None,
    key: str | None,
    finish: WhenOpen,
    keeps_index: bool,
) -> OpenCheckpoint:
    path = os.path.join(folder.path, weights.name)
    if weights.kind == "bin":
        pickled = folder.open_pickle(weights.name, key)
        index = CheckpointIndex(weight_map=dict.fromkeys(pickled.tensors, weights.name))
        checkpoint = OpenCheckpoint(folder, names, weights, index, pickles={weights.name: pickled})
        finish(checkpoint)
        return checkpoint
    if key is not None:
        raise InvalidArgumentError(
            f"'{path}' has no key={key!r:.200}: only what torch.save wrote into one file has keys. Leave it out.",
            path=path,
        )
    if weights.kind == "single":
        checkpoint = _open_single(folder, names, weights)
    else:
        raw = folder.read_small(weights.name, MAX_INDEX_BYTES)
        checkpoint = OpenCheckpoint(folder, names, weights, CheckpointIndex.from_json(raw, path, folder.pass_over))
        checkpoint.raw_index = raw if keeps_index else None
    try:
        if weights.kind != "single":
            _open_files(checkpoint, files_of)
        for file, shard in checkpoint.shards.items():
            if isinstance(shard, RangedShard):
                shard.recorded = checkpoint.index.files.get(file, FileDigest())
        if verify != "none":
            is_part = weights.kind != "single" and files_of is not None
            index = replace(checkpoint.index, total_size=None) if is_part else checkpoint.index
            check_fingerprints(checkpoint.weights_path, index, checkpoint.shards)
        finish(checkpoint)
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def _open_files(checkpoint: OpenCheckpoint, files_of: FilesOf | None) -> None:
    index = checkpoint.index
    weight_map = index.weight_map
    wanted = {name for name in index.files if name.endswith(SAFETENSORS_SUFFIX)} | set(weight_map.values())
    if files_of is not None:
        wanted &= set(files_of(index))
        weight_map = {name: file for name, file in weight_map.items() if file in wanted}
    if checkpoint.weights.kind == "index":
        checkpoint.shards = checkpoint.folder.open_shards(sorted(wanted))
    else:
        checkpoint.pickles = {file: checkpoint.folder.open_pickle(file, None) for file in sorted(wanted)}
    contents = {file: list(shard.header.tensors) for file, shard in checkpoint.shards.items()}
    contents |= {file: list(pickled.tensors) for file, pickled in checkpoint.pickles.items()}
    try:
        check_keys(checkpoint.weights_path, weight_map, contents)
    except DamagedCheckpointError as error:
        found = None if index.files or files_of is not None else find_places(weight_map, contents)
        if found is None:
            raise
        checkpoint.folder.pass_over(error)
        checkpoint.index = replace(index, weight_map=found)


def _open_single(folder: CheckpointFolder, names: WeightNames, weights: WeightsEntry) -> OpenCheckpoint:
    shard = folder.open_shards([weights.name])[weights.name]
    try:
        tensors = shard.header.tensors
        metadata = shard.hfshard_metadata
        check_tied_names(metadata.tied_names, tensors, shard.path)
        index = CheckpointIndex(
            weight_map=dict.fromkeys(tensors, weights.name),
            total_size=shard.data_bytes,
            metadata={
                key: value
                for key, value in shard.header.metadata.items()
                if key != METADATA_KEY and key not in metadata.tied_names
            },
            files={**metadata.files, weights.name: metadata.digests}
            if metadata.digests.fingerprint is not None
            else {},
            tied_names=metadata.tied_names,
            undeclared_ties=metadata.undeclared_ties,
        )
    except BaseException:
        shard.close()
        raise
    return OpenCheckpoint(folder, names, weights, index, shards={weights.name: shard})
