"""Copies a pulled checkpoint into a directory of the user's, by the same crash-safe commit as a save."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Collection
from typing import Final

from hfshard.constants import CONFIG_NAME, README
from hfshard.errors import SaveDirectoryError
from hfshard.hub.own_files import OwnFiles
from hfshard.storage.checkpoint.checkpoint import OpenCheckpoint
from hfshard.storage.commit.commit import SaveSession, save_session
from hfshard.storage.commit.commit_plan import plan_commit
from hfshard.storage.commit.new_checkpoint import NewCheckpoint, content_digest
from hfshard.storage.disk.byte_source import ByteSource, file_source
from hfshard.storage.disk.clone import copy_file
from hfshard.storage.disk.hub_place import refuse_hub

_LEFT_OUT: Final = frozenset({".gitattributes"})
"""Files that only the Hub needs."""


def export(checkpoint: OpenCheckpoint, directory: str, companions: Collection[str], *, overwrite: bool = False) -> None:
    """Copy a checkpoint into a directory; what the directory held before can be loaded until the copy is complete.

    Files are copied (or share their blocks, where the file system can do that), never linked: writing to a linked file
    would change the cache.

    Args:
        checkpoint: An open checkpoint.
        directory: The target, made if it is missing.
        companions: Paths below the checkpoint's directory that are copied too.
        overwrite: Whether to replace files that don't belong to the checkpoint there (see `OwnFiles`), and a README.

    Raises:
        SaveDirectoryError: The target is a file, has shards of the same names with other contents, has other files
            that would be replaced, or has a link where a folder is needed.
        Everything that `SaveSession.commit` raises.
    """
    names = checkpoint.names
    source = checkpoint.directory
    entry = checkpoint.weights.name
    weights, extras = exported_names(checkpoint, companions)
    config = _read(source, CONFIG_NAME) if os.path.isfile(os.path.join(source, CONFIG_NAME)) else None
    own_files = None
    if not overwrite:
        refuse_hub(directory)
        others = [name for name in (*extras, *([CONFIG_NAME] if config else [])) if name != entry]
        own_files = OwnFiles(directory, names, _sources(source, others), _sources(source, weights))
        if own_files.keeps_readme:
            extras.remove(README)
    small = {name: _read(source, name) for name in extras}
    with save_session(directory, names) as session:
        unnamed = _refuse_other_contents(session, checkpoint, weights, overwrite=overwrite)
        names_of_all = [*weights, *extras, *([CONFIG_NAME] if config else [])]
        if all(_has_same_bytes(directory, name, source) for name in names_of_all):
            return
        session.make_folders(extras)
        session.check_space(sum(os.path.getsize(os.path.join(source, name)) for name in weights))
        staged = {name: f"{number:05d}.weights" for number, name in enumerate(weights)}
        for name, target in staged.items():
            copy_file(os.path.join(source, name), os.path.join(session.staging, target), session.replaced)
        index = small.pop(names.index, None) if entry == names.index else None
        digest = content_digest([index or b"", *(name.encode() for name in weights)])
        new = NewCheckpoint(staged, checkpoint.keys, index, config, small, digest)
        plan = plan_commit(session.state, new)
        if own_files is not None:
            own_files()
        for name in unnamed:  # or the new index would name them until they are replaced
            os.unlink(os.path.join(directory, name))
        session.commit(plan)


def exported_names(checkpoint: OpenCheckpoint, companions: Collection[str]) -> tuple[list[str], list[str]]:
    """Name the files that `export` copies: the weights, and all others but config.json."""
    weights = [*checkpoint.shards, *checkpoint.pickles]
    index = [checkpoint.weights.name] if checkpoint.weights.is_index else []
    return weights, sorted({*companions, *index} - _LEFT_OUT - {*weights, CONFIG_NAME})


def _refuse_other_contents(
    session: SaveSession, checkpoint: OpenCheckpoint, weights: Collection[str], *, overwrite: bool
) -> list[str]:
    """Refuse shards of the same names; returns those that no index names, which may be overwritten."""
    directory = session.directory
    is_plain = checkpoint.weights.name in (checkpoint.names.single, checkpoint.names.index)
    if not is_plain and session.state.has_weights:
        raise _refusal(directory, checkpoint.weights.name, "weights of another format")
    if checkpoint.weights.kind == "single":
        return []  # one rename replaces it
    unnamed = []
    for name in weights:
        if session.status_of(name) is not None and not _has_same_bytes(directory, name, checkpoint.directory):
            if not (overwrite and name in session.state.strays):
                raise _refusal(directory, name, "a file of this name with other contents")
            unnamed.append(name)
    return unnamed


def _sources(directory: str, names: Collection[str]) -> dict[str, ByteSource]:
    return {name: file_source(os.path.join(directory, name)) for name in names}


def _refusal(directory: str, name: str, problem: str) -> SaveDirectoryError:
    return SaveDirectoryError(
        f"'{name}' can't be pulled into '{directory}': there is {problem}, and what is there must stay loadable until "
        "the pull is complete. Pull into a new directory.",
        path=os.path.join(directory, name),
    )


def _has_same_bytes(directory: str, name: str, source: str) -> bool:
    mine, theirs = os.path.join(directory, name), os.path.join(source, name)
    return os.path.isfile(mine) and filecmp.cmp(mine, theirs, shallow=False)


def _read(directory: str, name: str) -> bytes:
    with open(os.path.join(directory, name), "rb") as file:
        return file.read()
