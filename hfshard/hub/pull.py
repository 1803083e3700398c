"""Finds a checkpoint on the Hugging Face Hub and brings its weights into the ordinary cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from hfshard.constants import CONFIG_NAME, MAX_CONFIG_BYTES, MAX_INDEX_BYTES, SAFETENSORS_SUFFIX
from hfshard.errors import CheckpointNotFoundError
from hfshard.storage.directory_state import explicit_weights
from hfshard.storage.index import CheckpointIndex
from hfshard.storage.names import WeightNames
from hfshard.storage.regular_file import read_small


def fetch_checkpoint(
    repo_id: str, *, variant: str | None, use_safetensors: bool | None, subfolder: str = "", **download: Any
) -> tuple[str, str]:
    """Bring config and weights of a repo into the cache, all of one commit.

    Args:
        repo_id: "org/name".
        variant: As in `from_pretrained`.
        use_safetensors: As in `from_pretrained`.
        subfolder: Of the repo.
        download: For `hf_hub_download`: revision, token, cache_dir, local_files_only, force_download.

    Returns:
        The directory of the snapshot (with the subfolder), and the commit's hash.

    Raises:
        CheckpointNotFoundError: The repo has no weights, or the cache has not all of them when only it may be used.
        Whatever huggingface_hub raises: no such repo, no right to read it, no network.
    """
    names = WeightNames(variant)
    wanted = dict(download, subfolder=subfolder or None)
    config = _fetch(repo_id, CONFIG_NAME, wanted)
    explicit = _explicit(config)
    last: Exception | None = None
    for name in _candidates(names, use_safetensors, explicit):
        try:
            path = hf_hub_download(repo_id, name, **wanted)
        except (EntryNotFoundError, LocalEntryNotFoundError) as error:
            last = error
            continue
        commit = _commit_of(path)
        if name.endswith(".json"):
            pinned = dict(wanted, revision=commit)
            for shard in _shards(path, ".bin" if name == names.bin_index else SAFETENSORS_SUFFIX):
                hf_hub_download(repo_id, shard, **pinned)
        return os.path.dirname(path), commit
    raise CheckpointNotFoundError(
        f"'{repo_id}' has no weights{f' of variant {variant!r}' if variant else ''} that could be reached. "
        f"Check the name, the revision and the network; to see the files of a repo, run: hf models ls {repo_id}",
        path=repo_id,
    ) from last


def _candidates(names: WeightNames, use_safetensors: bool | None, explicit: str | None) -> Iterator[str]:
    if explicit is not None:
        yield explicit
        return
    if use_safetensors is not False:
        yield from (names.single, names.index)
    if not use_safetensors:
        yield from (names.bin_single, names.bin_index)


def _fetch(repo_id: str, name: str, wanted: dict[str, Any]) -> str | None:
    try:
        return str(hf_hub_download(repo_id, name, **wanted))
    except (EntryNotFoundError, LocalEntryNotFoundError):
        return None


def _explicit(config_path: str | None) -> str | None:
    if config_path is None:
        return None
    return explicit_weights(read_small(config_path, os.path.dirname(config_path), MAX_CONFIG_BYTES)[0])


def _shards(index_path: str, suffix: str) -> list[str]:
    raw, _ = read_small(index_path, os.path.dirname(index_path), MAX_INDEX_BYTES)
    return sorted(set(CheckpointIndex.from_json(raw, index_path, suffix=suffix).weight_map.values()))


def _commit_of(cached_path: str) -> str:
    parts = cached_path.split(os.sep)
    return parts[len(parts) - parts[::-1].index("snapshots")]
