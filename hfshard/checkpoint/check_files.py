"""Checks of an index against its files: every key is in its file, every file is the one that was saved."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Mapping

from hfshard._util.progress import ProgressCallback
from hfshard._util.threads import cancellable, run_in_threads
from hfshard.checkpoint.folder import Folder
from hfshard.constants import CONFIG_NAME, FILES_AT_ONCE, MAX_CONFIG_BYTES, MAX_INDEX_BYTES, SAFETENSORS_SUFFIX
from hfshard.errors import DamagedCheckpointError, HfshardError, IntegrityError
from hfshard.format.digests import sha256_of
from hfshard.format.file_names import INDEX_FILE
from hfshard.format.index import CheckpointIndex, FileDigest, without_commit_keys, without_commit_marker
from hfshard.pickles.pickle_file import PickleFile
from hfshard.shards.shard import SafetensorsShard
from hfshard.shards.shard_file import SafetensorsFile

logger = logging.getLogger(__name__)


def check_keys(weights_path: str, weight_map: Mapping[str, str], contents: Mapping[str, Collection[str]]) -> None:
    """Check that every key is in exactly the file that the index names.

    Args:
        weights_path: Path of the index.
        weight_map: Contents of the index: name -> file.
        contents: Contents of the files: file -> names.

    Raises:
        DamagedCheckpointError: A key is in two files, in a wrong one, in none, or not in the index.
    """
    directory = os.path.dirname(weights_path)
    seen: dict[str, str] = {}
    for file, names in contents.items():
        for name in names:
            if name not in seen and weight_map.get(name) == file:
                seen[name] = file
                continue
            path = os.path.join(directory, file)
            if name in seen:
                raise _key_error(path, name, f"is also in '{seen[name]}'")
            if name not in weight_map:
                raise _key_error(path, name, f"is not in the index '{weights_path}'")
            raise _key_error(path, name, f"should be in '{weight_map[name]}' according to the index '{weights_path}'")
    for name, file in weight_map.items() if len(seen) < len(weight_map) else ():
        if name not in seen:
            path = os.path.join(directory, file)
            raise _key_error(path, name, f"is missing, but the index '{weights_path}' lists it there")


def find_places(weight_map: Mapping[str, str], contents: Mapping[str, Collection[str]]) -> dict[str, str] | None:
    """Find the file of each key, for an index that `check_keys` has rejected but whose keys all exist.

    Args:
        weight_map, contents: The arguments of `check_keys`.

    Returns:
        Name -> file, for all keys of the files; None: a key is in no file, or in two, which may be of two saves.
    """
    found = {name: file for file, names in contents.items() for name in names}
    is_whole = len(found) == sum(map(len, contents.values())) and weight_map.keys() <= found.keys()
    return found if is_whole else None


def check_fingerprints(weights_path: str, index: CheckpointIndex, shards: Mapping[str, SafetensorsShard]) -> None:
    """Check the size and the fingerprint of every file, and the total size.

    The fingerprint of a file that is read by ranges is not checked, as it would take a request for each tensor.

    Raises:
        IntegrityError: A file is not the one that was saved.
        DamagedCheckpointError: The total is wrong.
    """
    for file, shard in shards.items():
        if file in index.files:
            is_local = isinstance(shard, SafetensorsFile)
            shard.check_size_and_fingerprint(index.files[file], with_fingerprint=is_local)
    check_total(weights_path, index, sum(shard.data_bytes for shard in shards.values()))


def check_total(weights_path: str, index: CheckpointIndex, actual: int) -> None:
    """Check that the tensors of all files add up to the total size in the index.

    Raises:
        DamagedCheckpointError: They do not.
    """
    # Other libraries count views and ties differently, so their totals are not compared.
    if index.files and index.total_size is not None and index.total_size != actual:
        raise DamagedCheckpointError(
            f"Index '{weights_path}' is damaged: its total_size is {index.total_size}, "
            f"but the shards contain {actual} bytes. "
            "Download or save the checkpoint again.",
            path=weights_path,
            expected=index.total_size,
            actual=actual,
        )


def check_checksums(
    folder: Folder,
    weights_path: str,
    index: CheckpointIndex,
    shards: Mapping[str, SafetensorsShard],
    progress_callback: ProgressCallback | None,
    cancelled: threading.Event | None = None,
) -> None:
    """Check every byte of every file against its checksum, several files at once.

    Args:
        folder: The folder of the files.
        weights_path: Path of the index or single file, for messages.
        index: The index, with the checksums.
        shards: The files, open.
        progress_callback: Called with the number of bytes of each block that was hashed.
        cancelled: Event that ends the check early, with an InterruptedError.

    Raises:
        DamagedCheckpointError: There are no checksums.
        IntegrityError: A file differs.
    """
    reject_unverifiable(weights_path, index, shards)
    run_in_threads(
        lambda file, cancelled: shards[file].check_contents(
            index.files[file], cancellable(progress_callback, cancelled), keep_cached=True
        ),
        sorted(shards, key=lambda file: -shards[file].size),
        FILES_AT_ONCE,
        cancelled=cancelled,
    )
    check_small_files(folder, index)


def check_small_files(folder: Folder, index: CheckpointIndex) -> None:
    """Compare config.json and generation_config.json with the digests recorded when they were saved.

    Raises:
        DamagedCheckpointError: One is missing, or differs.
    """
    for name, recorded in index.files.items():
        if name.endswith(".json"):
            check_small_file(folder, name, recorded)


def reject_unverifiable(weights_path: str, index: CheckpointIndex, shards: Mapping[str, SafetensorsShard]) -> None:
    """Reject a checkpoint that has no checksums.

    Raises:
        DamagedCheckpointError: A file has no checksum.
    """
    if not index.is_verifiable:
        lacking = sorted(file for file in shards if file not in index.files or not index.files[file].is_verifiable)
        of_which = f" for '{lacking[0]}'" if 0 < len(lacking) < len(shards) else "s"
        raise DamagedCheckpointError(
            f"'{weights_path}' cannot be verified in full: it has no checksum{of_which} (hfshard writes them). "
            "Load it with verify='structure', or save it once with hfshard.",
            path=weights_path,
        )


def check_pickle_checksums(
    pickles: Mapping[str, PickleFile], progress_callback: ProgressCallback | None = None
) -> list[str]:
    """Compare every byte of pickled files with the checksums of their zips, several files at once.

    Returns:
        The paths of the files that have no checksums.

    Raises:
        IntegrityError: A file differs.
    """
    files = list(pickles.values())
    compared = run_in_threads(
        lambda file, cancelled: file.check_every_byte(cancellable(progress_callback, cancelled)), files, FILES_AT_ONCE
    )
    return [file.path for file, is_compared in zip(files, compared, strict=True) if not is_compared]


def check_pickles(pickles: Mapping[str, PickleFile], progress_callback: ProgressCallback | None) -> None:
    """Check every byte of pickled files.

    Raises:
        DamagedCheckpointError: A file has no checksums.
        IntegrityError: A file differs.
    """
    lacking = check_pickle_checksums(pickles, progress_callback)
    if lacking:
        raise DamagedCheckpointError(
            f"'{lacking[0]}' cannot be verified in full: torch.save wrote no checksums into it. "
            "Load it with verify='structure', or save it once with hfshard.",
            path=lacking[0],
        )


def check_small_file(folder: Folder, name: str, recorded: FileDigest) -> None:
    """Compare config.json or generation_config.json with the digest recorded when it was saved.

    A variant shares these files with the weights next to it, and the last save of either writes them. So a digest that
    any checkpoint in the directory recorded is right for all of them.

    Raises:
        DamagedCheckpointError: It is missing (`MissingShardError`), or differs (`IntegrityError`).
    """
    path = os.path.join(folder.path, name)
    raw = folder.read_small(name, MAX_CONFIG_BYTES)
    found = sha256_of(without_commit_keys(raw) if name == CONFIG_NAME else without_commit_marker(raw))
    if recorded.sha256 not in (None, found) and found not in _recorded_by_others(folder, name):
        raise IntegrityError(
            f"'{path}' is not the file that was saved: its sha256 is {found}, but was {recorded.sha256}. "
            "If you edited it on purpose, load with verify='structure', or save again.",
            path=path,
            expected=recorded.sha256,
            actual=found,
        )


def _recorded_by_others(folder: Folder, name: str) -> set[str | None]:
    """Collect the sha256 values that a folder's checkpoints recorded for a small file; damaged ones are skipped."""
    found: set[str | None] = set()
    for file in folder.names():
        path = os.path.join(folder.path, file)
        try:
            if INDEX_FILE.fullmatch(file):
                raw = folder.read_small(file, MAX_INDEX_BYTES)
                found.add(CheckpointIndex.from_json(raw, path).files.get(name, FileDigest()).sha256)
            elif file.endswith(SAFETENSORS_SUFFIX):
                shard = folder.open_shards([file])[file]
                shard.close()
                found.add(shard.hfshard_metadata.files.get(name, FileDigest()).sha256)
        except HfshardError as error:
            logger.debug("The records in '%s' cannot be read: %s", path, error)
    return found


def _key_error(path: str, name: str, problem: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"Tensor '{name}' of shard '{path}' {problem}: the files belong to different saves, or are damaged. "
        f"Download or save the checkpoint again, or run 'hfshard verify {os.path.dirname(path)}'.",
        path=path,
        fqn=name,
    )
