"""The questions about many ranks, small: what a thousand compute, and what a save costs each of two."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hfshard
from tests import REPOSITORY
from tests.distributed.gloo import check_ranks

SCRIPTS = str(REPOSITORY / "scripts")


@pytest.fixture(autouse=True)
def bench_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)


def simulated(model: str, mesh: str, rank: int) -> dict[str, Any]:
    from bench.questions.ranks import SimulatedRank

    one = SimulatedRank(model, mesh, rank, is_small=True)
    one.unite()
    one.plan()
    one.rounds()
    result: dict[str, Any] = one.result()
    return result


def test_64_ranks_of_two_wide_layers() -> None:
    found = [simulated("dense", "2-d", rank) for rank in (0, 63)]
    # Two layers of nine tensors, and three more; 2 x 6.38 GB of the layers and 2 x 4.2 GB of the vocabulary.
    assert [(one["tensors"], one["bytes"], one["files"], one["owners"]) for one in found] == [
        (21, 21_156_233_216, 5, 5)
    ] * 2
    # The largest file has the embedding, q, k and v: 4,806,672,384 bytes in windows of 4 MiB.
    assert [one["rounds"] for one in found] == [1146] * 2
    for one in found:
        assert one["sent"] <= 21_156_233_216 / 64 * 1.01
        assert one["heard"] < 10_000


def test_64_ranks_of_two_layers_of_experts() -> None:
    found = simulated("moe", "fsdp", 5)

    assert (found["tensors"], found["files"]) == (1553, 8)
    assert found["sent"] <= found["bytes"] / 64 * 1.05


def save_tiny(rank: int, place: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    sys.path.insert(0, SCRIPTS)
    from bench.harness.group_saves import measure

    mesh = init_device_mesh("cpu", (2,))
    state = {
        f"w{number}": DTensor.from_local(torch.full((512, 1024), float(rank)), mesh, [Shard(0)], run_check=False)
        for number in range(4)
    }
    found = measure(lambda: hfshard.save_state_dict(state, place / "out", max_shard_size="5MB"), flushes=True)

    # Four files of 4 MiB: each rank writes two, and sends its halves of the two others; a status byte for each round.
    assert 8 << 20 <= found["written"] < (8 << 20) + (128 << 10)
    assert found["sent"] == (4 << 20) + 2


def test_each_of_two_ranks_writes_half_and_sends_a_quarter(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, save_tiny, tmp_path)
