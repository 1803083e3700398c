"""What a load asks of a store: few requests, and each byte once."""

from __future__ import annotations

import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_by_torch

import hfshard
from hfshard.checkpoint.open_checkpoint import open_checkpoint, raw_tensors
from hfshard.checkpoint.ranged_folder import RangedFolder
from hfshard.distributed import StorageReader
from hfshard.errors import DamagedCheckpointError, IntegrityError
from hfshard.places import store_mirror
from hfshard.tensors.stored_tensor import iter_blocks
from tests.stores.saving.memory_store import MemoryStore

ADDRESS = "s3://models/bert"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


class CountingStore(MemoryStore):
    """Notes each range."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[str, int, int]] = []

    def read_into(self, found: Any, begin: int, target: memoryview) -> None:
        super().read_into(found, begin, target)
        self.ranges.append((found.name, begin, begin + len(target)))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> CountingStore:
    place = CountingStore()
    monkeypatch.setattr(store_mirror, "open_store", lambda address: place)
    return place


STATE = {f"layer.{i}.{name}": torch.randn(size) for i in range(8) for name, size in (("weight", 100_000), ("bias", 10))}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList([nn.Linear(1, 10) for _ in range(8)])
        for layer in self.layer:
            layer.weight = nn.Parameter(torch.zeros(100_000))


def put(store: CountingStore, directory: Path, **more: Any) -> None:
    hfshard.save_state_dict(STATE, directory, max_shard_size="1.7MB", **more)
    store.objects |= {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_load_asks_for_each_byte_once_by_few_requests(store: CountingStore, tmp_path: Path) -> None:
    put(store, tmp_path / "a")
    module = Layers()

    for verify in ("structure", "full"):
        for load in (
            lambda verify=verify: hfshard.load_state_dict(ADDRESS, verify=verify),
            lambda verify=verify: hfshard.load_model(module, ADDRESS, verify=verify),
        ):
            store.ranges.clear()
            store.requests.clear()
            load()
            for name in (FIRST, SECOND):
                spans = sorted(span[1:] for span in store.ranges if span[0] == name)
                assert spans[0] == (0, 32768)
                assert all(one[1] == other[0] for one, other in pairwise(spans))
                assert spans[-1][1] == len(store.objects[name])
            assert sorted(store.requests) == [
                "list",
                "list",
                f"read {FIRST}",
                f"read {FIRST}",
                f"read {SECOND}",
                f"read {SECOND}",
                "read model.safetensors.index.json",
            ]
    assert torch.equal(module.get_parameter("layer.7.weight"), STATE["layer.7.weight"])


def test_one_tensor_costs_its_bytes_and_the_header(store: CountingStore, tmp_path: Path) -> None:
    put(store, tmp_path / "a")
    for verify in ("structure", "full"):
        store.ranges.clear()
        loaded = hfshard.load_state_dict(ADDRESS, keys=["layer.6.weight"], verify=verify)
        assert torch.equal(loaded["layer.6.weight"], STATE["layer.6.weight"])
        asked = {name: [end - begin for other, begin, end in store.ranges if other == name] for name in (FIRST, SECOND)}
        assert asked == {FIRST: [], SECOND: [32768, 400_000]}


@pytest.mark.parametrize("keys", [None, ["layer.6.bias"]])
def test_full_reads_the_whole_file_once_where_only_that_has_a_checksum(
    store: CountingStore, tmp_path: Path, keys: list[str] | None
) -> None:
    put(store, tmp_path / "a")
    index = store.objects["model.safetensors.index.json"]
    store.objects["model.safetensors.index.json"] = index.replace(b'"tensor_digests"', b'"no_digests_of_any"')
    hfshard.load_state_dict(ADDRESS, keys=keys, verify="full")
    total = sum(end - begin for name, begin, end in store.ranges if name == SECOND)
    assert total == len(store.objects[SECOND])

    raw = bytearray(store.objects[SECOND])
    raw[-60] ^= 1
    store.objects[SECOND] = bytes(raw)
    with pytest.raises(IntegrityError, match=rf"Shard '{ADDRESS}/{SECOND}' is not what was saved: its sha256 is"):
        hfshard.load_state_dict(ADDRESS, keys=keys, verify="full")
    hfshard.load_state_dict(ADDRESS, keys=keys)


@pytest.mark.parametrize(("verify", "at"), [("structure", -60), ("full", -60), ("full", 40)])
def test_damage_is_found_on_the_way(store: CountingStore, tmp_path: Path, verify: Any, at: int) -> None:
    put(store, tmp_path / "a")
    raw = bytearray(store.objects[SECOND])
    position = at if at < 0 else raw.index(b"layer.7.bias") + 8  # "bias" becomes another name, in the index too
    raw[position] ^= 1
    store.objects[SECOND] = bytes(raw)
    if at > 0:
        renamed = bytes(raw[position - 8 : position + 4])
        index = store.objects["model.safetensors.index.json"]
        store.objects["model.safetensors.index.json"] = index.replace(b"layer.7.bias", renamed)
    with pytest.raises(IntegrityError) as caught:
        hfshard.load_state_dict(ADDRESS, verify=verify)
    assert caught.value.path == f"{ADDRESS}/{SECOND}"
    assert ("header" in caught.value.message) == (at > 0)
    if at < 0:
        assert caught.value.fqn in STATE
        module = Layers()
        with pytest.raises(IntegrityError, match="Tensor 'layer") as told:
            hfshard.load_model(module, ADDRESS, verify=verify)
        assert told.value.__notes__ == ["The module is half loaded: load it again before it is used."]
        hfshard.load_state_dict(ADDRESS, verify="none")


def test_a_stream_of_small_tensors_takes_few_requests(store: CountingStore, tmp_path: Path) -> None:
    state = {f"layer.{i}": torch.full((3000,), float(i)) for i in range(200)} | {"wide": torch.randn(400_000)}
    hfshard.save_state_dict(state, tmp_path / "a")
    store.objects = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}

    with open_checkpoint(RangedFolder(store, ADDRESS)) as checkpoint:
        for name, tensor in raw_tensors(checkpoint).items():
            assert b"".join(iter_blocks(tensor, 2**20)) == state[name].numpy().tobytes()

    assert sum(end - begin for _, begin, end in store.ranges) == len(store.objects["model.safetensors"])
    assert len(store.ranges) < 8


def test_torch_distributed_checkpoint_reads_from_a_store(store: CountingStore, tmp_path: Path) -> None:
    put(store, tmp_path / "a")
    wanted = {"layer.6.weight": torch.zeros(100_000)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it takes one process for a mistake
        load_by_torch(wanted, storage_reader=StorageReader(ADDRESS, verify="full"), no_dist=True)
    assert torch.equal(wanted["layer.6.weight"], STATE["layer.6.weight"])
    assert [end - begin for name, begin, end in store.ranges if name == SECOND] == [32768, 400_000]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_come_to_a_gpu(store: CountingStore, tmp_path: Path) -> None:
    put(store, tmp_path / "a")
    for verify in ("none", "full"):
        loaded = hfshard.load_state_dict(ADDRESS, device="cuda", verify=verify)
        assert all(torch.equal(tensor.cpu(), STATE[name]) and tensor.is_cuda for name, tensor in loaded.items())


def test_a_bar_counts_the_bytes_that_come(
    store: CountingStore, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    put(store, tmp_path / "a")
    hfshard.load_state_dict(ADDRESS, keys="*.weight", progress=True)
    assert "Loading: 100%" in capfd.readouterr().err


def test_full_refuses_files_without_checksums(store: CountingStore, tmp_path: Path) -> None:
    put(store, tmp_path / "a", checksum=None)
    with pytest.raises(DamagedCheckpointError, match="cannot be verified in full"):
        hfshard.load_state_dict(ADDRESS, verify="full")
    assert not [name for name, begin, _ in store.ranges if begin > 0]
