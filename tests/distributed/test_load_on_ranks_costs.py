"""What a load into a model that is spread over ranks costs each of them: bytes read, and memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import hfshard
from hfshard.format.index import Verify
from hfshard.shards.read_tensors import ReadMode
from tests.distributed.gloo import check_ranks
from tests.distributed.test_save_on_ranks_costs import number_in

LAYERS = 16
SIDE = 1024
MODEL_BYTES = LAYERS * SIDE * SIDE * 4
PART_BYTES = MODEL_BYTES / 2


def bytes_read_by(model: nn.Module, saved: Path, verify: Verify, read: ReadMode = "auto") -> int:
    before = number_in("/proc/self/io", "rchar")
    hfshard.load_model(model, saved, verify=verify, read=read)
    return number_in("/proc/self/io", "rchar") - before


def load_and_count(rank: int, saved: Path, layout: str, dtype: torch.dtype) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False, dtype=dtype) for _ in range(LAYERS)))
    if layout == "rows":
        fully_shard(model, mesh=mesh)
    else:
        parallelize_module(model, mesh, {"*": RowwiseParallel()})
    warm = nn.Linear(2, 2, bias=False)
    hfshard.load_model(fully_shard(warm, mesh=mesh), saved / "warm")

    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, code_before = (number_in("/proc/self/status", name) for name in ("VmRSS", "RssFile"))
    read = bytes_read_by(model, saved, "structure", "pread")
    code = number_in("/proc/self/status", "RssFile") - code_before  # libraries' pages that the machine had taken away
    peak = (number_in("/proc/self/status", "VmHWM") - before - max(0, code)) * 1024

    first: torch.Tensor = model[0].weight.full_tensor()  # type: ignore[operator, union-attr]
    assert torch.equal(first.float(), torch.arange(SIDE * SIDE).view(SIDE, SIDE).to(dtype).float())
    part = PART_BYTES * dtype.itemsize / 4
    assert PART_BYTES < read < 1.01 * PART_BYTES
    assert 0.9 * part < peak < 1.15 * part + 0.07 * MODEL_BYTES, f"{peak / MODEL_BYTES:.3f}"
    if layout == "rows":  # and of the files, each is verified by one of the ranks
        assert 0.9 * MODEL_BYTES < bytes_read_by(model, saved, "full") < 1.1 * MODEL_BYTES


@pytest.mark.parametrize(
    ("layout", "dtype"), [("rows", torch.float32), ("columns", torch.float32), ("rows", torch.bfloat16)]
)
def test_a_rank_reads_its_part_into_place(tmp_path: Path, layout: str, dtype: torch.dtype) -> None:
    weight = torch.arange(SIDE * SIDE, dtype=torch.float32).view(SIDE, SIDE)
    state = {"0.weight": weight} | {f"{number}.weight": weight + number for number in range(1, LAYERS)}
    hfshard.save_state_dict(state, tmp_path / "saved", max_shard_size="17MB", checksum="xxh3")
    hfshard.save_state_dict({"weight": torch.eye(2)}, tmp_path / "saved" / "warm")

    check_ranks(tmp_path / "ranks", 2, load_and_count, tmp_path / "saved", layout, dtype)
