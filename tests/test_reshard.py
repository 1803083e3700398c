"""A checkpoint that is re-sharded is the one that a save with the new size would have written, bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import hfshard
from tests.helpers.tensor_bytes import assert_same
from tests.saving.helpers import SIZES, files_in, floats, odd

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.mark.parametrize("new", SIZES)
@pytest.mark.parametrize("old", SIZES)
@pytest.mark.parametrize("is_in_place", [False, True], ids=["elsewhere", "in place"])
def test_the_files_are_those_of_a_save(old: str, new: str, is_in_place: bool, tmp_path: Path) -> None:
    metadata = {"note": {"for": ["tests"]}} if old == new or old != "1MB" else {}
    for size in (old, new):
        hfshard.save_state_dict(floats(), tmp_path / size, max_shard_size=size, metadata=metadata)
    target = tmp_path / old if is_in_place else tmp_path / "new"
    index = hfshard.reshard_checkpoint(tmp_path / old, target, new)
    assert len(set(index.weight_map.values())) == {"6KB": 9, "9KB": 3, "1MB": 1}[new]
    assert files_in(target) == files_in(tmp_path / new)
    assert hfshard.verify_checkpoint(target).ok
    assert sorted(os.listdir(target)) == sorted(files_in(target))


@pytest.mark.parametrize("checksum", ["sha256", "xxh3", None])
@pytest.mark.parametrize("packing", ["greedy", "balanced"])
def test_arguments_mean_what_they_mean_in_a_save(checksum: Any, packing: Any, tmp_path: Path) -> None:
    hfshard.save_state_dict(floats(), tmp_path / "old", max_shard_size="1MB", variant="fp16")
    arguments = {"packing": packing, "checksum": checksum, "variant": "fp16"}
    want = hfshard.save_state_dict(floats(), tmp_path / "want", max_shard_size="9KB", **arguments)
    assert hfshard.reshard_checkpoint(tmp_path / "old", tmp_path / "new", "9KB", **arguments) == want
    assert files_in(tmp_path / "new") == files_in(tmp_path / "want")
    assert "model.safetensors.index.fp16.json" in files_in(tmp_path / "new")


@pytest.mark.parametrize("sizes", [("5KB", "1MB"), ("1MB", "5KB"), ("5KB", "5KB"), ("1MB", "1MB")])
def test_complex_tied_fp8_fp4_empty_and_scalar_tensors_come_through(sizes: tuple[str, str], tmp_path: Path) -> None:
    hfshard.save_state_dict(odd(), tmp_path / "old", max_shard_size=sizes[0])
    hfshard.reshard_checkpoint(tmp_path / "old", tmp_path / "new", sizes[1])
    loaded = hfshard.load_state_dict(tmp_path / "new", verify="full")
    assert_same(loaded, odd())
    assert loaded["tied"] is loaded["also tied"]
    hfshard.reshard_checkpoint(tmp_path / "new", tmp_path / "new", sizes[0])
    assert_same(hfshard.load_state_dict(tmp_path / "new", verify="full"), odd())


def test_a_dtype_that_torch_lacks_passes_through(tmp_path: Path) -> None:
    entries = {
        "__metadata__": {"format": "pt"},
        "six": {"dtype": "F6_E2M3", "shape": [8], "data_offsets": [0, 6]},
        "one": {"dtype": "U8", "shape": [2], "data_offsets": [6, 8]},
    }
    raw = json.dumps(entries).encode()
    (tmp_path / "old").mkdir()
    file = tmp_path / "old" / "model.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + b"sixbit!!")
    index = hfshard.reshard_checkpoint(tmp_path / "old", tmp_path / "new", 1)
    assert index.weight_map == {
        "six": "model-00001-of-00002.safetensors", "one": "model-00002-of-00002.safetensors",
    }  # fmt: skip
    assert (tmp_path / "new" / "model-00001-of-00002.safetensors").read_bytes().endswith(b" sixbit")
    assert (tmp_path / "new" / "model-00002-of-00002.safetensors").read_bytes().endswith(b" !!")
    assert index.total_parameters == 10
