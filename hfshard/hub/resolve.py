"""Which files of a repo a checkpoint is made of: chosen from a listing or from the cache, as transformers chooses."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from hfshard.constants import (
    ADAPTER_CONFIG_NAME,
    BIN_SUFFIX,
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    MAX_COMPANION_BYTES,
    MAX_INDEX_BYTES,
    SAFETENSORS_SUFFIX,
    WEIGHTS_SUFFIXES,
)
from hfshard.errors import CheckpointNotFoundError
from hfshard.hub.protocols import CommitFiles
from hfshard.storage.checkpoint.checkpoint import FilesOf
from hfshard.storage.checkpoint.locate import (
    WeightsEntry,
    WeightsKind,
    candidate_weights,
    checked_weights_override,
    read_config,
)
from hfshard.storage.disk.safe_open import read_small
from hfshard.storage.format.index import CheckpointIndex
from hfshard.storage.format.names import INDEX_FILE, WeightNames

_OWN_STEMS: Final = ("model.", "model-", "pytorch_model.", "pytorch_model-")
"""How the weights of a checkpoint and of its variants begin: of those only the chosen ones come."""


_TRAINING: Final = frozenset({"checkpoint.json", "training_state.json"})
"""What makes a folder a training checkpoint, together with files that no model needs, and that do not come with one."""

_CUSTOM_GENERATE: Final = "custom_generate/generate.py"
"""What transformers looks for where it may run a repo's code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointQuery:
    """Which checkpoint is asked for, how much of it, and how it is fetched.

    Raises:
        InvalidArgumentError: The variant can't be part of a file name.
    """

    variant: str | None = None
    """As in transformers' `from_pretrained`, and so are the next seven."""
    use_safetensors: bool | None = None
    """None: safetensors before pickles; True: only them; False: only pickles."""
    subfolder: str = ""
    revision: str | None = None
    token: str | bool | None = field(default=None, repr=False)
    cache_dir: str | os.PathLike[str] | None = None
    local_files_only: bool = False
    force_download: bool = False
    files_of: FilesOf | None = None
    """Which of the files that an index names; None: all."""
    needs_code: bool = False
    """Whether the repo's code may be run, so that it is downloaded too."""
    accepts_adapter: bool = False
    """Whether an adapter is wanted too, alone or beside a model."""
    needs_companions: bool = False
    """Whether the files beside the checkpoint are downloaded too: tokenizer, README."""
    allow_patterns: list[str] | None = None
    """Globs of paths: which of the files beside the checkpoint."""
    ignore_patterns: list[str] | None = None
    """Globs of paths: which of the files beside the checkpoint do not come."""

    def __post_init__(self) -> None:
        """Check the variant."""
        WeightNames(self.variant)

    def path(self, name: str) -> str:
        """A file's path in the repo."""
        return f"{self.subfolder.strip('/')}/{name}" if self.subfolder.strip("/") else name


@dataclass(frozen=True, slots=True)
class ResolvedCheckpoint:
    """A checkpoint that was found, and is in the cache."""

    directory: str
    """The snapshot's, with the subfolder."""
    commit: str
    files: tuple[str, ...]
    """Paths in the repo: config, entry, shards."""
    kind: WeightsKind | None
    """What it is entered by; None: it is no model, but an adapter, say."""
    absent: tuple[str, ...]
    """Paths that readers look for, and that are known not to be there."""


Resolver = Callable[[CommitFiles], ResolvedCheckpoint]
"""Finds in a view what is asked for, and downloads it; raises CheckpointNotFoundError where it is not there."""


def resolve(view: CommitFiles, query: CheckpointQuery) -> ResolvedCheckpoint:
    """Find a checkpoint, and bring what it needs.

    Raises:
        CheckpointNotFoundError: There is none.
        DamagedCheckpointError, UnsafePathError: Its config or index is not what it has to be.
        Whatever the view raises.
    """
    names, path, absent = WeightNames(query.variant), query.path, list[str]()
    directory = view.snapshot(query.subfolder.strip("/"))
    present = _small_files(view, query, absent)
    if not os.path.isfile(view.snapshot(path(CONFIG_NAME))):
        guess = _find_weights(view, query, names, None, [])  # the config may name another: then it came for nothing
        view.download([*present, path(guess.name)] if guess is not None and guess.is_index else present)
    config = read_config(directory)
    view.download(present)
    found = _find_weights(view, query, names, checked_weights_override(config, directory, names), absent)
    if query.needs_code and _has_own_code(config):
        present += view.code()
    if query.needs_code and not view.has(_CUSTOM_GENERATE, is_needed=False):
        absent.append(_CUSTOM_GENERATE)
    if found is None:
        if not (query.accepts_adapter and path(ADAPTER_CONFIG_NAME) in present):
            raise _no_weights(view, query, names)
        view.download(present)
        return ResolvedCheckpoint(directory, view.commit, tuple(present), None, tuple(absent))
    files = [*present, path(found.name)]
    if found.is_index:
        view.download([path(found.name)])
        index_path = os.path.join(directory, found.name)
        raw, _ = read_small(index_path, directory, MAX_INDEX_BYTES)
        index = CheckpointIndex.from_json(raw, index_path)
        files += [path(name) for name in _shards(index, query)]
    view.download(files)
    return ResolvedCheckpoint(directory, view.commit, tuple(files), found.kind, tuple(absent))


def _small_files(view: CommitFiles, query: CheckpointQuery, absent: list[str]) -> list[str]:
    """Config and what goes with it, as far as they are there."""
    present = []
    for name, is_needed in (
        (CONFIG_NAME, False),
        (GENERATION_CONFIG_NAME, False),
        (ADAPTER_CONFIG_NAME, query.accepts_adapter),
    ):
        path = query.path(name)
        if not view.has(path, is_needed=is_needed):
            absent.append(path)
        elif name != ADAPTER_CONFIG_NAME or query.accepts_adapter:
            present.append(path)
    return present


def other_files(files: Mapping[str, int], query: CheckpointQuery) -> list[str]:
    """What lies beside the weights in the folder of a checkpoint: tokenizer, code, README.

    Of a training checkpoint the model is taken alone, so that what comes is no damaged training checkpoint.

    Args:
        files: Path in the repo -> bytes.
        query: The checkpoint.
    """
    from huggingface_hub.utils import filter_repo_objects  # here, because it takes time to import

    below = query.path("")
    is_training = not query.allow_patterns and all(below + name in files for name in _TRAINING)
    found = [
        path
        for path, size in files.items()
        if not (is_training and path.removeprefix(below) in _TRAINING)
        if path.startswith(below) and _is_beside(path.removeprefix(below), size, is_asked=bool(query.allow_patterns))
    ]
    return list(filter_repo_objects(found, allow_patterns=query.allow_patterns, ignore_patterns=query.ignore_patterns))


def _is_beside(path: str, size: int, *, is_asked: bool) -> bool:
    """Whether a file of the folder comes with its checkpoint: it is no weights, or those of a module in a folder below.

    Args:
        path: In the folder.
        size: Bytes.
        is_asked: Patterns say which files come: then all may, but for other weights of the checkpoint itself.
    """
    if "/" not in path and (path.endswith((SAFETENSORS_SUFFIX, BIN_SUFFIX)) or INDEX_FILE.fullmatch(path)):
        return not path.startswith(_OWN_STEMS) and (is_asked or path.startswith("adapter_model."))
    if is_asked or ("/" in path and path.endswith((SAFETENSORS_SUFFIX, BIN_SUFFIX))):
        return True
    return size <= MAX_COMPANION_BYTES and not path.endswith(WEIGHTS_SUFFIXES)


def _find_weights(
    view: CommitFiles, query: CheckpointQuery, names: WeightNames, override: str | None, absent: list[str]
) -> WeightsEntry | None:
    """The file by which the checkpoint is entered, if there is one; the candidates that are missing go to `absent`."""
    for candidate in candidate_weights(names, query.use_safetensors, override):
        if view.has(query.path(candidate.name)):
            return candidate
        absent.append(query.path(candidate.name))
    return None


def _shards(index: CheckpointIndex, query: CheckpointQuery) -> list[str]:
    """The shards that are needed; all: also those that hold no tensor."""
    if query.files_of is not None:
        return sorted(query.files_of(index))
    listed = {name for name in index.files if name.endswith(SAFETENSORS_SUFFIX)}
    return sorted(set(index.weight_map.values()) | listed)


def _has_own_code(config: bytes | None) -> bool:
    try:
        value = json.loads(config or b"{}")
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and bool(value.get("auto_map"))


def _no_weights(view: CommitFiles, query: CheckpointQuery, names: WeightNames) -> CheckpointNotFoundError:
    variant = f" of variant '{query.variant}'" if query.variant is not None else ""
    where = f" in the folder '{query.subfolder}'" if query.subfolder else ""
    looked_for = [candidate.name for candidate in candidate_weights(names, query.use_safetensors)]
    what, todo = view.description()
    return CheckpointNotFoundError(f"{what} has no weights{variant}{where}: none of {', '.join(looked_for)}. {todo}")
