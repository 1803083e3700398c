"""Ranks that save into a store together: each streams its own files, and what a failed one sent goes with the next."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hfshard
from hfshard._util.arguments import parse_address
from hfshard.stores.open_store import open_store
from tests.distributed.gloo import check_ranks
from tests.distributed.test_save_on_ranks_faults import fail_in_turn, rows, save
from tests.servers.stores import running
from tests.servers.stores.kinds import SERVICES

INDEX = "model.safetensors.index.json"


def objects_of(files: list[str], number: int) -> set[str]:
    """What the objects of a save are called, but for its id."""
    shards = {f"{file.removesuffix('.safetensors')}-{number:08d}-x.safetensors" for file in files}
    return {*shards, f"{INDEX.removesuffix('.json')}-{number:08d}-x.json", INDEX}


def shown(names: Iterable[str]) -> set[str]:
    return {re.sub(r"-[0-9a-f]{16}\b", "-x", name) for name in names}


def save_and_fail(rank: int, address: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    store = open_store(parse_address(address))
    index = hfshard.save_state_dict(rows(), address, max_shard_size="13MB")
    files = sorted(set(index.weight_map.values()))
    before = store.list_objects()
    assert shown(before) == objects_of(files, 1)
    assert len(files) == 2

    assert hfshard.save_state_dict(rows(), address, max_shard_size="13MB") == index
    assert store.list_objects() == before
    dist.barrier()
    for fault in fail_in_turn(rank):
        with fault.expected():
            save(address, fault.tensors)  # type: ignore[arg-type]
        dist.barrier()
        now = store.list_objects()
        assert before.items() <= now.items()  # shards of the one that failed stay, for the next save to delete
        assert {name for name in now if name.endswith(".json")} == {name for name in before if name.endswith(".json")}
        dist.barrier()

    second = hfshard.save_state_dict(rows() | {"rows1": rows()["rows1"] + 1}, address, max_shard_size="13MB")
    dist.barrier()
    names = shown(store.list_objects())
    number = max(int(name.split("-")[-2]) for name in names if name != INDEX)
    assert number > 1
    assert names == objects_of(sorted(set(second.weight_map.values())), number)


@pytest.mark.parametrize("scheme", ["s3"])
def test_each_rank_streams_its_files_and_those_of_one_that_failed_go_with_the_next_save(
    scheme: str, store_address: str, tmp_path: Path
) -> None:
    environment = dict(SERVICES[scheme].environment(running.url_of(scheme)))
    check_ranks(tmp_path / "ranks", 2, save_and_fail, store_address, environment)

    store = open_store(store_address)
    for name, found in store.list_objects().items():
        (tmp_path / name).write_bytes(store.read(found))
    loaded = hfshard.load_state_dict(tmp_path, verify="full")
    assert torch.equal(loaded["rows1"], torch.arange(3 << 19, dtype=torch.int64) + 2)
