"""Stored tensors are read from the sets of files that the manifest names: into memory, or mapped to be copied from."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from hfshard.format.index import FileDigest
from hfshard.training.restoring.restoration import read_set
from hfshard.training.run.manifest import CheckpointManifest, folder_at


def reader(place: Path, *names: str) -> Callable[..., dict[str, torch.Tensor]]:
    manifest = CheckpointManifest(1, 0, {}, {name: FileDigest() for name in names})
    return partial(read_set, folder_at(str(place)), manifest, 0, None)


def test_a_set_that_the_manifest_does_not_name_has_no_tensors(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2), "b": torch.zeros(1)}, tmp_path / "state.safetensors")
    read = reader(tmp_path, "state.safetensors")

    assert read("optimizer") == {}
    assert reader(tmp_path)("state") == {}
    assert {name: one.tolist() for name, one in read("state").items()} == {"b": [0.0], "w": [1.0, 1.0]}
    assert [*read("state", lambda name: name == "w")] == ["w"]


def test_what_training_goes_on_with_is_in_memory_and_what_is_copied_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_file({"w": torch.full((1024,), 3, dtype=torch.uint8)}, path)
    read = reader(tmp_path, "state.safetensors")
    kept, copied = read("state")["w"], read("state", is_copied=True)["w"]

    fd = os.open(path, os.O_WRONLY)
    os.pwrite(fd, bytes([9]) * 1024, path.stat().st_size - 1024)
    os.close(fd)

    assert kept.unique().tolist() == [3]
    assert copied.unique().tolist() == [9]
