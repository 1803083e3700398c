"""Ranks that save into a store together: each streams its own files, and a rank that fails leaves none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hfshard
from hfshard._util.addresses import parse_address
from hfshard.stores.opening import open_store
from tests.distributed.gloo import check_ranks
from tests.distributed.saving.test_faults import fail_in_turn, rows, save
from tests.stores.services import running
from tests.stores.services.kinds import SERVICES


def save_and_fail(rank: int, address: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    store = open_store(parse_address(address))
    index = hfshard.save_state_dict(rows(), address, max_shard_size="13MB")
    before = store.list_objects()
    assert before.keys() == {*index.weight_map.values(), "model.safetensors.index.json"}
    assert len(before) == 3

    assert hfshard.save_state_dict(rows(), address, max_shard_size="13MB") == index
    assert store.list_objects() == before
    dist.barrier()
    for fault in fail_in_turn(rank):
        with fault.expected():
            save(address, fault.tensors)  # type: ignore[arg-type]
        dist.barrier()
        assert store.list_objects() == before
        dist.barrier()

    second = hfshard.save_state_dict(rows() | {"rows1": rows()["rows1"] + 1}, address, max_shard_size="13MB")
    assert second.weight_map["rows0"] == index.weight_map["rows0"]
    dist.barrier()
    assert store.list_objects().keys() == {*second.weight_map.values(), "model.safetensors.index.json"}


@pytest.mark.parametrize("scheme", ["s3"])
def test_each_rank_streams_its_files_and_one_that_fails_leaves_none(
    scheme: str, store_address: str, tmp_path: Path
) -> None:
    environment = dict(SERVICES[scheme].environment(running.url_of(scheme)))
    check_ranks(tmp_path / "ranks", 2, save_and_fail, store_address, environment)

    store = open_store(store_address)
    for name, found in store.list_objects().items():
        (tmp_path / name).write_bytes(store.read(found))
    loaded = hfshard.load_state_dict(tmp_path, verify="full")
    assert torch.equal(loaded["rows1"], torch.arange(3 << 19, dtype=torch.int64) + 2)
