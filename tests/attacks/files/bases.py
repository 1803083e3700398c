"""Whole checkpoints to damage: those that hfshard writes, and pickles that torch writes."""

from __future__ import annotations

import functools
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.attacks.files import raw


@functools.cache
def _saved(seed: int, sharded: bool) -> raw.Files:
    import hfshard
    from tests.attacks.target import TinyConfig, TinyPretrained, truth

    model = TinyPretrained(TinyConfig())
    model.load_state_dict(truth(seed))
    with tempfile.TemporaryDirectory() as folder:
        # 4,096 bytes of header and 128 of data: embed, block and head each in a shard of its own.
        hfshard.save_model(model, folder, max_shard_size=4096 + 128 if sharded else "1MB")
        return raw.files_in(Path(folder))


def ours_sharded(seed: int = 1) -> raw.Files:
    """What hfshard saves in three shards, hashes in the index."""
    return dict(_saved(seed, True))


def ours_single(seed: int = 1) -> raw.Files:
    """What hfshard saves in one file, hashes in its own metadata."""
    return dict(_saved(seed, False))


def metadata_of_index(files: raw.Files) -> tuple[dict[str, Any], dict[str, Any]]:
    """The whole index of `ours_sharded`, and hfshard's part of it, for editing."""
    index: dict[str, Any] = json.loads(files[raw.INDEX])
    return index, index["metadata"]["hfshard"]


def put_index(files: raw.Files, index: dict[str, Any]) -> None:
    """Write an edited index back."""
    files[raw.INDEX] = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def torch_saved(value: Any, *, legacy: bool = False) -> bytes:
    """What `torch.save` writes: a zip, or with `legacy` the format before it."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


def stock_bin(seed: int = 1, *, legacy: bool = False) -> raw.Files:
    """A valid `pytorch_model.bin` of old days."""
    from tests.attacks.target import truth

    return {raw.CONFIG: raw.config(), raw.BIN: torch_saved(truth(seed), legacy=legacy)}


def stock_bin_sharded(seed: int = 1, *, legacy: bool = False) -> raw.Files:
    """The same in three files and an index."""
    from tests.attacks.target import truth

    weights = truth(seed)
    files: raw.Files = {raw.CONFIG: raw.config()}
    names: dict[str, str] = {}
    for number, shapes in enumerate(raw.LAYOUT.values(), 1):
        name = f"pytorch_model-{number:05d}-of-00003.bin"
        files[name] = torch_saved({key: weights[key].clone() for key in shapes}, legacy=legacy)
        names.update(dict.fromkeys(shapes, name))
    files[raw.BIN_INDEX] = json.dumps({"metadata": {"total_size": raw.TOTAL_BYTES}, "weight_map": names}).encode()
    return files
