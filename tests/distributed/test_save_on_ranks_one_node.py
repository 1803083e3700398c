"""Four processes of one machine that load one checkpoint at once read it from the disk once, not four times."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfshard
from tests.distributed.gloo import check_ranks
from tests.distributed.test_save_on_ranks_costs import number_in
from tests.helpers.page_cache import drop

RANKS = 4
LAYERS = 8
SIDE = 1024
MODEL_BYTES = LAYERS * SIDE * SIDE * 4
MOST_READ = 1.05 * MODEL_BYTES

Load = Callable[[Path], Iterable[torch.Tensor]]


def whole(**options: Any) -> Load:
    return lambda saved: hfshard.load_state_dict(saved, **options).values()


def names(rank: int) -> Load:
    part = LAYERS // RANKS
    return whole(keys=[f"{number}.weight" for number in range(rank * part, (rank + 1) * part)])


def rows(**options: Any) -> Load:
    from torch.distributed.fsdp import fully_shard

    def load(saved: Path) -> Iterable[torch.Tensor]:
        with torch.device("meta"):
            layers = LAYERS if saved.name == "saved" else 1
            model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(layers)))
        hfshard.load_model(fully_shard(model), saved, **options)
        return [one.to_local() for one in model.parameters()]  # type: ignore[attr-defined]

    return load


def sum_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Read every byte."""
    return torch.stack([one.detach().sum(dtype=torch.float64) for one in tensors]).sum()


def load_cold(rank: int, place: Path) -> None:
    ways = {
        "whole": whole(),
        "whole, full": whole(verify="full"),
        "whole, pread": whole(read="pread"),
        "names": names(rank),
        "rows": rows(),
        "rows, full": rows(verify="full"),
        "small tensors": whole(),
    }
    found = {}
    for way, load in ways.items():
        saved = place / ("many" if way == "small tensors" else "saved")
        if way != "names":
            sum_of(load(place / "small"))  # so that what is imported, or first called, is not counted
        torch.distributed.barrier()
        if rank == 0 and not drop(*saved.glob("*.safetensors")):
            (place / "not cold").write_text(way)
        torch.distributed.barrier()
        before = number_in("/proc/self/io", "read_bytes")
        total = sum_of(load(saved))
        read = torch.tensor(number_in("/proc/self/io", "read_bytes") - before)
        gc.collect()  # a model under FSDP2 refers to itself, and a file that is mapped stays in the page cache
        torch.distributed.all_reduce(read)
        if not way.startswith(("whole", "small")):
            torch.distributed.all_reduce(total)
        found[way] = (int(read), float(total))
    if rank == 0:
        print({way: round(read / MODEL_BYTES, 3) for way, (read, _) in found.items()})
    # Eight layers of 0, 1 ... 7; and 256 tensors of 0, 1 ... 255, each of 32,768 elements.
    expected = dict.fromkeys(ways, 29_360_128.0) | {"small tensors": 1_069_547_520.0}
    assert {way: total for way, (_, total) in found.items()} == expected
    if not (place / "not cold").exists():
        assert {way: read for way, (read, _) in found.items() if read > MOST_READ} == {}


def test_four_processes_read_a_cold_checkpoint_once(tmp_path: Path) -> None:
    state = {f"{number}.weight": torch.full((SIDE, SIDE), float(number)) for number in range(LAYERS)}
    hfshard.save_state_dict(state, tmp_path / "saved", max_shard_size="9MB", checksum="xxh3")
    hfshard.save_state_dict({"0.weight": state["0.weight"]}, tmp_path / "small", checksum="xxh3")
    many = {f"{number}": torch.full((32_768,), float(number)) for number in range(256)}
    hfshard.save_state_dict(many, tmp_path / "many", checksum="xxh3")
    if not Path("/proc/self/io").exists():
        pytest.skip("NO COUNT OF BYTES HERE: that four processes read a checkpoint once is not tested")

    check_ranks(tmp_path / "ranks", RANKS, load_cold, tmp_path)

    if (tmp_path / "not cold").exists():
        pytest.skip("NO COLD FILES HERE: that four processes read a checkpoint once is not tested")
