"""Find the files of a checkpoint in a repo, in the order in which transformers looks for them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from hfshard.checkpoint.locate import (
    ADAPTER_WEIGHTS,
    CheckpointQuery,
    WeightsEntry,
    WeightsKind,
    candidate_weights,
    checked_weights_override,
    entry_of,
    read_config,
)
from hfshard.constants import (
    ADAPTER_CONFIG_NAME,
    BIN_SUFFIX,
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    MAX_COMPANION_BYTES,
    MAX_INDEX_BYTES,
    SAFETENSORS_SUFFIX,
    SIGNATURE_NAME,
    TRAINING_FILES,
    WEIGHTS_SUFFIXES,
)
from hfshard.disk.safe_open import read_small
from hfshard.errors import CheckpointNotFoundError, HfshardError
from hfshard.format.file_names import INDEX_FILE, WeightNames
from hfshard.format.index import CheckpointIndex
from hfshard.format.stored_save import is_save_index
from hfshard.format.strict_json import json_object_or_none
from hfshard.hub.repo import CommitFiles, is_left_out

logger = logging.getLogger(__name__)

_OWN_STEMS: Final = ("model.", "model-", "pytorch_model.", "pytorch_model-")
"""Prefixes of a checkpoint's weights, including those of its variants: only the selected ones are pulled."""


_READ_BY_MODELS: Final = frozenset({"spk_dict.pt", "head.safetensors", "readout.safetensors"})
"""Weights next to a checkpoint that a class of transformers reads by name: Qwen2.5-Omni's voices, and a config's
`extra_files`."""

_CUSTOM_GENERATE: Final = "custom_generate/generate.py"
"""The file that transformers looks for where it may run a repo's code."""


@dataclass(frozen=True, slots=True)
class ResolvedCheckpoint:
    """A checkpoint that was found and downloaded."""

    directory: str
    """The snapshot's directory, with the subfolder."""
    commit: str
    files: tuple[str, ...]
    """Paths in the repo: config, entry, shards."""
    kind: WeightsKind | None
    """The kind of its weights' entry; None if it is not a model, but an adapter, for example."""
    known_missing: tuple[str, ...]
    """Paths that readers look for, and that the commit is known not to have."""


Resolver = Callable[[CommitFiles], ResolvedCheckpoint]
"""Finds a checkpoint in a commit, and downloads it; raises CheckpointNotFoundError if there is none."""


def resolve_checkpoint(files: CommitFiles, query: CheckpointQuery) -> ResolvedCheckpoint:
    """Find a checkpoint, and download what it needs.

    Raises:
        CheckpointNotFoundError: There is none.
        DamagedCheckpointError, UnsafePathError: Its config or index is not valid.
        Every error that `files` raises.
    """
    names = WeightNames(query.variant)
    path = query.path
    known_missing: list[str] = []
    directory = files.snapshot(query.subfolder.strip("/"))
    present = _small_files(files, query, known_missing)
    if not os.path.isfile(files.snapshot(path(CONFIG_NAME))):
        guess = _find_candidate(files, query, names, None, [])  # a guess: the config may name another
        files.download([*present, path(guess.name)] if guess is not None and guess.is_index else present)
    config = read_config(directory)
    files.download(present)
    pass_over = _leave_to_opening if query.takes_oddities else None
    weights_override = checked_weights_override(config, directory, names, pass_over)
    found = _find_candidate(files, query, names, weights_override, known_missing)
    if query.needs_code and (json_object_or_none(config or b"") or {}).get("auto_map"):
        present += files.code()
    if query.needs_code and not files.has(_CUSTOM_GENERATE, is_needed=False):
        known_missing.append(_CUSTOM_GENERATE)
    if found is None:
        if not (query.accepts_adapter and path(ADAPTER_CONFIG_NAME) in present):
            raise _no_weights(files, query, names)
        files.download(present)
        return ResolvedCheckpoint(directory, files.commit, tuple(present), None, tuple(known_missing))
    paths = [*present, path(found.name)]
    if found.is_index:
        files.download([path(found.name)])
        index_path = os.path.join(directory, found.name)
        raw, _ = read_small(index_path, directory, MAX_INDEX_BYTES)
        index = CheckpointIndex.from_json(raw, index_path, pass_over)
        paths += [path(name) for name in _shards(index, query)]
    files.download(paths)
    return ResolvedCheckpoint(directory, files.commit, tuple(paths), found.kind, tuple(known_missing))


def _leave_to_opening(_error: HfshardError) -> None:
    """Ignore the error: opening the checkpoint reports it."""


def _small_files(files: CommitFiles, query: CheckpointQuery, known_missing: list[str]) -> list[str]:
    """Find the config and the small files that belong to it; add the missing ones to `known_missing`."""
    present = []
    for name, is_needed in (
        (CONFIG_NAME, False),
        (GENERATION_CONFIG_NAME, False),
        (ADAPTER_CONFIG_NAME, query.accepts_adapter),
    ):
        path = query.path(name)
        if not files.has(path, is_needed=is_needed):
            known_missing.append(path)
        elif name != ADAPTER_CONFIG_NAME or query.accepts_adapter:
            present.append(path)
    return present


def companion_files(files: Mapping[str, int], query: CheckpointQuery) -> list[str]:
    """Find the companion files in the folder of a checkpoint, among all (path -> bytes): tokenizer, code, README.

    Of a training checkpoint, only the model is pulled, because the rest would be an incomplete training checkpoint.
    """
    from huggingface_hub.utils import filter_repo_objects  # here, because it takes time to import

    below = query.path("")
    is_training = not query.allow_patterns and all(below + name in files for name in TRAINING_FILES)
    found = [
        path
        for path, size in files.items()
        if not (is_training and path.removeprefix(below) in TRAINING_FILES)
        if path.startswith(below) and _is_beside(path.removeprefix(below), size, is_asked=bool(query.allow_patterns))
    ]
    return list(filter_repo_objects(found, allow_patterns=query.allow_patterns, ignore_patterns=query.ignore_patterns))


def files_to_compare(files: Mapping[str, int], query: CheckpointQuery) -> list[str]:
    """Find the files that are needed to check a signature, among all (path -> bytes): those that a load may read.

    A file that is left out would not be compared, and the code that reads it would download it.
    """
    below = "" if query.needs_code else query.path("")
    found = [
        path
        for path in files
        if path.startswith(below) and not any(part.startswith(".") for part in path.split("/"))
        if path.removeprefix(below) in _READ_BY_MODELS or not path.endswith(WEIGHTS_SUFFIXES)
    ]
    return sorted({*found, *({SIGNATURE_NAME} & files.keys())})


def warn_of_idle_patterns(files: Collection[str], query: CheckpointQuery) -> None:
    """Log the patterns of a pull that match none of the files that there are, such as misspelled ones."""
    from huggingface_hub.utils import filter_repo_objects  # here, because it takes time to import

    for pattern in query.allow_patterns or ():
        if not any(filter_repo_objects(files, allow_patterns=[pattern])):
            logger.warning("No file matches '%s': nothing is pulled for it.", pattern)


def _is_beside(path: str, size: int, *, is_asked: bool) -> bool:
    """Return whether a file is pulled along with the checkpoint: no weights, except those of a module further down.

    If patterns choose the files (`is_asked`), any may be pulled, except other weights of the checkpoint.
    """
    if is_left_out(path):
        return False
    if path in _READ_BY_MODELS:
        return size <= MAX_COMPANION_BYTES
    if "/" not in path and is_save_index(path):
        return False  # in a store it would be taken for the index of another save there
    if "/" not in path and (path.endswith((SAFETENSORS_SUFFIX, BIN_SUFFIX)) or INDEX_FILE.fullmatch(path)):
        return not path.startswith(_OWN_STEMS) and (is_asked or path.startswith("adapter_model."))
    if is_asked or ("/" in path and path.endswith((SAFETENSORS_SUFFIX, BIN_SUFFIX))):
        return True
    return size <= MAX_COMPANION_BYTES and not path.endswith(WEIGHTS_SUFFIXES)


def _find_candidate(
    files: CommitFiles, query: CheckpointQuery, names: WeightNames, override: str | None, known_missing: list[str]
) -> WeightsEntry | None:
    """Find the entry of the checkpoint; None if there is none. Add the missing ones to `known_missing`."""
    candidates = candidate_weights(names, query.use_safetensors, override)
    if query.opens_adapter and override is None and query.variant is None:
        candidates += map(entry_of, ADAPTER_WEIGHTS)
    for candidate in candidates:
        if files.has(query.path(candidate.name)):
            return candidate
        known_missing.append(query.path(candidate.name))
    return None


def _shards(index: CheckpointIndex, query: CheckpointQuery) -> list[str]:
    """List the needed shards; without a selection all of them, even those without tensors."""
    if query.files_of is not None:
        return sorted(query.files_of(index))
    listed = {name for name in index.files if name.endswith(SAFETENSORS_SUFFIX)}
    return sorted(set(index.weight_map.values()) | listed)


def _no_weights(files: CommitFiles, query: CheckpointQuery, names: WeightNames) -> CheckpointNotFoundError:
    parts = files.parts(query.path(""))
    if parts is not None:
        return CheckpointNotFoundError(parts)
    variant = f" of variant '{query.variant}'" if query.variant is not None else ""
    where = f" in the folder '{query.subfolder}'" if query.subfolder else ""
    looked_for = [candidate.name for candidate in candidate_weights(names, query.use_safetensors)]
    what, todo = files.description()
    return CheckpointNotFoundError(f"{what} has no weights{variant}{where}: none of {', '.join(looked_for)}. {todo}")
