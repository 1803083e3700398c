"""What is asked of a store: every byte once, and few requests, however many tensors and other objects there are."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

import hfshard
from tests.servers.stores.fault_proxy import FaultProxy
from tests.stores.suite.conftest import Place
from tests.stores.suite.own_code import directory_with_code

pytestmark = pytest.mark.parametrize("scheme", ["s3"])

NUMBER, SIZE = 200, 20_000
HEADERS = 4 * 32 * 1024
"""What may be read beside the tensors: the headers of the shards, the index, the config."""


@pytest.fixture
def counted(store: Place, proxy: FaultProxy) -> Place:
    """200 tensors of 80,000 bytes in two shards, in a store."""
    state = {f"t{number}": torch.full((SIZE,), float(number)) for number in range(NUMBER)}
    hfshard.save_state_dict(state, store.path, max_shard_size="10MB")
    proxy.clear()
    return store


def _read(proxy: FaultProxy) -> tuple[int, int]:
    gets = proxy.requests("get")
    return len(gets), sum(request.bytes_down for request in gets)


def test_a_pull_reads_every_byte_once(counted: Place, proxy: FaultProxy, tmp_path: Path) -> None:
    hfshard.pull_checkpoint(counted.path, tmp_path / "new")

    count, read = _read(proxy)
    assert count <= 24
    assert 16_000_000 <= read <= 16_000_000 + HEADERS
    proxy.clear()
    hfshard.push_checkpoint(counted.path, tmp_path / "hub")
    count, read = _read(proxy)
    assert count <= 16
    assert 16_000_000 <= read <= 16_000_000 + HEADERS
    assert torch.equal(hfshard.load_state_dict(tmp_path / "hub", verify="full")["t7"], torch.full((SIZE,), 7.0))


def test_a_reshard_in_place_reads_every_byte_once_and_sends_it_once(counted: Place, proxy: FaultProxy) -> None:
    hfshard.reshard_checkpoint(counted.path, counted.path, "1GB")

    count, read = _read(proxy)
    assert count <= 24
    assert 16_000_000 <= read <= 16_000_000 + HEADERS
    sent = sum(request.bytes_up for request in proxy.requests())
    assert 16_000_000 <= sent <= 16_100_000
    assert hfshard.load_state_dict(counted.path, keys=["t9"])["t9"][0].item() == 9


def test_objects_in_folders_below_cost_no_request(
    store: Place, proxy: FaultProxy, tmp_path: Path, modules_cache: Path
) -> None:
    directory = directory_with_code(tmp_path / "net")
    weights = {"part.weight": torch.ones(3, 2), "part.bias": torch.arange(3.0)}

    def load_with_code() -> None:
        net: Any = hfshard.load_model(AutoModel, store.path, trust_remote_code=True)
        assert torch.equal(net.part.bias, torch.arange(3.0))

    acts: dict[str, Callable[[], Any]] = {
        "push": lambda: hfshard.push_checkpoint(directory, store.path),
        "push again": lambda: hfshard.push_checkpoint(directory, store.path),
        "save": lambda: hfshard.save_state_dict({**weights, "more": torch.ones(1)}, store.path),
        "save back": lambda: hfshard.save_state_dict(weights, store.path),
        "save again": lambda: hfshard.save_state_dict(weights, store.path),
        "load": lambda: hfshard.load_state_dict(store.path),
        "load in full": lambda: hfshard.load_state_dict(store.path, verify="full"),
        "load with code": load_with_code,
        "verify": lambda: hfshard.verify_checkpoint(store.path),
    }

    def counted() -> dict[str, dict[str, int]]:
        found = {}
        for name, act in acts.items():
            proxy.clear()
            act()
            kinds = [request.kind for request in proxy.requests()]
            found[name] = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
        return found

    counted()
    before = counted()
    folders = ("logs/1", "code/of/others", "custom_generate/old", "runs/checkpoint-00000001")
    with ThreadPoolExecutor(8) as pool:  # with what was saved, more than a page of a listing
        list(pool.map(lambda number: store.put(f"{folders[number % 4]}/{number}.txt", b"x"), range(1000)))

    assert counted() == before
    looks = {"list": 6, "get": 2}  # the place and "code" before, in and after the save; the code there
    sent = {"list": 2, "put": 4, "delete_many": 1, "uploads": 1}  # shard, index, plain copies of config and index
    assert before == {
        "push": {**looks, "list": 7, "copy": 1, "put": 3, "delete_many": 1, "uploads": 1},
        "push again": looks,
        "save": sent,
        "save back": sent,
        "save again": {"list": 1},
        "load": {"list": 1, "get": 2},
        "load in full": {"list": 1, "get": 2},
        "load with code": {"list": 3, "get": 4},
        "verify": {"list": 3, "get": 3},  # of a checkpoint, of a run, of a model; index, shard, plain index
    }
