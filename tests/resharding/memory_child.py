"""Re-shards, each in a fork of a fresh process, and the memory and bytes that it took: run by test_memory.py."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Any

import torch

import hfshard
from tests.helpers.memory_child import MIB, peak_during

TENSORS = 8


def io_bytes() -> dict[str, int]:
    """Bytes that this process has read and written by system calls, cached or not."""
    with open("/proc/self/io") as counts:
        found = dict(line.split(": ") for line in counts.read().splitlines())
    return {"read": int(found["rchar"]), "written": int(found["wchar"])}


def measure(kind: str, total_mib: int, folder: str) -> None:
    """Save, then re-shard as `kind` says, and print what it took as a line of JSON."""
    os.mkdir(folder)
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
        hfshard.save_state_dict(state_dict, source, max_shard_size=total_mib * MIB // 4)
    del state_dict
    by_kind: dict[str, dict[str, Any]] = {"cast": {"dtype": "bfloat16"}, "low_disk": {"low_disk": True}}
    options = by_kind.get(kind, {})
    place = source if kind in ("in_place", "low_disk") else target
    before = io_bytes()
    extra = peak_during(lambda: hfshard.reshard_checkpoint(source, place, total_mib * MIB // 2 + 8192, **options))
    after = io_bytes()
    print(json.dumps({"kind": kind, "extra": extra} | {name: after[name] - before[name] for name in after}), flush=True)


def main(total_mib: int, folder: str, kinds: list[str]) -> None:
    """Measure each in a process that has imported, and done nothing else."""
    for kind in kinds:
        pid = os.fork()
        if pid == 0:
            measure(kind, total_mib, os.path.join(folder, kind))
            return
        status = os.waitpid(pid, 0)[1]
        if status:
            sys.exit(f"{kind}: exit {os.waitstatus_to_exitcode(status)}")
        shutil.rmtree(os.path.join(folder, kind))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
