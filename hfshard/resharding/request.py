"""Makes a save request from a checkpoint in files: its tensors as they are, or cast, and what goes with them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, TypeVar

import torch

from hfshard.checkpoint.folder import CheckpointFolder
from hfshard.checkpoint.locate import config_in
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint, cast, is_packed, raw_tensors
from hfshard.commit.directory_state import weights_override_of
from hfshard.constants import CONFIG_NAME, GENERATION_CONFIG_NAME, MAX_CONFIG_BYTES, METADATA_KEY
from hfshard.errors import InvalidArgumentError
from hfshard.format.index import without_mark, without_weights_override
from hfshard.format.strict_json import parse_json_object
from hfshard.saving.prepare import plan_request
from hfshard.saving.request import SaveRequest
from hfshard.shards.write_shards import COMPLEX_AS_REAL_KEY
from hfshard.tensors.tied import find_shared_tensors

_DTYPE_KEYS: Final = ("dtype", "torch_dtype")
"""Where a config says in which dtype a model is loaded: transformers' key, and its older one."""

_OWN_KEYS: Final = frozenset({METADATA_KEY, COMPLEX_AS_REAL_KEY, "format"})
"""Keys of a file's `__metadata__` that a save writes itself."""

_MetadataValue = TypeVar("_MetadataValue")


def with_tensors(request: SaveRequest, checkpoint: OpenCheckpoint, *, weights_only: bool = False) -> SaveRequest:
    """Fill a request with all that a checkpoint holds, as it is.

    Args:
        request: How to save it.
        checkpoint: Open; it must stay open until it is saved.
        weights_only: Leave out the configs beside it.
    """
    index = checkpoint.index
    tensors = raw_tensors(checkpoint)
    tied_names = find_shared_tensors(checkpoint.pickled_tensors()) if checkpoint.pickles else index.tied_names
    file_metadata: dict[str, str] = {}
    for shard in checkpoint.shards.values():
        file_metadata = shard.header.metadata | file_metadata
    metadata = _without(index.metadata, _OWN_KEYS if checkpoint.weights.kind == "single" else frozenset())
    request = replace(
        request,
        tensors={name: value for name, value in tensors.items() if name not in tied_names},
        tied_names=tied_names,
        undeclared_ties=index.undeclared_ties,
        options=replace(request.options, metadata=metadata),
        file_metadata=_without(file_metadata, _OWN_KEYS | tied_names.keys()),
        total_parameters=index.total_parameters,
        config=None if weights_only else _config_without_override(checkpoint.folder),
        model_files={} if weights_only else _model_files_of(checkpoint.folder),
    )
    if checkpoint.pickles or request.kept_files or plan_request(request).weight_map == index.weight_map:
        return request
    return replace(request, tensors={name: tensors[name] for name in guess_order(checkpoint)})


def _config_without_override(folder: CheckpointFolder) -> bytes | None:
    """The config, without the weights that it may name while a commit is under way."""
    raw = config_in(folder)
    if raw is None:
        return None
    config = without_mark(raw)  # which it has from a store
    return config if weights_override_of(config) is None else without_weights_override(config)


def _model_files_of(folder: CheckpointFolder) -> dict[str, bytes]:
    if not folder.has(GENERATION_CONFIG_NAME):
        return {}
    return {GENERATION_CONFIG_NAME: without_mark(folder.read_small(GENERATION_CONFIG_NAME, MAX_CONFIG_BYTES))}


def guess_order(checkpoint: OpenCheckpoint) -> list[str]:
    """Put the names into the order of the state dict that was saved, as far as safetensors files tell.

    1. Files are filled in that order, but a tensor that is too large gets its own file, before the file that is being
       filled. So where a file has one tensor, and more bytes than any file with several, its tensor came after the
       first tensor of the next file. It is put after the last, where an output layer is.
    2. Large files at the beginning, such as that of an embedding, may have been written when none was being filled.
       They stay first.
    """
    files = [list(shard.header.tensors) for shard in checkpoint.shards.values()]
    sizes = [shard.size for shard in checkpoint.shards.values()]
    limit = max((size for size, names in zip(sizes, files, strict=True) if len(names) > 1), default=0)
    order: list[str] = []
    waiting: list[str] = []
    was_filled = False
    for size, names in zip(sizes, files, strict=True):
        is_large = len(names) == 1 and size > limit > 0
        if is_large and was_filled:
            waiting += names
            continue
        order += names + waiting
        waiting, was_filled = [], was_filled or not is_large
    return order + waiting


def _without(values: Mapping[str, _MetadataValue], keys: frozenset[str]) -> dict[str, _MetadataValue]:
    return {key: value for key, value in values.items() if key not in keys}


def with_dtype(request: SaveRequest, dtype: torch.dtype, directory: str) -> SaveRequest:
    """Change a request so that floating tensors are cast when they are written, and the config says so.

    Raises:
        InvalidArgumentError: The checkpoint is quantized: its floats mean nothing without their scales.
    """
    path = os.path.join(directory, CONFIG_NAME)
    raw = request.config
    config = None if raw is None else parse_json_object(raw, path=path, what="Config", remedy="Save the model again.")
    packed = [name for name, value in request.tensors.items() if is_packed(value)]
    if packed or (config is not None and config.get("quantization_config")):
        why = f"'{packed[0]}' is an 8-bit float or smaller" if packed else "its config has a quantization_config"
        raise InvalidArgumentError(
            f"The checkpoint in '{directory}' is quantized ({why}), and a cast would spoil it. "
            "Re-shard it without dtype, or dequantize the model first.",
            path=directory,
        )
    tensors = {name: cast(value, dtype) for name, value in request.tensors.items()}
    if config is not None:
        keys = [key for key in _DTYPE_KEYS if key in config] or [_DTYPE_KEYS[0]]
        changed = config | dict.fromkeys(keys, str(dtype).removeprefix("torch."))
        if changed != config:
            raw = f"{json.dumps(changed, indent=2, sort_keys=True)}\n".encode()  # as transformers writes it
    return replace(request, tensors=tensors, config=raw)
