"""Puts a checkpoint that was pulled into a directory of the user's, by the same crash-safe commit as a save."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Collection
from typing import Final

from hfshard.constants import CONFIG_NAME, README
from hfshard.errors import SaveDirectoryError
from hfshard.storage.checkpoint.checkpoint import OpenCheckpoint
from hfshard.storage.commit.commit import SaveSession, save_session
from hfshard.storage.commit.commit_plan import NewCheckpoint, content_digest, plan_commit
from hfshard.storage.disk.clone import copy_file

_LEFT_OUT: Final = frozenset({".gitattributes"})
"""What the Hub keeps for itself."""


def export(checkpoint: OpenCheckpoint, directory: str, others: Collection[str]) -> None:
    """Put a checkpoint into a directory, where what stood there loads until it is whole.

    Files are copied (or share their blocks, where the file system can), never linked: a cache's file is nobody's to
    write to.

    Args:
        checkpoint: Open.
        directory: Made where it is missing.
        others: Paths below the checkpoint's directory of what goes along.

    Raises:
        SaveDirectoryError: It is a file, or has shards of the same names with other contents.
        Everything that `SaveSession.commit` raises.
    """
    names, source = checkpoint.names, checkpoint.directory
    weights = [*checkpoint.shards, *checkpoint.pickles]
    entry = checkpoint.weights.name
    is_index = checkpoint.weights.is_index
    extras = sorted({*others, *([entry] if is_index else [])} - _LEFT_OUT - {*weights, CONFIG_NAME})
    small = {name: _read(source, name) for name in extras}
    config = _read(source, CONFIG_NAME) if os.path.isfile(os.path.join(source, CONFIG_NAME)) else None
    with save_session(directory, names) as session:
        _refuse_other_contents(session, checkpoint, weights)
        if all(_is_same(directory, name, source) for name in [*weights, *extras, *([CONFIG_NAME] if config else [])]):
            return
        session.check_space(sum(os.path.getsize(os.path.join(source, name)) for name in weights))
        staged = {name: f"{number:05d}.weights" for number, name in enumerate(weights)}
        for name, target in staged.items():
            copy_file(os.path.join(source, name), os.path.join(session.staging, target), session.replaced)
        for name in extras:
            os.makedirs(os.path.join(directory, os.path.dirname(name)), exist_ok=True)
        index = small.pop(names.index, None) if entry == names.index else None
        if README in small and README in session.state.listing:
            del small[README]  # the user's own
        digest = content_digest([index or b"", *(name.encode() for name in weights)])
        new = NewCheckpoint(staged, checkpoint.keys, index, config, small, digest)
        session.commit(plan_commit(session.state, new))


def _refuse_other_contents(session: SaveSession, checkpoint: OpenCheckpoint, weights: Collection[str]) -> None:
    directory, is_plain = (
        session.directory,
        checkpoint.weights.name in (checkpoint.names.single, checkpoint.names.index),
    )
    if not is_plain and session.state.has_weights:
        raise _refusal(directory, checkpoint.weights.name, "weights of another format")
    if checkpoint.weights.kind == "single":
        return  # one rename replaces it
    for name in weights:
        if session.status_of(name) is not None and not _is_same(directory, name, checkpoint.directory):
            raise _refusal(directory, name, "a file of this name with other contents")


def _refusal(directory: str, name: str, problem: str) -> SaveDirectoryError:
    return SaveDirectoryError(
        f"'{name}' can't be pulled into '{directory}': there is {problem}, and what stands there must load until the "
        "pull is whole. Pull into a new directory.",
        path=os.path.join(directory, name),
    )


def _is_same(directory: str, name: str, source: str) -> bool:
    mine, theirs = os.path.join(directory, name), os.path.join(source, name)
    return os.path.isfile(mine) and filecmp.cmp(mine, theirs, shallow=False)


def _read(directory: str, name: str) -> bytes:
    with open(os.path.join(directory, name), "rb") as file:
        return file.read()
