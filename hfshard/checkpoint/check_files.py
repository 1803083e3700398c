"""Comparison of files with the records of a save: every file is the saved one, every key is in its file."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from hfshard._util.progress import ProgressCallback
from hfshard._util.threads import cancellable, run_in_threads
from hfshard.checkpoint.folder import Folder, Traits
from hfshard.constants import CONFIG_NAME, FILES_AT_ONCE, MAX_CONFIG_BYTES, MAX_INDEX_BYTES, SAFETENSORS_SUFFIX
from hfshard.disk.byte_source import sha256_of_reader
from hfshard.errors import (
    CheckpointChangedError,
    DamagedCheckpointError,
    HfshardError,
    IntegrityError,
    UnsafePathError,
    not_as_saved,
    repair_hint,
)
from hfshard.format.file_names import INDEX_FILE
from hfshard.format.index import (
    FULL,
    CheckpointIndex,
    FileDigest,
    sha256_of,
    without_commit_keys,
    without_commit_marker,
)
from hfshard.pickles.pickle_file import PickleFile
from hfshard.shards.shard import SafetensorsShard
from hfshard.shards.shard_file import SafetensorsFile

logger = logging.getLogger(__name__)


_Result = TypeVar("_Result")

OnProblem = Callable[[DamagedCheckpointError], object]
"""Function that gets the error of each damaged file."""


def check_files(
    folder: Folder,
    records: Mapping[str, FileDigest],
    level: str,
    *,
    progress_callback: ProgressCallback | None = None,
    on_problem: OnProblem | None = None,
) -> None:
    """Compare files with what was recorded of them, the largest first, several at once.

    Args:
        folder: The folder of the files.
        records: File -> record, such as those of a run's manifest.
        level: "structure" or "full"; see `compare_file`.
        progress_callback: Called from any thread with the number of bytes of each block that was hashed.
        on_problem: Gets the error of each damaged file; None: the first one is raised.

    Raises:
        DamagedCheckpointError: A file is missing, or differs from the saved one.
        CheckpointChangedError, StoreError: In a store, a file was replaced meanwhile, or a request failed.
    """

    def compare_one(name: str, cancelled: threading.Event) -> None:
        with _reporting(on_problem):
            compare_file(folder, name, records[name], level, cancellable(progress_callback, cancelled))

    with _reporting(on_problem):
        if not folder.traits.is_directory:
            folder.names()  # reads the index of a save in a store once, before several threads request it
        run_in_threads(compare_one, sorted(records, key=lambda name: -(records[name].size or 0)), FILES_AT_ONCE)


@contextmanager
def _reporting(on_problem: OnProblem | None) -> Iterator[None]:
    """Report damage to `on_problem`, if it is given; a path that leads elsewhere is damage, too."""
    try:
        yield
    except UnsafePathError as error:
        problem = DamagedCheckpointError(error.message, path=error.path, actual=error.actual)
        if on_problem is None:
            raise problem from error
        on_problem(problem)
    except DamagedCheckpointError as error:
        if on_problem is None:
            raise
        on_problem(error)


def compare_file(
    folder: Folder, name: str, record: FileDigest, level: str, progress_callback: ProgressCallback | None = None
) -> None:
    """Compare one file with its record.

    Small files are always read. Of weights, "structure" compares the size and, in a directory, the fingerprint; "full"
    compares every byte, and also what a file states of itself.

    Raises:
        DamagedCheckpointError, UnsafePathError: It is missing, or differs from the saved one.
    """
    if not folder.traits.is_directory:  # by the listing, without a request
        _compare_size(folder, name, record)
    if not name.endswith(SAFETENSORS_SUFFIX):
        _compare_contents(folder, name, record)
    elif folder.traits.is_directory or level in FULL:
        shard = folder.open_shard(name)
        try:
            compare_shard(shard, record, level, progress_callback, keep_cached=True, stated=True)
        finally:
            shard.close()


def compare_shard(
    shard: SafetensorsShard,
    record: FileDigest,
    level: str,
    progress_callback: ProgressCallback | None = None,
    *,
    keep_cached: bool = False,
    stated: bool = False,
) -> None:
    """Compare an open file with its record: size and fingerprint; with "full", every byte.

    The fingerprint of a file that is read by ranges is not compared, as it would take a request for each tensor.

    Args:
        shard: The file.
        record: Its record.
        level: "structure" or "full".
        progress_callback: Called with the number of bytes of each block that was hashed.
        keep_cached: Whether to leave the file in the page cache, because its tensors will be read.
        stated: Whether the record is not what the file states of itself, so that the two are compared, too.

    Raises:
        IntegrityError: It is not the file that was saved.
    """
    shard.check_size_and_fingerprint(record, with_fingerprint=isinstance(shard, SafetensorsFile))
    if stated:
        _compare_stated_digests(shard, record)
    if level in FULL:
        shard.check_contents(record, progress_callback, keep_cached=keep_cached)


def _compare_stated_digests(shard: SafetensorsShard, record: FileDigest) -> None:
    """Compare the digests that a single file states itself: its checksum excludes them, and readers rely on them."""
    for kind in ("fingerprint", "xxh3", "sha256"):
        stated = getattr(shard.hfshard_metadata.digests, kind)
        expected = getattr(record, kind)
        if stated is not None and stated != expected:
            raise IntegrityError(
                f"'{shard.path}' is not the file that was saved: it states the {kind} {stated}, but {expected} was "
                f"recorded. {repair_hint(shard.path)}",
                path=shard.path,
                expected=expected,
                actual=stated,
            )


def _compare_size(folder: Folder, name: str, record: FileDigest) -> None:
    found = folder.find(name)
    size = None if found is None else found.size
    if size != record.size:
        path = folder.path_of(name)
        what = "missing" if size is None else f"of {size} bytes"
        raise IntegrityError(
            f"'{path}' is {what}, but {record.size} bytes were saved. {repair_hint(path)}",
            path=path,
            expected=record.size,
            actual=size,
        )


def _compare_contents(folder: Folder, name: str, record: FileDigest) -> None:
    with folder.open(name) as reader:  # of any size, and not always text: a tokenizer's model
        size = reader.seek(0, os.SEEK_END)
        reader.seek(0)
        found = sha256_of_reader(reader) if size == record.size else f"that of a {size}-byte file"
    if found != record.sha256:
        path = folder.path_of(name)
        raise not_as_saved(path, "sha256", found, record.sha256)


# Readers that start again if a save replaces what they read.


class ReplacedMeanwhile(Exception):
    """Signal of work that has read files of two saves, and must start again; its cause is an error, if there is one."""


def retry_if_replaced(work: Callable[[], _Result], traits: Traits, path: str, too_often: str | None = None) -> _Result:
    """Call `work` until no save has replaced the checkpoint meanwhile, at most `traits.retries` times.

    It starts again after a `ReplacedMeanwhile`. In a place that is read by ranges it also does after a
    CheckpointChangedError, unless other attempts came before it; in a directory, open files stay what they are, so that
    this error is about a file that was overwritten in place.

    Args:
        work: Opens and reads the checkpoint, from the beginning.
        traits: Traits of the checkpoint's folder.
        path: The checkpoint, for the message.
        too_often: The message if it was replaced on every attempt; None: one that fits all.

    Raises:
        CheckpointChangedError: It was replaced on every attempt.
        Everything that `work` raises.
    """
    cause: BaseException | None = None
    for attempt in range(traits.retries):
        if attempt:
            time.sleep(traits.wait_seconds)
        try:
            return work()
        except ReplacedMeanwhile as signal:
            cause = signal.__cause__
        except CheckpointChangedError as error:
            if traits.is_directory or error.is_final or attempt == traits.retries - 1:
                error.is_final = True
                raise
            logger.info("%s Starting again.", error)
    usual = f"The checkpoint in '{path}' was replaced on every attempt. Retry when no save is running."
    last = CheckpointChangedError(usual if too_often is None else too_often, path=path)
    last.is_final = True
    raise last from cause


# Checks of an index: its keys are in its files, and the open files are the saved ones.


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
    """Check the size and the fingerprint of every file, as `compare_shard` does, and the total size.

    Raises:
        IntegrityError: A file is not the one that was saved.
        DamagedCheckpointError: The total is wrong.
    """
    for file, shard in shards.items():
        if file in index.files:
            compare_shard(shard, index.files[file], "structure")
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
        hint = "If you edited it on purpose, load with verify='structure', or save again."
        raise not_as_saved(path, "sha256", found, recorded.sha256, hint=hint)


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
                shard = folder.open_shard(file)
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
