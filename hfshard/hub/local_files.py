"""The files of a directory that is pushed: checked, with the hashes that the save made, and without strays."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator
from typing import Final

from huggingface_hub.utils import filter_repo_objects

from hfshard.constants import BIN_SUFFIX, SAFETENSORS_SUFFIX
from hfshard.errors import CheckpointNotFoundError, InvalidArgumentError
from hfshard.hub.push_plan import is_weights, variants_of
from hfshard.storage.checkpoint import OpenCheckpoint, open_checkpoint
from hfshard.storage.content import Content, file_content
from hfshard.storage.index import CheckpointIndex
from hfshard.storage.names import WeightNames

logger = logging.getLogger(__name__)

_LEFT_OUT: Final = frozenset({".git", ".cache", "__pycache__"})
"""Folders that no upload takes: git's own, what huggingface_hub and hfshard keep beside the files, Python's."""

_JUNK: Final = frozenset({".DS_Store"})


def directory_contents(
    directory: str, *, allow_patterns: list[str] | str | None = None, ignore_patterns: list[str] | str | None = None
) -> tuple[dict[str, Content], dict[str | None, CheckpointIndex]]:
    """Look at a directory that is to be pushed; every checkpoint in it is opened and checked in structure.

    Args:
        directory: What was saved, and what the user put beside it.
        allow_patterns, ignore_patterns: Globs of paths, as in huggingface_hub's `upload_folder`.

    Returns:
        Path in the directory -> contents, with the sha256 where the save recorded it; and variant -> index of the
        checkpoints.

    Raises:
        CheckpointNotFoundError: There is no checkpoint in it.
        DamagedCheckpointError, UnsafePathError, UnsafePickleError: One can't be loaded, so nobody should get it.
    """
    if not os.path.isdir(directory):
        raise CheckpointNotFoundError(f"There is no directory '{directory}'. Check the path.", path=directory)
    paths = list(_paths(directory))
    variants = variants_of(name for name in paths if "/" not in name)
    if not variants:
        with open_checkpoint(directory):  # for its error, or weights that config.json names
            variants = {None}
    indexes: dict[str | None, CheckpointIndex] = {}
    known: dict[str, str | None] = {}
    used: set[str] = set()
    for variant in sorted(variants, key=lambda name: name or ""):
        with open_checkpoint(directory, variant=variant) as checkpoint:
            indexes[variant] = checkpoint.index
            used |= _files_of(checkpoint)
            known |= {name: record.sha256 for name, record in checkpoint.index.files.items() if name in used}
            if checkpoint.located.kind == "single":
                known.pop(checkpoint.located.name, None)  # its checksum is not that of its bytes (see `integrity`)
    wanted = set(filter_repo_objects(paths, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
    strays = _strays(wanted, used, variants)
    for name in sorted(strays):
        logger.warning("'%s' in '%s' belongs to no checkpoint there: it is not pushed.", name, directory)
    if not any(path.endswith((SAFETENSORS_SUFFIX, BIN_SUFFIX)) for path in wanted - strays):
        raise InvalidArgumentError(
            f"The patterns leave no weights of '{directory}' to push. Check allow_patterns and ignore_patterns.",
            path=directory,
        )
    return {name: file_content(os.path.join(directory, name), known.get(name)) for name in wanted - strays}, indexes


def _paths(directory: str) -> Iterator[str]:
    for above, folders, files in os.walk(directory):
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT)
        for name in sorted(files):
            path = os.path.join(above, name)
            if name not in _JUNK and os.path.isfile(path):
                yield os.path.relpath(path, directory)


def _files_of(checkpoint: OpenCheckpoint) -> set[str]:
    return {checkpoint.located.name, *checkpoint.shards, *checkpoint.pickles}


def _strays(paths: Collection[str], used: Collection[str], variants: Collection[str | None]) -> set[str]:
    """Weights by convention that no checkpoint uses: what a killed save left, or what another one outranks."""
    families = [WeightNames(variant) for variant in variants]
    return {path for path in paths if path not in used and any(is_weights(path, names) for names in families)}
