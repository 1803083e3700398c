"""What lies in a store loads as it does from a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfshard
from hfshard.errors import CheckpointNotFoundError, InvalidArgumentError
from tests.stores.reading.conftest import put_directory

STATE = {
    "encoder.weight": torch.arange(70_000.0).reshape(700, 100),
    "encoder.bias": torch.arange(100, dtype=torch.float16),
    "head.weight": torch.full((64, 5), 0.5, dtype=torch.bfloat16),
    "steps": torch.tensor(7),
    "empty": torch.zeros(0, 3),
    "waves": torch.complex(torch.ones(3), torch.arange(3.0)),
}


def test_shards_load_as_from_their_directory(store_address: str, tmp_path: Path) -> None:
    tied = STATE | {"decoder.weight": STATE["encoder.weight"]}
    hfshard.save_state_dict(tied, tmp_path / "a", max_shard_size="100KB")
    put_directory(tmp_path / "a", store_address)

    for verify in ("none", "structure", "full"):
        loaded = hfshard.load_state_dict(store_address, verify=verify)
        assert list(loaded) == list(hfshard.load_state_dict(tmp_path / "a"))
        assert all(torch.equal(loaded[name], tied[name]) and loaded[name].dtype == tied[name].dtype for name in tied)
        assert loaded["decoder.weight"] is loaded["encoder.weight"]
    assert list(hfshard.load_state_dict(store_address, keys="encoder.b*")) == ["encoder.bias"]
    assert hfshard.load_state_dict(store_address, ranges=True, keys=["steps"]) == {"steps": torch.tensor(7)}


def test_a_module_takes_a_single_file_and_a_subfolder(store_address: str, tmp_path: Path) -> None:
    saved = nn.Linear(4, 3)
    hfshard.save_model(saved, tmp_path / "deep" / "er")
    put_directory(tmp_path, store_address)

    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        (f"{store_address}/deep/er", {}),
        (f"{store_address}/deep/er/model.safetensors", {"verify": "full"}),
        (f"{store_address}/deep", {"subfolder": "er"}),
    )
    for path, more in cases:
        module = nn.Linear(4, 3)
        hfshard.load_model(module, path, **more)
        assert torch.equal(module.weight, saved.weight)
        assert torch.equal(module.bias, saved.bias)


def test_what_is_not_there_or_can_not_be_read_is_refused(store_address: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=f"There is nothing at '{store_address}'"):
        hfshard.load_state_dict(store_address)
    with pytest.raises(InvalidArgumentError, match="local_files_only=True, and 's3://"):
        hfshard.load_state_dict(store_address, local_files_only=True)

    torch.save(STATE, tmp_path / "pytorch_model.bin")
    put_directory(tmp_path, store_address)
    for path in (store_address, f"{store_address}/pytorch_model.bin"):
        with pytest.raises(
            InvalidArgumentError, match=r"pytorch_model.bin' is a file of torch.save.*hfshard pull s3://"
        ):
            hfshard.load_state_dict(path)
