"""Ranks that load one checkpoint of the Hub: one of them asks for it, and one of each cache downloads it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import hfshard
from hfshard.errors import HubNotFoundError, RankFailedError
from tests.distributed.gloo import run_ranks
from tests.servers.hub.hub_server import HubServer

TENSORS = {name: torch.arange(4000.0) + number for number, name in enumerate("ab")}


def load_from_hub(rank: int, place: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    like: dict[str, Any] = {name: distribute_tensor(torch.zeros(4000), mesh, [Shard(0)]) for name in TENSORS}
    with pytest.raises(HubNotFoundError if rank == 0 else RankFailedError, match=r"HubNotFoundError|no repo"):
        hfshard.load_state_dict("org/absent", like=like)
    for cache in (place / "common", place / f"of-{rank}"):
        state = hfshard.load_state_dict("org/m", like=like, cache_dir=cache, verify="full")
        assert torch.equal(state["b"].full_tensor(), TENSORS["b"])  # type: ignore[attr-defined]
        refs = cache / "models--org--m" / "refs" / "main"
        assert len(refs.read_text()) == 40


def test_one_rank_asks_the_hub_and_one_of_each_cache_downloads(
    hub_server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hfshard.save_state_dict(TENSORS, tmp_path / "saved", max_shard_size="20KB")
    files = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    hub_server.create_repo("org/m")
    hub_server.repo("org/m").commit(dict(files), "Save")
    hub_server.clear_log()
    for name, value in hub_server.environment(home=tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")

    ends = run_ranks(tmp_path / "ranks", 2, load_from_hub, tmp_path)

    assert [end.status for end in ends] == [0, 0], "\n".join(end.words for end in ends)
    asked = Counter((request.kind, request.path.partition("?")[0].count("/revision/")) for request in hub_server.log)
    assert asked == {
        ("info", 0): 1 + 2,  # of the repo that is absent, and of main for two loads
        ("info", 1): 1 + 2,  # of the commit, for each cache
        ("resolve_get", 0): 1 + 2,
        ("lfs_batch", 0): 1 + 2,
        ("storage_get", 0): 2 * (1 + 2),
    }
