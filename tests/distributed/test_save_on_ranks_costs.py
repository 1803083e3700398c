"""What a save costs each rank: memory, and bytes written and sent."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hfshard
from tests.distributed.gloo import check_ranks

MODEL_BYTES = 128 << 20


def number_in(path: str, key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+)", Path(path).read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def save_and_count(rank: int, place: Path, dim: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))
    shape = (1024, 2048) if dim else (512, 4096)  # of this rank's half of 16 MiB
    state: dict[str, torch.Tensor] = {
        f"w{number}": DTensor.from_local(torch.full(shape, float(rank)), mesh, [Shard(dim)], run_check=False)
        for number in range(8)
    }
    hfshard.save_state_dict({"w": state["w0"]}, place / "warm")
    dist.barrier()

    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = number_in("/proc/self/status", "VmRSS")
    wrote = number_in("/proc/self/io", "wchar")
    hfshard.save_state_dict(state, place / "out", max_shard_size="17MiB")
    peak = number_in("/proc/self/status", "VmHWM")
    wrote = number_in("/proc/self/io", "wchar") - wrote

    assert (peak - before) * 1024 < 0.3 * MODEL_BYTES  # the windows of 4 MiB, whatever the model's size
    # Half of the files, and half of the other half's bytes sent.
    assert 0.74 < wrote / MODEL_BYTES < 0.76


@pytest.mark.parametrize("dim", [0, 1])
def test_each_rank_needs_some_windows_and_writes_its_share(tmp_path: Path, dim: int) -> None:
    check_ranks(tmp_path / "ranks", 2, save_and_count, tmp_path, dim)

    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 8
    assert hfshard.load_state_dict(tmp_path / "out")["w7"].mean() == 0.5
