"""Note the shards that a commit will delete, so that the next save can finish deletes that were cut short.

A shard of hfshard's own that no index names is recognized by its header. A shard that another library wrote is not: it
might be part of an unfinished download. So a commit that replaces such shards first notes them with their fingerprints
in the staging directory, which stays when a save is killed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any, Final

from hfshard.constants import MAX_CONFIG_BYTES, STAGING_DIRECTORY
from hfshard.disk.fsops import sync_directory, write_file
from hfshard.disk.safe_open import read_small
from hfshard.format.file_names import WeightNames
from hfshard.format.strict_json import dump_json, parse_json_object
from hfshard.shards.shard_file import SafetensorsFile
from hfshard.storage.commit.damage import unless_damaged

_NAME: Final = "pending-deletes.json"


def note_pending_deletes(directory: str, shards: Iterable[str], commit_source: str) -> None:
    """Note durably which shards will be deleted once the commit is done.

    Args:
        directory: The save directory; its staging directory exists.
        shards: Names of files in it.
        commit_source: The staged file whose rename is the commit: while it exists, nothing may be deleted.
    """
    fingerprints = {
        name: fingerprint for name in sorted(shards) if (fingerprint := _fingerprint(directory, name)) is not None
    }
    if fingerprints:
        staging = os.path.join(directory, STAGING_DIRECTORY)
        write_file(os.path.join(staging, _NAME), dump_json({"commit": commit_source, "shards": fingerprints}))
        sync_directory(staging)


def noted_pending_deletes(directory: str, names: WeightNames, listing: Collection[str]) -> frozenset[str]:
    """Find the shards that a commit did not get to delete: noted, still the same files, and the commit was done.

    The caller checks whether an index names them.
    """
    staging = os.path.join(directory, STAGING_DIRECTORY)
    path = os.path.join(staging, _NAME)
    if not os.path.lexists(path):
        return frozenset()

    def read() -> dict[str, Any]:
        raw, _ = read_small(path, directory, MAX_CONFIG_BYTES)
        return parse_json_object(raw, path=path, what="Note", remedy="The next save removes it.")

    note = unless_damaged(read)
    if note is None:
        return frozenset()  # what it said is unknown, so nothing is deleted
    commit_source = note.get("commit")
    fingerprints = note.get("shards")
    if not isinstance(commit_source, str) or not isinstance(fingerprints, dict):
        return frozenset()
    if os.path.lexists(os.path.join(staging, os.path.basename(commit_source))):
        return frozenset()
    known = (name for name in fingerprints if names.is_shard(name) and name in listing)
    return frozenset(name for name in known if _fingerprint(directory, name) == fingerprints[name])


def _fingerprint(directory: str, name: str) -> str | None:
    """The fingerprint of a shard; None if it is not a safetensors file."""
    shard = unless_damaged(lambda: SafetensorsFile(os.path.join(directory, name), directory))
    if shard is None:
        return None
    try:
        return shard.fingerprint()
    finally:
        shard.close()
