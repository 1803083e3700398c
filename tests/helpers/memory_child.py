"""Saves in fresh processes, and the anonymous memory that each took beyond the model: run by test_memory.py."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import torch
from torch import nn

import hfshard

KIB = 1024
MIB = 1024 * KIB
TENSORS = 16


def anonymous_bytes() -> int:
    """Memory that no file stands behind, private or shared."""
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) * KIB for line in status if line.startswith(("RssAnon", "RssShmem")))


def resident_bytes() -> int:
    """All memory of the process, the pages of mapped files that it touched included."""
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) * KIB for line in status if line.startswith("VmRSS"))


def peak_during(action: Callable[[], object], measure: Callable[[], int] = anonymous_bytes) -> int:
    """The most memory above that of before, sampled each millisecond."""
    highest, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not stop.wait(0.001):
            highest = max(highest, measure())

    before = measure()
    thread = threading.Thread(target=watch)
    thread.start()
    action()
    highest = max(highest, measure())
    stop.set()
    thread.join()
    return highest - before


def contiguous(total_bytes: int) -> dict[str, torch.Tensor]:
    rows = total_bytes // TENSORS // 4 // 1024
    return {f"layer.{i}.weight": torch.full((rows, 1024), float(i)) for i in range(TENSORS)}


def transposed(total_bytes: int) -> dict[str, torch.Tensor]:
    return {name: tensor.t() for name, tensor in contiguous(total_bytes).items()}


def flat_buffer(total_bytes: int) -> dict[str, torch.Tensor]:
    flat = torch.ones(total_bytes // 4)
    pieces = flat.chunk(TENSORS)
    return {f"layer.{i}.weight": piece.view(-1, 1024) for i, piece in enumerate(pieces)}


class Stack(nn.Module):
    """Linear layers whose weights are those of a state dict."""

    def __init__(self, state_dict: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ParameterList(list(state_dict.values()))


def save(kind: str, total_mib: int, folder: str) -> int:
    """Save two files; the most bytes that it took meanwhile."""
    hfshard.save_state_dict({"warm": torch.ones(10)}, os.path.join(folder, "warm"))  # imports, pools
    total = total_mib * MIB
    if kind == "module":
        model = Stack(contiguous(total))
        return peak_during(lambda: hfshard.save_model(model, folder, max_shard_size=total // 2))
    state_dict = {"contiguous": contiguous, "transposed": transposed, "flat": flat_buffer}[kind](total)
    return peak_during(lambda: hfshard.save_state_dict(state_dict, folder, max_shard_size=total // 2))


def main(kinds: str, total_mib: int, folder: str) -> None:
    """Print the kinds with what their saves took, each in a fork that has saved nothing before."""
    torch.set_num_threads(1)
    for kind in kinds.split(","):
        pid = os.fork()
        if pid == 0:
            print(kind, save(kind, total_mib, os.path.join(folder, kind)), flush=True)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status:
            raise RuntimeError(f"{kind}: wait status {status}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
