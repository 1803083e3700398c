"""A note of shards that a commit is to remove, so that the next save can end a removal that was killed.

A shard of hfshard's own that no index names is known by its header. One that upstream wrote is not: it might be part
of a download under way. So a commit that replaces such shards first notes them, with their fingerprints, in the staging
directory, which stays where a save is killed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Final

from hfshard.constants import MAX_CONFIG_BYTES, STAGING_DIRECTORY
from hfshard.errors import HfshardError
from hfshard.storage.disk.fsops import sync_directory, write_file
from hfshard.storage.disk.safe_open import read_small
from hfshard.storage.format.names import WeightNames
from hfshard.storage.format.strict_json import dump_json, parse_json_object
from hfshard.storage.weights.safetensors_file import SafetensorsFile

_NAME: Final = "pending-deletes.json"


def note_pending_deletes(directory: str, shards: Iterable[str], commit_source: str) -> None:
    """Write down, durably, which shards are to go once the commit is done.

    Args:
        directory: The save directory; its staging directory exists.
        shards: Names of files in it.
        commit_source: The staged file whose renaming is the commit: while it is there, nothing is to go.
    """
    fingerprints = {
        name: fingerprint for name in sorted(shards) if (fingerprint := _fingerprint(directory, name)) is not None
    }
    if fingerprints:
        staging = os.path.join(directory, STAGING_DIRECTORY)
        write_file(os.path.join(staging, _NAME), dump_json({"commit": commit_source, "shards": fingerprints}))
        sync_directory(staging)


def noted_pending_deletes(directory: str, names: WeightNames, listing: Collection[str]) -> frozenset[str]:
    """The shards that a killed commit had still to remove: noted, still the same files, and the commit was done.

    Whether an index names them is for the caller to ask.
    """
    staging = os.path.join(directory, STAGING_DIRECTORY)
    path = os.path.join(staging, _NAME)
    if not os.path.lexists(path):
        return frozenset()
    try:
        raw, _ = read_small(path, directory, MAX_CONFIG_BYTES)
        note = parse_json_object(raw, path=path, what="Note", remedy="It will be removed.")
    except HfshardError:
        return frozenset()  # damaged: what it said is unknown, and so nothing goes
    commit_source, fingerprints = note.get("commit"), note.get("shards")
    if not isinstance(commit_source, str) or not isinstance(fingerprints, dict):
        return frozenset()
    if os.path.lexists(os.path.join(staging, os.path.basename(commit_source))):
        return frozenset()
    known = (name for name in fingerprints if names.is_shard(name) and name in listing)
    return frozenset(name for name in known if _fingerprint(directory, name) == fingerprints[name])


def _fingerprint(directory: str, name: str) -> str | None:
    """The fingerprint of a shard; None where it is none."""
    try:
        shard = SafetensorsFile(os.path.join(directory, name), directory)
    except HfshardError:
        return None
    try:
        return shard.fingerprint()
    finally:
        shard.close()
