"""What of a checkpoint is saved again: its order, its metadata, and its tensors as they are or cast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import hfshard
from hfshard.errors import InvalidArgumentError
from tests.helpers.tensor_bytes import assert_same
from tests.saving.helpers import files_in, floats, weights_in

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def test_a_tensor_too_large_for_its_file_goes_back_to_where_it_was(tmp_path: Path) -> None:
    large = {"embed": torch.ones(3000), **floats(), "head": torch.zeros(3000)}
    for size in ("9KB", "1MB"):
        hfshard.save_state_dict(large, tmp_path / size, max_shard_size=size)
    assert hfshard.CheckpointIndex.from_json(
        (tmp_path / "9KB" / "model.safetensors.index.json").read_bytes(), ""
    ).weight_map["head"] == "model-00004-of-00005.safetensors"  # fmt: skip
    hfshard.reshard_checkpoint(tmp_path / "9KB", tmp_path / "new", "1MB")
    assert files_in(tmp_path / "new") == files_in(tmp_path / "1MB")
    hfshard.reshard_checkpoint(tmp_path / "9KB", tmp_path / "same", "9KB")
    assert files_in(tmp_path / "same") == files_in(tmp_path / "9KB")


def test_what_stood_in_every_file_stands_in_every_file(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    save_file(floats(), tmp_path / "old" / "model.safetensors", metadata={"format": "pt", "made by": "hand"})
    hfshard.reshard_checkpoint(tmp_path / "old", tmp_path / "new", "9KB")
    for name in weights_in(tmp_path / "new"):
        with safe_open(tmp_path / "new" / name, "pt") as file:
            assert file.metadata() == {"hfshard": "1", "made by": "hand", "format": "pt"}
    hfshard.reshard_checkpoint(tmp_path / "new", tmp_path / "new", "1MB")
    with safe_open(tmp_path / "new" / "model.safetensors", "pt") as file:
        assert file.metadata()["made by"] == "hand"


@pytest.mark.parametrize("size", ["6KB", "1MB"])
@pytest.mark.parametrize(("old", "new"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float64", "float16")])
def test_a_cast_is_the_save_of_cast_tensors(old: str, new: str, size: str, tmp_path: Path) -> None:
    large = torch.randn(1_200_007, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    state_dict = {"large": large.to(getattr(torch, old)), "count": torch.arange(9)}
    state_dict |= {"odd": torch.tensor([1e-9, 1e9, float("inf"), float("nan"), -0.0], dtype=getattr(torch, old))}
    state_dict |= {"complex": torch.ones(3, dtype=torch.complex64)}
    hfshard.save_state_dict(state_dict, tmp_path / "old", max_shard_size=size)
    hfshard.reshard_checkpoint(tmp_path / "old", tmp_path / "new", size, dtype=new)
    cast = {name: state_dict[name].to(getattr(torch, new)) for name in ("large", "odd")}
    assert_same(hfshard.load_state_dict(tmp_path / "new", verify="full"), state_dict | cast)


def test_a_cast_says_so_in_the_config(tmp_path: Path) -> None:
    hfshard.save_state_dict(floats(), tmp_path / "m")
    for key, want in (("dtype", "dtype"), ("torch_dtype", "torch_dtype"), ("other", "dtype")):
        (tmp_path / "m" / "config.json").write_text(json.dumps({key: "float32", "n": 1}))
        hfshard.reshard_checkpoint(tmp_path / "m", tmp_path / key, dtype=torch.bfloat16)
        config = json.loads((tmp_path / key / "config.json").read_text())
        assert config[want] == "bfloat16"
        assert config["n"] == 1
        assert hfshard.verify_checkpoint(tmp_path / key).ok


@pytest.mark.parametrize("what", ["config", "fp8"])
def test_a_quantized_checkpoint_is_not_cast(what: str, tmp_path: Path) -> None:
    state_dict = floats() | ({"fp8": torch.ones(3).to(torch.float8_e4m3fn)} if what == "fp8" else {})
    hfshard.save_state_dict(state_dict, tmp_path / "q")
    if what == "config":
        (tmp_path / "q" / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    with pytest.raises(InvalidArgumentError, match=r"quantized .*dequantize the model first"):
        hfshard.reshard_checkpoint(tmp_path / "q", tmp_path / "new", dtype="bfloat16")
    assert not (tmp_path / "new").exists()
    hfshard.reshard_checkpoint(tmp_path / "q", tmp_path / "new", "6KB")
