"""What huggingface_hub and safetensors write in their own way: a variant's index, names that share a tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file, save_model
from torch import nn

import hfshard

pytestmark = pytest.mark.compat

PATTERN = "model.fp16{suffix}.safetensors"
INDEX = "model.fp16.safetensors.index.json"


def state_dict(value: float = 1.0) -> dict[str, torch.Tensor]:
    """Two names for one tensor, and two more tensors; of 4000 bytes each."""
    shared = torch.full((1000,), value)
    return {"a": shared, "b": shared, "c": torch.full((1000,), value + 1), "d": torch.full((1000,), value + 2)}


def written(directory: Path, max_shard_size: int, pattern: str = PATTERN) -> Path:
    """The directory, with what huggingface_hub writes."""
    directory.mkdir()
    metadata = {"author": "me"}
    save_torch_state_dict(
        state_dict(), directory, filename_pattern=pattern, max_shard_size=max_shard_size, metadata=metadata
    )
    return directory


def check(loaded: dict[str, torch.Tensor], value: float = 1.0) -> None:
    expected = state_dict(value)
    assert loaded.keys() == expected.keys()
    assert loaded["a"] is loaded["b"]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("max_shard_size", [5000, 10**6], ids=["sharded", "single"])
def test_variant_and_shared_names_are_read(max_shard_size: int, tmp_path: Path) -> None:
    directory = written(tmp_path / "theirs", max_shard_size)
    assert (directory / INDEX).exists() == (max_shard_size == 5000)

    check(hfshard.load_state_dict(directory, variant="fp16"))
    assert list(hfshard.load_state_dict(directory, variant="fp16", keys="b")) == ["b"]
    assert hfshard.verify_checkpoint(directory, variant="fp16").ok
    index = hfshard.reshard_checkpoint(directory, tmp_path / "ours", max_shard_size="6KB", variant="fp16")
    assert index.tied_names == {"b": "a"}
    assert index.metadata == {"author": "me"}
    check(hfshard.load_state_dict(tmp_path / "ours", variant="fp16", verify="full"))


def test_save_replaces_the_variant_of_huggingface_hub(tmp_path: Path) -> None:
    directory = written(tmp_path / "out", 5000)
    hfshard.save_state_dict({"other": torch.ones(2)}, directory)

    hfshard.save_state_dict(state_dict(5.0), directory, variant="fp16", max_shard_size="13KB")

    check(hfshard.load_state_dict(directory, variant="fp16", verify="full"), 5.0)
    assert INDEX not in {path.name for path in directory.iterdir()}
    assert sorted(path.name for path in directory.glob("model.fp16-*")) == [
        f"model.fp16-0000{number}-of-00002.safetensors" for number in (1, 2)
    ]
    hfshard.save_state_dict(state_dict(6.0), directory, variant="fp16")
    assert sorted(path.name for path in directory.glob("model*")) == [
        "model.fp16.safetensors",
        "model.safetensors",
    ]
    check(hfshard.load_state_dict(directory, variant="fp16"), 6.0)
    assert list(hfshard.load_state_dict(directory)) == ["other"]


def test_variant_of_huggingface_hub_is_pushed_and_pulled(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    hfshard.push_checkpoint(written(tmp_path / "theirs", 5000), str(hub))
    check(hfshard.load_state_dict(hub, variant="fp16"))

    hfshard.pull_checkpoint(str(hub), tmp_path / "pulled", variant="fp16")
    check(hfshard.load_state_dict(tmp_path / "pulled", variant="fp16"))

    hfshard.save_state_dict(state_dict(3.0), tmp_path / "new", variant="fp16")
    hfshard.push_checkpoint(tmp_path / "new", str(hub))
    check(hfshard.load_state_dict(hub, variant="fp16"), 3.0)
    snapshot = hfshard.pull_checkpoint(str(hub), variant="fp16")
    assert [path.name for path in Path(snapshot).glob("model*")] == ["model.fp16.safetensors"]


def test_shared_names_of_safetensors_own_save_are_read(tmp_path: Path) -> None:
    model = nn.ModuleDict({"x": nn.Linear(3, 3, bias=False), "y": nn.Linear(3, 3, bias=False)})
    model["y"].weight = model["x"].weight
    save_model(model, str(tmp_path / "model.safetensors"))

    loaded = hfshard.load_state_dict(tmp_path)

    assert loaded.keys() == {"x.weight", "y.weight"}
    assert loaded["x.weight"] is loaded["y.weight"]


def test_a_size_that_is_the_name_of_a_tensor_ties_nothing(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    index = {"metadata": {"total_size": "a", "b": "a"}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    assert sorted(hfshard.load_state_dict(tmp_path)) == ["a", "b"]
