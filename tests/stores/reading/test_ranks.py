"""Ranks that load from a store: each asks for its own ranges, and all load the same save or none."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfshard
from hfshard.errors import CheckpointChangedError, IntegrityError, RankFailedError
from hfshard.format.index import Verify
from hfshard.places import place as places
from hfshard.places import store_mirror
from tests.distributed.gloo import check_ranks
from tests.stores.reading.test_costs import CountingStore
from tests.stores.saving.memory_store import MemoryStore

ADDRESS = "s3://models/bert"
ROWS, COLUMNS = 4096, 256
"""Of a weight of 4 MiB, which is half a shard."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(COLUMNS, ROWS, bias=False)
        self.columns = nn.Linear(ROWS, COLUMNS)


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2,))


def _objects(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def _store(objects: dict[str, bytes]) -> CountingStore:
    store = CountingStore()
    store.objects = dict(objects)
    vars(store_mirror)["open_store"] = lambda address: store
    return store


def _load(rank: int, saved: Path) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    store = _store(_objects(saved))
    expected = hfshard.load_state_dict(saved)
    whole = sum(tensor.nbytes for tensor in expected.values())
    net: Any = Net()
    fully_shard(net, mesh=_mesh())
    for verify in ("structure", "full"):
        store.ranges.clear()
        hfshard.load_model(net, ADDRESS, verify=verify)
        asked = sum(end - begin for name, begin, end in store.ranges if name.endswith(".safetensors"))
        assert asked < whole * (
            0.52 if verify == "structure" else 1.1
        )  # full: of the files, each is hashed by one rank
        for name, parameter in net.state_dict().items():
            assert torch.equal(parameter.full_tensor(), expected[name])

    split = parallelize_module(Net(), _mesh(), {"rows": ColwiseParallel(), "columns": RowwiseParallel()})
    loaded = hfshard.load_state_dict(ADDRESS, like=split.state_dict())
    assert torch.equal(loaded["columns.weight"].full_tensor(), expected["columns.weight"])  # type: ignore[attr-defined]
    assert torch.equal(loaded["rows.weight"].full_tensor(), expected["rows.weight"])  # type: ignore[attr-defined]


def _refuse(rank: int, saved: Path, other: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    net: Any = Net()
    fully_shard(net, mesh=_mesh())
    before = {name: tensor.to_local().clone() for name, tensor in net.state_dict().items()}
    objects = _objects(saved)
    _store(_objects(other) if rank else objects)
    with pytest.raises(CheckpointChangedError, match="Ranks 0 and 1 have different checkpoints in 's3://models/bert'"):
        hfshard.load_model(net, ADDRESS)

    damaged = dict(objects)
    name = max(name for name in objects if name.endswith(".safetensors"))
    damaged[name] = objects[name][:-1] + bytes([objects[name][-1] ^ 1])
    _store(damaged)
    with pytest.raises((IntegrityError, RankFailedError)):
        hfshard.load_model(net, ADDRESS, verify="full")
    assert all(torch.equal(tensor.to_local(), before[name]) for name, tensor in net.state_dict().items())


def _overtake(rank: int, saved: Path, other: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    old, new = _objects(saved), _objects(other)
    expected = hfshard.load_state_dict(other)
    checks: dict[Verify, tuple[int, ...]] = {"structure": (1, 2, 4, 7, 10), "full": (2, 5)}
    for verify, requests in checks.items():
        # Of one rank, before which the save comes; for the other one it comes later.
        for request in requests:
            net: Any = Net()
            fully_shard(net, mesh=_mesh())
            store = _store(old)
            asked = count(1)

            def replace(
                kind: str, name: str, store: CountingStore = store, asked: Any = asked, at: int = request
            ) -> None:
                if next(asked) == (at if rank == at % 2 else at + 2):
                    store.objects = dict(new)

            store.before = replace
            hfshard.load_model(net, ADDRESS, verify=verify)
            found = {name: tensor.full_tensor() for name, tensor in net.state_dict().items()}
            is_new = [torch.equal(tensor, expected[name]) for name, tensor in found.items()]
            assert is_new in ([True] * 3, [False] * 3)
            if request < 4:
                assert is_new == [True] * 3


def in_a_store(directory: Path, save: Callable[[str], Any], *, is_new: bool = False) -> Path:
    """Save into a store, and put all of its objects into a directory.

    Args:
        directory: Made.
        save: Saves to an address.
        is_new: Whether it is the second save there.
    """
    store = MemoryStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places, "open_store", lambda address: store)
        if is_new:
            hfshard.save_model(nn.Linear(1, 1), ADDRESS)
        save(ADDRESS)
    return store.into(directory)


def _saved(directory: Path, *, is_new: bool = False) -> Path:
    return in_a_store(directory, lambda place: hfshard.save_model(Net(), place, max_shard_size="5MB"), is_new=is_new)


def _uploaded(directory: Path, *, is_new: bool = False) -> Path:
    hfshard.save_model(Net(), directory, max_shard_size="5MB")
    return directory


def test_each_rank_asks_for_its_own_bytes(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, _load, _saved(tmp_path / "saved"))


@pytest.mark.parametrize("made", [_saved, _uploaded])
def test_ranks_that_find_different_saves_load_nothing(tmp_path: Path, made: Callable[..., Path]) -> None:
    check_ranks(tmp_path / "ranks", 2, _refuse, made(tmp_path / "one"), made(tmp_path / "two", is_new=True))


@pytest.mark.parametrize("made", [_saved, _uploaded])
def test_ranks_that_a_save_overtakes_start_again_together(tmp_path: Path, made: Callable[..., Path]) -> None:
    check_ranks(tmp_path / "ranks", 2, _overtake, made(tmp_path / "one"), made(tmp_path / "two", is_new=True))
