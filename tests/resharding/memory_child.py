"""One re-shard in a fresh process, and the memory and bytes that it took: run by test_reshard_memory.py."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

import hfshard
from tests.helpers.memory_child import MIB, peak_during

TENSORS = 16


def io_bytes() -> dict[str, int]:
    """Bytes that this process has read and written by system calls, cached or not."""
    with open("/proc/self/io") as counts:
        found = dict(line.split(": ") for line in counts.read().splitlines())
    return {"read": int(found["rchar"]), "written": int(found["wchar"])}


def main(kind: str, total_mib: int, folder: str) -> None:
    """Save, then re-shard as `kind` says, and print what it took as JSON."""
    torch.set_num_threads(1)
    source, target = os.path.join(folder, "source"), os.path.join(folder, "target")
    hfshard.save_state_dict({"warm": torch.ones(10)}, os.path.join(folder, "warm"))
    hfshard.reshard_checkpoint(os.path.join(folder, "warm"), os.path.join(folder, "warmer"))
    rows = total_mib * MIB // TENSORS // 4 // 1024
    state_dict = {f"layer.{i}.weight": torch.full((rows, 1024), float(i)) for i in range(TENSORS)}
    if kind == "bin":
        os.mkdir(source)
        torch.save(state_dict, os.path.join(source, "pytorch_model.bin"))
    else:
        hfshard.save_state_dict(state_dict, source, max_shard_size=total_mib * MIB // 8)
    del state_dict
    by_kind: dict[str, dict[str, Any]] = {"cast": {"dtype": "bfloat16"}, "low_disk": {"low_disk": True}}
    options = by_kind.get(kind, {})
    place = source if kind in ("in_place", "low_disk") else target
    before = io_bytes()
    extra = peak_during(lambda: hfshard.reshard_checkpoint(source, place, total_mib * MIB // 4 + 8192, **options))
    after = io_bytes()
    print(json.dumps({"extra": extra} | {name: after[name] - before[name] for name in after}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
