"""Ranks load from a repo to which somebody pushes between the moments at which they look: all load one commit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import hfshard
from hfshard.errors import RankFailedError
from tests.distributed.gloo import await_file, check_ranks
from tests.helpers.tiny_bert import Bert, bert
from tests.hub.on_ranks import talking_to
from tests.hubserver.hub_server import Fault, HubServer

REPO = "org/moving"


def spread(model: Any) -> Any:
    return fully_shard(model)


def load_in_all_ways(repo: str | Path, cache: Path) -> dict[str, float]:
    """What each call loads: the one number that the whole of it is full of."""
    mine = spread(bert(-1))
    hfshard.load_model(mine, repo, cache_dir=cache / "1")
    like = spread(bert(-1)).state_dict()
    found = {
        "load_model": mine.state_dict(),
        "load_state_dict": hfshard.load_state_dict(repo, like=like, cache_dir=cache / "2"),
        "from_pretrained": Bert.from_pretrained(repo, parallelize=spread, cache_dir=cache / "3").state_dict(),
    }
    return {call: value_of(state) for call, state in found.items()}


def value_of(state: dict[str, Any]) -> float:
    whole = [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in state.values()]
    (value,) = {float(number) for tensor in whole for number in tensor.unique()}
    return value


def load_from_the_hub(rank: int, endpoint: str, place: Path) -> None:
    with talking_to(endpoint, place / f"home-{rank}"):
        load_in_all_ways(REPO, place / f"cache-{rank}")  # each of which finds one number


@pytest.mark.compat
def test_all_ranks_load_the_commit_that_one_has_found(hub_server: HubServer, tmp_path: Path) -> None:
    view = hub_server.create_repo(REPO)
    saved = []
    for value in range(8):
        bert(value).save_pretrained(tmp_path / str(value), max_shard_size=4696)
        saved.append({path.name: path.read_bytes() for path in (tmp_path / str(value)).iterdir() if path.is_file()})
    view.commit(dict(saved.pop()), "first")

    def move() -> None:
        if saved:
            view.commit(dict(saved.pop()), "next")

    hub_server.fail(Fault(match="GET info", kind="race", times=100, action=move))
    check_ranks(tmp_path / "ranks", 2, load_from_the_hub, hub_server.endpoint, tmp_path)
    assert not saved  # it has moved with every question


def when_opening(words: str, work: Callable[[], object]) -> None:
    """Do something, once, right before this process opens a file whose path has these words."""
    wanted = [words]

    def look(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and wanted and wanted[0] in str(args[0]):
            wanted.clear()
            work()

    sys.addaudithook(look)


def load_from_a_directory_hub(rank: int, place: Path) -> None:
    hub = place / "hub"
    has_found = place / "rank 0 has found a commit"

    def push() -> None:
        await_file(has_found)
        hfshard.push_checkpoint(place / "new", hub)

    if rank:
        when_opening("refs/heads/main", push)
    else:
        when_opening("/commits/", has_found.touch)
    loaded = hfshard.load_state_dict(hub, like=spread(bert(-1)).state_dict())
    assert value_of(loaded) == 1
    dist.barrier()
    assert load_in_all_ways(hub, place) == dict.fromkeys(("load_model", "load_state_dict", "from_pretrained"), 2)
    with pytest.raises(RankFailedError if rank else FileNotFoundError):
        hfshard.load_state_dict(place / "absent" if rank == 0 else hub, like=spread(bert(-1)).state_dict())


def test_all_ranks_load_one_commit_of_a_directory_hub(tmp_path: Path) -> None:
    bert(1).push_to_hub(tmp_path / "hub")
    bert(2).save_pretrained(tmp_path / "new")
    check_ranks(tmp_path / "ranks", 2, load_from_a_directory_hub, tmp_path)
