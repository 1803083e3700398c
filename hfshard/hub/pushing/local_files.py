"""Collects the files that are pushed from one place: checked, with the hashes of the save, and without leftovers."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, Protocol

from huggingface_hub.utils import filter_repo_objects

from hfshard.checkpoint.locate import directory_not_found
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint, open_checkpoint
from hfshard.constants import BIN_SUFFIX, SAFETENSORS_SUFFIX
from hfshard.disk.byte_source import ByteSource, file_source
from hfshard.disk.safe_open import refuse_links_to_outside
from hfshard.errors import InvalidArgumentError
from hfshard.format.file_names import WeightNames
from hfshard.format.index import CheckpointIndex, FileDigest
from hfshard.hub.pushing.plan import is_weights, variants_of
from hfshard.hub.repo_tree import is_plain_path

logger = logging.getLogger(__name__)

_LEFT_OUT: Final = frozenset({".git", ".cache", "__pycache__"})
"""Folders that are never pushed: git's, those that huggingface_hub and hfshard keep, and Python's."""

_LINKS: Final = (
    "the directory that is pushed. Pass follow_links=True (hfshard push --follow-links) to push what is there, or "
    "leave them out by ignore_patterns."
)
"""Links in a message."""

_JUNK: Final = frozenset({".DS_Store", ".git"})
"""Files that are never pushed; `.git` is one in the worktrees and submodules of git."""


def directory_contents(
    directory: str,
    *,
    names: Collection[str] | None = None,
    allow_patterns: list[str] | str | None = None,
    ignore_patterns: list[str] | str | None = None,
    follow_links: bool = False,
) -> tuple[dict[str, ByteSource], dict[str | None, CheckpointIndex]]:
    """Collect the files of a directory that is to be pushed; the structure of every checkpoint in it is checked.

    Args:
        directory: Saved checkpoints, and whatever the user put beside them.
        names: The only files to look at. None: all files.
        allow_patterns, ignore_patterns: Globs of paths, as in huggingface_hub's `upload_folder`.
        follow_links: Whether links may lead out of the directory. Those of a snapshot in the Hub's cache always may.

    Returns:
        Path in the directory -> contents, with the sha256 where the save recorded it; and the checkpoints' indexes by
        variant.

    Raises:
        CheckpointNotFoundError: The directory holds no checkpoint.
        InvalidArgumentError: The patterns leave out all weights, or a part of a checkpoint; or a link leaves the
            directory, or a name has a backslash or what can't be printed.
        DamagedCheckpointError, UnsafePathError, UnsafePickleError: A checkpoint can't be loaded.
    """
    found = contents_of(
        DirectoryFiles(directory, names, follow_links=follow_links),
        allow_patterns=allow_patterns,
        ignore_patterns=ignore_patterns,
    )
    return found.contents, found.indexes


class FilesOfPlace(Protocol):
    """The files below one place, as far as they may be pushed."""

    @property
    def place(self) -> str:
        """Where they are, for messages."""

    def paths(self) -> list[str]:
        """The files' paths below the place."""

    def sizes(self) -> dict[str, int]:
        """Path -> bytes."""

    def open_variant(self, variant: str | None) -> AbstractContextManager[OpenCheckpoint]:
        """Open the checkpoint of a variant, its structure checked."""

    def check(self, paths: Collection[str]) -> None:
        """Raise where one of these files may not be pushed."""

    def content(self, path: str, sha256: str | None) -> ByteSource:
        """The contents of a file, and their hash if it is known."""


@dataclass(frozen=True, slots=True)
class PushedContents:
    """The files of a place that are pushed, and the checkpoints that they make."""

    contents: dict[str, ByteSource]
    """Path below the place -> contents, with the sha256 where the save recorded it."""
    indexes: dict[str | None, CheckpointIndex]
    """By variant."""
    entries: dict[str | None, str]
    """The file by which each variant is entered."""


def contents_of(
    files: FilesOfPlace,
    *,
    allow_patterns: list[str] | str | None = None,
    ignore_patterns: list[str] | str | None = None,
) -> PushedContents:
    """Collect the files of any place, as `directory_contents` does, which raises the same."""
    place = files.place
    paths = files.paths()
    variants = variants_of(name for name in paths if "/" not in name)
    if not variants:
        with files.open_variant(None):  # for its error, or weights that config.json names
            variants = {None}
    indexes: dict[str | None, CheckpointIndex] = {}
    entries: dict[str | None, str] = {}
    known: dict[str, str | None] = {}
    files_of: dict[str | None, set[str]] = {}
    for variant in sorted(variants, key=lambda name: name or ""):
        with files.open_variant(variant) as checkpoint:
            indexes[variant] = checkpoint.index
            entries[variant] = checkpoint.weights.name
            files_of[variant] = _files_of(checkpoint)
            known |= _known_hashes(checkpoint)
    selected = set(filter_repo_objects(paths, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
    for variant in [variant for variant, held in files_of.items() if not _is_selected(held, selected, place)]:
        del indexes[variant], entries[variant]  # the hub keeps what it has of this one
    used = {name for held in files_of.values() for name in held}
    leftovers = _leftovers(selected, used, variants)
    for name in sorted(leftovers):
        logger.warning("'%s' in '%s' belongs to no checkpoint there: it is not pushed.", name, place)
    if not any(path.endswith((SAFETENSORS_SUFFIX, BIN_SUFFIX)) for path in selected - leftovers):
        raise InvalidArgumentError(
            f"The patterns leave no weights of '{place}' to push. Check allow_patterns and ignore_patterns.",
            path=place,
        )
    files.check(selected - leftovers)
    return PushedContents(
        {name: files.content(name, known.get(name)) for name in selected - leftovers}, indexes, entries
    )


class DirectoryFiles:
    """The files of a directory.

    Args:
        place: The directory.
        names: As in `directory_contents`, and so is follow_links.
    """

    def __init__(self, place: str, names: Collection[str] | None = None, *, follow_links: bool = False) -> None:
        self.place = place
        self._names = names
        self._follow_links = follow_links

    def paths(self) -> list[str]:
        """All files; but for folders that are never pushed, pipes and broken links.

        Raises:
            CheckpointNotFoundError: There is no such directory.
        """
        if not os.path.isdir(self.place):
            raise directory_not_found(self.place)
        return [path for path in _paths(self.place) if self._names is None or path in self._names]

    def sizes(self) -> dict[str, int]:
        """Path -> bytes."""
        return {path: os.path.getsize(os.path.join(self.place, path)) for path in self.paths()}

    def open_variant(self, variant: str | None) -> AbstractContextManager[OpenCheckpoint]:
        """Open the checkpoint of a variant."""
        return open_checkpoint(self.place, variant=variant)

    def check(self, paths: Collection[str]) -> None:
        """Refuse names that no pull takes, and links that leave the directory, unless they are to be followed."""
        _refuse_names(self.place, paths)
        if not self._follow_links:
            refuse_links_to_outside(self.place, paths, _LINKS)

    def content(self, path: str, sha256: str | None) -> ByteSource:
        """A file on the disk."""
        return file_source(os.path.join(self.place, path), sha256)


def _refuse_names(directory: str, names: Collection[str]) -> None:
    """Refuse names that a system would take for other paths, or that can't be shown."""
    name = next((name for name in sorted(names) if not is_plain_path(name)), None)
    if name is not None:
        raise InvalidArgumentError(
            f"{name!r} in '{directory}' has a backslash or a character that can't be printed in its name, and no pull "
            "takes it. Rename it, or leave it out by ignore_patterns (hfshard push --exclude).",
            path=directory,
        )


def _is_selected(files: Collection[str], selected: Collection[str], directory: str) -> bool:
    """Whether a checkpoint's files are all selected; False if none is.

    Raises:
        InvalidArgumentError: Only some of them are.
    """
    left_out = sorted(set(files) - set(selected))
    if len(left_out) == len(set(files)):
        return False
    if left_out:
        raise InvalidArgumentError(
            f"The patterns leave out '{left_out[0]}', and the checkpoint in '{directory}' can't be loaded without it. "
            "Check allow_patterns and ignore_patterns.",
            path=directory,
        )
    return True


def _known_hashes(checkpoint: OpenCheckpoint) -> dict[str, str | None]:
    """File -> sha256 as the save recorded it; a file with a checksum of another kind is read, compared and hashed."""
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
                logger.warning("'%s' is a pipe, a broken link or a link to a folder: it is not pushed.", path)


def _checked_name(path: str, directory: str) -> str:
    try:
        path.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"The name of {path!r} in '{directory}' is not valid UTF-8, as names on a hub must be. Rename it.",
            path=directory,
        ) from error
    return path


def _files_of(checkpoint: OpenCheckpoint) -> set[str]:
    return {checkpoint.weights.name, *checkpoint.shards, *checkpoint.pickles}


def _leftovers(paths: Collection[str], used: Collection[str], variants: Collection[str | None]) -> set[str]:
    """Files named like weights that no checkpoint uses: left by a killed save, or outranked by another file."""
    families = [WeightNames(variant) for variant in variants]
    return {path for path in paths if path not in used and any(is_weights(path, names) for names in families)}
