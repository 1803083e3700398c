"""Copy checkpoints between directories and stores: the same tensors in the same files, committed like a save."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.constants import CONFIG_NAME, GENERATION_CONFIG_NAME
from hfshard.disk.byte_source import ByteSource, BytesSource, read_all
from hfshard.errors import InvalidArgumentError
from hfshard.format.file_names import INDEX_FILE, WeightNames
from hfshard.format.index import Verify, without_commit_keys
from hfshard.format.stored_save import objects_of_saves
from hfshard.hub.push_files import FilesOfPlace, PushContents, detect_variants
from hfshard.hub.repo import PushResult
from hfshard.hub.resolve import companion_files, warn_of_idle_patterns
from hfshard.places.place import SavePlace
from hfshard.places.source import CheckpointSource
from hfshard.saving.resharding import reshard_source
from hfshard.saving.save_request import SaveOptions

_OF_WEIGHTS: Final = frozenset({CONFIG_NAME, GENERATION_CONFIG_NAME})
"""Files that are saved along with the weights anyway."""


def copy_all(
    files: FilesOfPlace,
    target: SavePlace,
    progress: bool | None,
    *,
    allow_patterns: list[str] | str | None = None,
    ignore_patterns: list[str] | str | None = None,
) -> PushResult:
    """Copy all checkpoints of a place into one without Hub commits: one save for each variant, and the other files.

    Raises:
        Everything that `reshard_checkpoint` raises.
    """
    paths = list(files.contents())
    variants = sorted(detect_variants(name for name in paths if "/" not in name) or {None}, key=lambda name: name or "")
    count_sent = target.count_sent({"", *(path.rpartition("/")[0] for path in paths)})
    allowed = listed(allow_patterns)
    ignored = listed(ignore_patterns)
    for variant in variants:
        query = CheckpointQuery(variant=variant, allow_patterns=allowed, ignore_patterns=ignored)
        copy_checkpoint(files, target, query, progress=progress, overwrite=True)
    sent = count_sent()
    return PushResult("", target.address, is_new=sent is not None, sent_bytes=sent or 0)


def copy_checkpoint(
    files: FilesOfPlace,
    target: SavePlace,
    query: CheckpointQuery,
    *,
    verify: Verify = "structure",
    progress: bool | None = None,
    overwrite: bool = False,
) -> str:
    """Copy the checkpoint that a query selects, and its companion files; return the address of the target.

    verify, progress and overwrite are as in `pull_checkpoint`.

    Raises:
        Everything that `reshard_checkpoint` raises.
    """
    source = CheckpointSource(files.place, CheckpointQuery(variant=query.variant))
    options = SaveOptions(variant=query.variant, progress=progress)
    beside = partial(_beside, files, query)
    reshard_source(source, target, options, beside=beside, overwrite=overwrite, verify=verify)
    return target.address


def _beside(files: FilesOfPlace, query: CheckpointQuery, checkpoint: OpenCheckpoint) -> dict[str, ByteSource]:
    """Find the files that go along with a checkpoint, as in a pull."""
    contents = files.contents()
    sizes = {query.path(name): content.size for name, content in contents.items()}
    warn_of_idle_patterns(sizes, query)
    found = companion_files(sizes, query)
    names = {path.removeprefix(query.path("")) for path in found} - _OF_WEIGHTS
    names -= objects_of_saves(path for path in contents if "/" not in path)  # of a directory that was synced
    files.check(names)
    return {name: contents[name] for name in sorted(names)}


def listed(patterns: Sequence[str] | str | None) -> list[str] | None:
    """Convert globs to a list.

    Raises:
        InvalidArgumentError: They are not globs.
    """
    if patterns is None:
        return None
    found: Any = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(found, Sequence) or not all(isinstance(one, str) for one in found):
        raise InvalidArgumentError(f"allow_patterns and ignore_patterns must be globs, got {patterns!r:.200}.")
    return list(found)


def without_marks(found: PushContents) -> PushContents:
    """Restore the saved contents of a config.json that was read in the middle of a commit on disk.

    The index or single file that such a config names gets its usual name.
    """
    contents = dict(found.contents)
    for variant, entry in found.entries.items():
        names = WeightNames(variant)
        if names.is_commit_temporary(entry):
            contents[names.index if INDEX_FILE.fullmatch(entry) else names.single] = contents.pop(entry)
    if CONFIG_NAME in contents:
        contents[CONFIG_NAME] = BytesSource(without_commit_keys(read_all(contents[CONFIG_NAME])))
    return PushContents(contents, found.indexes, found.entries)
