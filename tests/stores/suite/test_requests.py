"""What copies ask of a store: every byte once, and few requests, however many tensors there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hfshard
from tests.stores.services.fault_proxy import FaultProxy
from tests.stores.suite.conftest import Place

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
