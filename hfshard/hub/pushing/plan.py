"""Which files a push sends, and which it deletes, so that a hub holds what the last save wrote, and the user's own."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from hfshard.constants import BIN_SUFFIX, SAFETENSORS_SUFFIX
from hfshard.disk.byte_source import ByteSource, FileSource, sha256_of_source
from hfshard.format.file_names import INDEX_FILE, WeightNames
from hfshard.format.stored_save import split_object_name
from hfshard.hub.repo_tree import RemoteFile, RepoTree

_SHARD_NUMBER: Final = re.compile(r"-\d{5,}-of-\d{5,}$")
SHARD: Final = re.compile(r"-\d{5,}-of-\d{5,}(?:-\d{8,15}-[0-9a-f]{16})?\.(?:safetensors|bin)$")
"""How the name of a shard of any checkpoint ends, also of one that was synced from a store."""
_SINGLE: Final = re.compile(r"(?:pytorch_)?model(?:\.(?P<variant>[^/]+))?\.(?:safetensors|bin)")
_INDEX: Final = re.compile(r"(?:pytorch_)?model\.(?:safetensors|bin)\.index(?:\.(?P<variant>[^/]+))?\.json")


_HUB_INDEX: Final = re.compile(r"model\.(?P<variant>[^/]+)\.safetensors\.index\.json")


@dataclass(frozen=True, slots=True)
class PushPlan:
    """What one push changes."""

    adds: dict[str, ByteSource]
    """Path in the repo -> new contents."""
    deletes: tuple[str, ...]
    unchanged: tuple[str, ...]
    """Paths of files that the hub holds already, bit for bit."""

    @property
    def is_empty(self) -> bool:
        """Whether the hub holds all files already, and nothing else of this checkpoint."""
        return not self.adds and not self.deletes

    @property
    def changes(self) -> dict[str, ByteSource | None]:
        """Path -> new contents, or None for a file to delete."""
        return {**self.adds, **dict.fromkeys(self.deletes)}


def plan_push(contents: Mapping[str, ByteSource], remote: RepoTree, stale: Collection[str]) -> PushPlan:
    """Compare what is pushed with what is there; files of unknown hash are read where the sizes are equal.

    Args:
        contents: Path in the repo -> contents.
        remote: What the hub holds.
        stale: Paths that are to be deleted.
    """
    adds: dict[str, ByteSource] = {}
    unchanged = []
    for path, content in contents.items():
        known = _hashed_if_needed(content, remote.files.get(path))
        if path in remote.files and remote.files[path].has_contents(known):
            unchanged.append(path)
        else:
            adds[path] = known
    return PushPlan(adds, tuple(sorted(stale)), tuple(unchanged))


def _hashed_if_needed(content: ByteSource, file: RemoteFile | None) -> ByteSource:
    """Add the sha256 where it will be compared, so that no file is read twice for it."""
    is_comparable = file is not None and file.sha256 is not None and file.size == content.size
    if is_comparable and isinstance(content, FileSource) and content.sha256 is None:
        return replace(content, sha256=sha256_of_source(content))
    return content


def variants_of(names: Iterable[str]) -> set[str | None]:
    """Tell from file names which variants of a checkpoint they belong to; None is the one without a variant."""
    found: set[str | None] = set()
    for name in names:
        match = _INDEX.fullmatch(name) or _SINGLE.fullmatch(name) or _HUB_INDEX.fullmatch(name)
        if match is None or _SHARD_NUMBER.search(name.rpartition(".")[0]) or "-hfshard-" in name:
            continue
        if split_object_name(name) is not None:  # synced from a store: a plain index names it
            continue
        found.add(match["variant"])
    return found


def is_weights(name: str, names: WeightNames) -> bool:
    """Whether a file's name is, by convention, one of this variant's weights in either format."""
    own = (names.single, names.index, names.hub_index, names.bin_single, names.bin_index)
    if name in own or names.is_shard(name) or names.is_bin_shard(name):
        return True
    return names.is_transient(name) or names.is_stored_index(name)


def stale_names(
    remote: Iterable[str], local: Collection[str], variants: Iterable[str | None], owned: Collection[str]
) -> set[str]:
    """Find files in a folder of the hub that belonged to the checkpoints that are pushed, and no longer do.

    Args:
        remote: Names in the folder.
        local: Names that are pushed.
        variants: Of the checkpoints that are pushed.
        owned: Files that the hub's indexes of these variants name, whatever they are called.
    """
    families = [WeightNames(variant) for variant in variants]
    return {
        name
        for name in remote
        if name not in local and (name in owned or any(is_weights(name, names) for names in families))
    }


def foreign_indexes(remote: Iterable[str], local: Collection[str], variants: Iterable[str | None]) -> list[str]:
    """Find indexes on the hub of checkpoints that are not pushed: the files that they name must stay."""
    families = [WeightNames(variant) for variant in variants]
    return sorted(
        name
        for name in remote
        if INDEX_FILE.fullmatch(name) and name not in local and not any(is_weights(name, names) for names in families)
    )


def unknown_weights(remote: Iterable[str], local: Collection[str], variants: Iterable[str | None]) -> set[str]:
    """Find weights on the hub without a conventional name: only an index tells whose they are."""
    families = [WeightNames(variant) for variant in variants]
    return {
        name
        for name in remote
        if name.endswith((SAFETENSORS_SUFFIX, BIN_SUFFIX))
        and name not in local
        and not any(is_weights(name, names) for names in families)
    }
