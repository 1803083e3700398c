"""What is saved to a place is what lies there and loads, wherever the place is."""

from __future__ import annotations

import json
import secrets
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import nn

import hfshard
from hfshard.errors import CheckpointNotFoundError, InvalidArgumentError
from tests.servers.stores.buckets import Bucket
from tests.stores.suite.conftest import Place, usual_name


def _state(value: float, size: int = 600) -> dict[str, torch.Tensor]:
    shared = torch.full((size,), value)
    return {"a.weight": shared, "a.tied": shared, "b.weight": torch.arange(size) * value, "c": torch.tensor(value)}


def _load_stock(place: Place) -> dict[str, torch.Tensor]:
    """As huggingface_hub's readers do: by the index, else the single file."""
    root = place.synced()
    index = root / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    return {name: tensor for file in files for name, tensor in load_file(root / file).items()}


def test_saves_replace_each_other_whole(place: Place) -> None:
    for number, limit in enumerate(["3KB", "1GB", "5KB", "3KB", "3KB"]):
        state = _state(float(number // 2 + 1))
        index = hfshard.save_state_dict(state, place.path, max_shard_size=limit, metadata={"note": f"n{number}"})

        loaded = hfshard.load_state_dict(place.path, verify="full")
        assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
            name: tensor.tolist() for name, tensor in state.items()
        }
        assert loaded["a.tied"] is loaded["a.weight"]
        assert list(hfshard.load_state_dict(place.path, keys="b.*")) == ["b.weight"]
        stock = _load_stock(place)
        assert sorted(stock) == ["a.tied", "b.weight", "c"]
        assert torch.equal(stock["b.weight"], state["b.weight"])
        weights = [usual_name(name) for name in place.files() if name.endswith(".safetensors")]
        assert sorted(weights) == sorted(name for name in index.files if name.endswith(".safetensors"))
        assert hfshard.verify_checkpoint(place.path).ok


def test_variants_and_what_users_put_there_stay(place: Place) -> None:
    place.put("README.md", b"mine")
    place.put("data/train.txt", b"text")
    hfshard.save_state_dict({"w": torch.ones(3)}, place.path)
    hfshard.save_state_dict({"w": torch.ones(3, dtype=torch.float16)}, place.path, variant="fp16")
    hfshard.save_state_dict({"w": torch.zeros(3)}, place.path)

    assert hfshard.load_state_dict(place.path)["w"].tolist() == [0, 0, 0]
    assert hfshard.load_state_dict(place.path, variant="fp16", verify="full")["w"].dtype == torch.float16
    files = place.files()
    assert (files["README.md"], files["data/train.txt"]) == (b"mine", b"text")


def test_what_others_have_put_there_is_loaded_and_replaced(place: Place) -> None:
    index = {"metadata": {"total_size": 8}, "weight_map": {"x": "model-00001-of-00002.safetensors", "y": "model-00002-of-00002.safetensors"}}  # noqa: E501  # fmt: skip
    place.put("model-00001-of-00002.safetensors", save({"x": torch.ones(1)}))
    place.put("model-00002-of-00002.safetensors", save({"y": torch.ones(1)}))
    place.put("model.safetensors.index.json", json.dumps(index).encode())
    assert hfshard.load_state_dict(place.path)["y"].tolist() == [1]

    hfshard.save_state_dict({"x": torch.zeros(1)}, place.path)

    assert {name: tensor.tolist() for name, tensor in _load_stock(place).items()} == {"x": [0]}
    assert len([name for name in place.files() if name.endswith(".safetensors")]) == 1


def test_a_module_is_saved_and_loaded(place: Place) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    hfshard.save_model(model, place.path, max_shard_size=60)
    other = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    info: Any = hfshard.load_model(other, place.path, verify="full", output_loading_info=True)[1]

    assert not any(info.values())
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    assert hfshard.save_model(model, place.path, is_main_process=False) is None


@pytest.mark.parametrize("name", ["a b", "ünï/cödé", "a+b", "50%", "x=1&y", "~", "#1", "a%20b"])
@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_odd_prefixes_are_taken_as_they_are(store: Place, name: str) -> None:
    odd = store.below(name)
    hfshard.save_state_dict({"w": torch.ones(2)}, odd.path)

    assert hfshard.load_state_dict(odd.path, verify="full")["w"].tolist() == [1, 1]
    assert {file.partition(f"{name}/")[1] for file in store.files()} == {f"{name}/"}
    with pytest.raises(CheckpointNotFoundError):
        hfshard.load_state_dict(store.path)
    hfshard.save_state_dict({"w": torch.zeros(2)}, store.path)  # beside it, and not over it
    assert hfshard.load_state_dict(odd.path)["w"].tolist() == [1, 1]


@pytest.mark.parametrize("scheme", ["s3"])
def test_what_only_a_directory_can_do_is_refused(store: Place) -> None:
    hfshard.save_state_dict(_state(1.0), store.path)
    with pytest.raises(InvalidArgumentError, match="low_disk"):
        hfshard.reshard_checkpoint(store.path, store.path, low_disk=True)
    with pytest.raises(InvalidArgumentError, match="revision"):
        hfshard.pull_checkpoint(store.path, store.folder / "x", revision="main")
    with pytest.raises(InvalidArgumentError, match=r"which has no cache\. Pass local_dir"):
        hfshard.pull_checkpoint(store.path)
    with pytest.raises(InvalidArgumentError, match="commit_message is for a hub"):
        hfshard.push_checkpoint(store.folder, store.path, commit_message="no")
    assert not (store.folder / "x").exists()


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_bucket_without_a_prefix_is_a_place(scheme: str, bucket: Bucket) -> None:
    root = type(bucket)(bucket.url, f"root-{secrets.token_hex(6)}")
    root.create()
    hfshard.save_state_dict({"w": torch.ones(2)}, f"{scheme}://{root.name}", max_shard_size="1KB")
    hfshard.save_state_dict({"w": torch.zeros(2)}, f"{scheme}://{root.name}/", max_shard_size="1KB")

    assert hfshard.load_state_dict(f"{scheme}://{root.name}", verify="full")["w"].tolist() == [0, 0]
    assert hfshard.verify_checkpoint(f"{scheme}://{root.name}/").ok
    assert sorted(map(usual_name, root.sizes())) == [
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "model.safetensors.index.json",
    ]
