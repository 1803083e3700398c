"""A checkpoint in a directory, opened for reading: checked as a whole, and all of one save."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from hfshard._util.progress import ProgressCallback
from hfshard._util.threads import cancellable, start_thread
from hfshard.constants import (
    CHANGED_RETRIES,
    CHANGED_WAIT_SECONDS,
    MAX_INDEX_BYTES,
    METADATA_KEY,
    SAFETENSORS_SUFFIX,
)
from hfshard.errors import CheckpointChangedError, HfshardError, InvalidArgumentError
from hfshard.storage.checkpoint.checks import check_checksums, check_fingerprints, check_keys, check_pickles
from hfshard.storage.checkpoint.locate import (
    WeightsEntry,
    checked_weights_override,
    find_weights,
    read_config,
    state_token,
)
from hfshard.storage.disk.safe_open import Identity, read_small
from hfshard.storage.format.index import CheckpointIndex, check_tied_names
from hfshard.storage.format.integrity import Verify as Verify
from hfshard.storage.format.integrity import check_verify_level as check_verify_level
from hfshard.storage.format.names import MODEL_BASE, WeightNames
from hfshard.storage.weights.pickles.pickle_file import PickleFile
from hfshard.storage.weights.safetensors_file import SafetensorsFile
from hfshard.storage.weights.tensor_reader import ReadMode, mode_of, read_from

FilesOf = Callable[[CheckpointIndex], Collection[str]]
"""Chooses the files that are needed, of those that an index names."""


@dataclass
class OpenCheckpoint:
    """A checkpoint whose files are open and checked.

    Attributes:
        directory: Where it is.
        weights: The file by which it was entered.
        index: Which file holds which tensor; for a single file, what the file says about itself.
        shards: File -> open safetensors file.
        pickles: File -> tensors of a pickled file.
    """

    directory: str
    names: WeightNames
    weights: WeightsEntry
    index: CheckpointIndex
    shards: dict[str, SafetensorsFile] = field(default_factory=dict)
    pickles: dict[str, PickleFile] = field(default_factory=dict)
    weights_override: str | None = None
    """The weights file that config.json names, if it names one."""
    state_token: tuple[Identity | None, ...] = ()
    """The identities of the files by which a replaced checkpoint is noticed."""
    check: Future[None] | None = None
    """The check of every byte that is under way in another thread, if one is."""

    @property
    def weights_path(self) -> str:
        """The path of the file by which it was entered."""
        return os.path.join(self.directory, self.weights.name)

    @property
    def keys(self) -> list[str]:
        """FQNs of the stored tensors, in the order of the files and of the bytes in them."""
        stored = [name for shard in self.shards.values() for name in shard.header.tensors]
        return stored + [name for pickled in self.pickles.values() for name in pickled.tensors]

    def read(
        self, names: Collection[str], read: ReadMode = "auto", device: str | torch.device = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Read stored tensors, in the order of the names (see `tensor_reader.read_from`).

        Where they are not mapped, this waits for a check that is under way: no byte is read from the disk twice.

        Raises:
            IntegrityError: That check found a file damaged.
        """
        device, wanted = torch.device(device), set(names)
        held = [(shard, [name for name in shard.header.tensors if name in wanted]) for shard in self.shards.values()]
        read = mode_of(held, read, device)
        if self.check is not None and (read != "mmap" or device.type != "cpu"):
            self.check.result()
        tensors = read_from(held, read, device, ahead=self.check is None)
        for pickled in self.pickles.values():
            tensors |= {name: tensor.to(device) for name, tensor in pickled.tensors.items() if name in wanted}
        return {name: tensors[name] for name in names}

    def is_unchanged(self) -> bool:
        """Whether the directory still holds this checkpoint."""
        return self.state_token == state_token(self.directory, self.names, self.weights_override)

    def close(self) -> None:
        """Close all files; mapped tensors stay valid."""
        for shard in self.shards.values():
            shard.close()


@contextmanager
def open_checkpoint(
    directory: str,
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
) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint: its structure is checked, and with verify="full" every byte.

    If a save replaces it meanwhile, it is opened again, until all its files belong to one save.

    Args:
        directory: Where it is.
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

    Raises:
        CheckpointNotFoundError: There are no weights.
        InvalidArgumentError: `key` does not say which weights of a pickle; or it is no single pickle.
        CheckpointChangedError: It kept changing.
        DamagedCheckpointError, UnsafePathError, UnsafePickleError: Something is wrong with a file.
    """
    check_verify_level(verify)
    names = WeightNames(variant, base)
    checkpoint = _open_until_whole(directory, names, use_safetensors, verify, files_of, weights_name, key)
    try:
        if verify not in ("full", "sha256"):
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
        check_checksums(checkpoint.weights_path, checkpoint.index, checkpoint.shards, progress_callback, cancelled)


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
            checking.result()  # damage is the cause of what it brings about
            raise
        checking.result()
    finally:
        cancelled.set()  # Ctrl-C
        wait([checking])


def _open_until_whole(
    directory: str,
    names: WeightNames,
    use_safetensors: bool | None,
    verify: Verify,
    files_of: FilesOf | None,
    weights_name: str | None,
    key: str | None,
) -> OpenCheckpoint:
    last: HfshardError | None = None
    for _ in range(CHANGED_RETRIES):
        weights_override = weights_name
        before = state_token(directory, names, weights_override)
        try:
            weights_override = weights_name or checked_weights_override(read_config(directory), directory, names)
            if weights_override != weights_name:
                before = (*before, *state_token(directory, names, weights_override)[len(before) :])
            weights = find_weights(directory, names, use_safetensors, weights_override)
            checkpoint = _open_once(directory, names, weights, verify, files_of, key)
        except HfshardError as error:
            if before == state_token(directory, names, weights_override):
                raise
            last = error
        else:
            checkpoint.weights_override, checkpoint.state_token = weights_override, before
            if checkpoint.is_unchanged():
                return checkpoint
            checkpoint.close()
        time.sleep(CHANGED_WAIT_SECONDS)
    raise CheckpointChangedError(
        f"The checkpoint in '{directory}' was replaced {CHANGED_RETRIES} times while it was being opened. "
        "Load it when that process has finished saving.",
        path=directory,
    ) from last


def _open_once(
    directory: str,
    names: WeightNames,
    weights: WeightsEntry,
    verify: Verify,
    files_of: FilesOf | None,
    key: str | None,
) -> OpenCheckpoint:
    path = os.path.join(directory, weights.name)
    if weights.kind == "bin":
        pickled = PickleFile(path, directory, key)
        index = CheckpointIndex(weight_map=dict.fromkeys(pickled.tensors, weights.name))
        return OpenCheckpoint(directory, names, weights, index, pickles={weights.name: pickled})
    if key is not None:
        raise InvalidArgumentError(
            f"'{path}' has no key={key!r:.200}: only what torch.save wrote into one file has keys. Leave it out.",
            path=path,
        )
    if weights.kind == "single":
        checkpoint = _open_single(directory, names, weights)
    else:
        raw, _ = read_small(path, directory, MAX_INDEX_BYTES)
        checkpoint = OpenCheckpoint(directory, names, weights, CheckpointIndex.from_json(raw, path))
    try:
        if weights.kind != "single":
            _open_files(checkpoint, files_of)
        if verify != "none":
            is_part = weights.kind != "single" and files_of is not None
            index = replace(checkpoint.index, total_size=None) if is_part else checkpoint.index
            check_fingerprints(checkpoint.weights_path, index, checkpoint.shards)
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def _open_files(checkpoint: OpenCheckpoint, files_of: FilesOf | None) -> None:
    index = checkpoint.index
    directory = checkpoint.directory
    weight_map = index.weight_map
    wanted = {name for name in index.files if name.endswith(SAFETENSORS_SUFFIX)} | set(weight_map.values())
    if files_of is not None:
        wanted &= set(files_of(index))
        weight_map = {name: file for name, file in weight_map.items() if file in wanted}
    real_directory = os.path.realpath(directory)
    for file in sorted(wanted):
        path = os.path.join(directory, file)
        if checkpoint.weights.kind == "index":
            checkpoint.shards[file] = SafetensorsFile(path, directory, real_directory)
        else:
            checkpoint.pickles[file] = PickleFile(path, directory)
    contents = {file: list(shard.header.tensors) for file, shard in checkpoint.shards.items()}
    contents |= {file: list(pickled.tensors) for file, pickled in checkpoint.pickles.items()}
    check_keys(checkpoint.weights_path, weight_map, contents)


def _open_single(directory: str, names: WeightNames, weights: WeightsEntry) -> OpenCheckpoint:
    shard = SafetensorsFile(os.path.join(directory, weights.name), directory)
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
    return OpenCheckpoint(directory, names, weights, index, shards={weights.name: shard})
