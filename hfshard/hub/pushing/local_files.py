"""The files of a directory that is pushed: checked, with the hashes that the save made, and without strays."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator
from typing import Final

from huggingface_hub.utils import filter_repo_objects

from hfshard.constants import BIN_SUFFIX, SAFETENSORS_SUFFIX
from hfshard.errors import CheckpointNotFoundError, InvalidArgumentError
from hfshard.hub.pushing.plan import is_weights, variants_of
from hfshard.storage.checkpoint.checkpoint import OpenCheckpoint, open_checkpoint
from hfshard.storage.disk.byte_source import ByteSource, file_source
from hfshard.storage.format.index import CheckpointIndex, FileDigest
from hfshard.storage.format.names import WeightNames

logger = logging.getLogger(__name__)

_LEFT_OUT: Final = frozenset({".git", ".cache", "__pycache__"})
"""Folders that no upload takes: git's own, what huggingface_hub and hfshard keep beside the files, Python's."""

_JUNK: Final = frozenset({".DS_Store"})


def directory_contents(
    directory: str,
    *,
    names: Collection[str] | None = None,
    allow_patterns: list[str] | str | None = None,
    ignore_patterns: list[str] | str | None = None,
) -> tuple[dict[str, ByteSource], dict[str | None, CheckpointIndex]]:
    """Look at a directory that is to be pushed; every checkpoint in it is opened and checked in structure.

    Args:
        directory: What was saved, and what the user put beside it.
        names: Look at no other files. None: at all.
        allow_patterns, ignore_patterns: Globs of paths, as in huggingface_hub's `upload_folder`.

    Returns:
        Path in the directory -> contents, with the sha256 where the save recorded it; and variant -> index of the
        checkpoints.

    Raises:
        CheckpointNotFoundError: There is no checkpoint in it.
        InvalidArgumentError: The patterns leave out all weights, or a part of a checkpoint.
        DamagedCheckpointError, UnsafePathError, UnsafePickleError: One can't be loaded, so nobody should get it.
    """
    if not os.path.isdir(directory):
        raise CheckpointNotFoundError(f"There is no directory '{directory}'. Check the path.", path=directory)
    paths = [path for path in _paths(directory) if names is None or path in names]
    variants = variants_of(name for name in paths if "/" not in name)
    if not variants:
        with open_checkpoint(directory):  # for its error, or weights that config.json names
            variants = {None}
    indexes: dict[str | None, CheckpointIndex] = {}
    known: dict[str, str | None] = {}
    files_of: dict[str | None, set[str]] = {}
    for variant in sorted(variants, key=lambda name: name or ""):
        with open_checkpoint(directory, variant=variant) as checkpoint:
            indexes[variant] = checkpoint.index
            files_of[variant] = _files_of(checkpoint)
            known |= _known_hashes(checkpoint)
    wanted = set(filter_repo_objects(paths, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
    for variant, files in files_of.items():
        if wanted.isdisjoint(files):
            del indexes[variant]  # what the hub has of it stays
        elif lost := sorted(files - wanted):
            raise InvalidArgumentError(
                f"The patterns leave out '{lost[0]}', and the checkpoint in '{directory}' can't be loaded without it. "
                "Check allow_patterns and ignore_patterns.",
                path=directory,
            )
    used = {name for files in files_of.values() for name in files}
    strays = _strays(wanted, used, variants)
    for name in sorted(strays):
        logger.warning("'%s' in '%s' belongs to no checkpoint there: it is not pushed.", name, directory)
    if not any(path.endswith((SAFETENSORS_SUFFIX, BIN_SUFFIX)) for path in wanted - strays):
        raise InvalidArgumentError(
            f"The patterns leave no weights of '{directory}' to push. Check allow_patterns and ignore_patterns.",
            path=directory,
        )
    return {name: file_source(os.path.join(directory, name), known.get(name)) for name in wanted - strays}, indexes


def _known_hashes(checkpoint: OpenCheckpoint) -> dict[str, str | None]:
    """File -> sha256, as the save recorded it; files of which it recorded another checksum are read, and compared."""
    hashes: dict[str, str | None] = {}
    for name, shard in checkpoint.shards.items():
        record = checkpoint.index.files.get(name, FileDigest())
        hashes[name] = record.sha256
        if record.is_verifiable and (checkpoint.weights.kind == "single" or record.sha256 is None):
            hashes[name] = shard.checked_sha256(record)
    return hashes


def _paths(directory: str) -> Iterator[str]:
    for above, folders, files in os.walk(directory):
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT)
        for name in [*(one for one in folders if os.path.islink(os.path.join(above, one))), *sorted(files)]:
            path = os.path.join(above, name)
            if name in _JUNK:
                continue
            if os.path.isfile(path):
                yield _checked_name(os.path.relpath(path, directory), directory)
            else:
                logger.warning("'%s' is no file, but a pipe, or a link to nowhere or a folder: it is not pushed.", path)


def _checked_name(path: str, directory: str) -> str:
    try:
        path.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"The name of {path!r} in '{directory}' is no UTF-8, and a hub has no other names. Rename it.",
            path=directory,
        ) from error
    return path


def _files_of(checkpoint: OpenCheckpoint) -> set[str]:
    return {checkpoint.weights.name, *checkpoint.shards, *checkpoint.pickles}


def _strays(paths: Collection[str], used: Collection[str], variants: Collection[str | None]) -> set[str]:
    """Weights by convention that no checkpoint uses: what a killed save left, or what another one outranks."""
    families = [WeightNames(variant) for variant in variants]
    return {path for path in paths if path not in used and any(is_weights(path, names) for names in families)}
