"""What is in a save directory: a disk that fails to read is no damage."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import hfshard

BIN_INDEX = "pytorch_model.bin.index.json"


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    """Two pickled shards with their index."""
    for number, name in enumerate("ab", 1):
        torch.save({name: torch.ones(2)}, tmp_path / f"pytorch_model-{number:05d}-of-00002.bin")
    weight_map = {name: f"pytorch_model-{number:05d}-of-00002.bin" for number, name in enumerate("ab", 1)}
    (tmp_path / BIN_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


@pytest.mark.parametrize(("call", "number"), [("open", errno.EIO), ("open", errno.EACCES), ("read", errno.EIO)])
def test_an_index_that_the_disk_fails_to_read_is_not_taken_for_damage(
    call: str, number: int, pickled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(path.name for path in pickled.iterdir())
    kept = getattr(os, call)

    def failing(file: Any, *arguments: Any, **keywords: Any) -> Any:
        if (os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else str(file)).endswith(BIN_INDEX):
            raise OSError(number, os.strerror(number))
        return kept(file, *arguments, **keywords)

    monkeypatch.setattr(os, call, failing)
    with pytest.raises((hfshard.HfshardError, OSError), match=os.strerror(number)):
        hfshard.save_state_dict({"a": torch.zeros(2)}, pickled)

    monkeypatch.undo()
    assert sorted(path.name for path in pickled.iterdir()) == before
    hfshard.save_state_dict({"a": torch.zeros(2)}, pickled)
    assert [path.name for path in pickled.iterdir()] == ["model.safetensors"]


def test_the_files_of_a_damaged_index_are_left_alone(pickled: Path) -> None:
    (pickled / BIN_INDEX).write_text("{")

    hfshard.save_state_dict({"a": torch.zeros(2)}, pickled)

    assert len(list(pickled.glob("*.bin"))) == 2
