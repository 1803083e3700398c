"""A re-shard takes a few buffers, and reads and writes each byte once (`pytest -s` shows the figures)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import hfshard
from tests.foreign.dcp_files import halves, save_dcp
from tests.helpers import processes
from tests.helpers.memory import MIB, peak_during

TOTAL_MIB = 128
"""More than the limit, so that a re-shard which held them all would be found."""
LIMIT_MIB = 80
"""What a re-shard may take, whatever the sizes."""
LIMIT_OF_PARTS_MIB = 160
"""The same for weights in parts of ranks, which are read ahead by several threads; 70 were measured."""
TENSORS = 8


def io_bytes() -> dict[str, int]:
    """Bytes that this process has read and written by system calls, cached or not."""
    with open("/proc/self/io") as counts:
        found = dict(line.split(": ") for line in counts.read().splitlines())
    return {"read": int(found["rchar"]), "written": int(found["wchar"])}


def measure(kind: str, total_mib: int, folder: str) -> None:
    """Save, then re-shard as `kind` says, in a process of its own, and print what it took as JSON."""
    torch.set_num_threads(1)
    source, target = os.path.join(folder, "source"), os.path.join(folder, "target")
    hfshard.save_state_dict({"warm": torch.ones(10)}, os.path.join(folder, "warm"))
    hfshard.reshard_checkpoint(os.path.join(folder, "warm"), os.path.join(folder, "warmer"))
    hfshard.reshard_checkpoint(os.path.join(folder, "warm"), os.path.join(folder, "warm"), low_disk=True)
    rows = total_mib * MIB // TENSORS // 4 // 1024
    state_dict = {f"layer.{i}.weight": torch.full((rows, 1024), float(i)) for i in range(TENSORS)}
    if kind == "bin":
        os.mkdir(source)
        torch.save(state_dict, os.path.join(source, "pytorch_model.bin"))
    elif kind == "dcp":
        save_dcp(Path(source), state_dict, {name: halves(one.shape, 1) for name, one in state_dict.items()})
    else:
        hfshard.save_state_dict(state_dict, source, max_shard_size=total_mib * MIB // 4)
    del state_dict
    by_kind: dict[str, dict[str, Any]] = {"cast": {"dtype": "bfloat16"}, "low_disk": {"low_disk": True}}
    options = by_kind.get(kind, {})
    place = source if kind in ("in_place", "low_disk") else target
    before = io_bytes()
    extra = peak_during(lambda: hfshard.reshard_checkpoint(source, place, total_mib * MIB // 2 + 8192, **options))
    after = io_bytes()
    print(json.dumps({"extra": extra} | {name: after[name] - before[name] for name in after}))


@pytest.mark.parametrize("kind", ["elsewhere", "in_place", "low_disk", "cast", "bin", "dcp"])
def test_a_reshard_takes_at_most_80_mib_and_one_pass(
    kind: str, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    child = processes.call(
        measure, kind, TOTAL_MIB, str(tmp_path), env=child_environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    said, complaints = child.communicate(120)
    assert child.returncode == 0, complaints
    print(f"\n{TOTAL_MIB} MiB, {kind}: {said}")
    found = json.loads(said)
    assert found["extra"] <= (LIMIT_OF_PARTS_MIB if kind == "dcp" else LIMIT_MIB) * MIB
    passes = 2 if kind == "bin" else 1  # a pickle is compared with its checksums before anything is written
    assert 0.99 * passes * TOTAL_MIB * MIB <= found["read"] <= 1.02 * passes * TOTAL_MIB * MIB
    assert found["written"] <= 1.02 * TOTAL_MIB * MIB / (2 if kind == "cast" else 1)
