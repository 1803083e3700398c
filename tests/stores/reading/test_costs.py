"""What a load asks of a store: few requests, and each byte once."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfshard
from hfshard.errors import DamagedCheckpointError, IntegrityError
from hfshard.loading import far
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
    monkeypatch.setattr(far, "open_store", lambda address: place)
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
        with pytest.raises(IntegrityError, match="Tensor 'layer"):
            hfshard.load_model(module, ADDRESS, verify=verify)
        hfshard.load_state_dict(ADDRESS, verify="none")


def test_full_refuses_files_without_checksums(store: CountingStore, tmp_path: Path) -> None:
    put(store, tmp_path / "a", checksum=None)
    with pytest.raises(DamagedCheckpointError, match="can't be verified in full"):
        hfshard.load_state_dict(ADDRESS, verify="full")
    assert not [name for name, begin, _ in store.ranges if begin > 0]
