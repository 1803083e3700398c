"""The two phases of every load, and the pass over every byte that ends the second one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from bench.harness.question import Job

if TYPE_CHECKING:
    from torch import Tensor


def loading(
    load: Callable[[], Any], tensors_of: Callable[[Any], Iterable[Tensor]], *, again: bool = False, of: str = ""
) -> Job:
    """Load, then read every byte; the sum of the bytes is that `of` a checkpoint, for all its readers alike."""
    if again:  # transformers compiles about a thousand patterns at the first load of a process
        load()
    found: dict[str, Any] = {}

    def read() -> None:
        found["sum"] = sum_of(tensors_of(found["loaded"]))

    def ready() -> None:
        found["loaded"] = load()

    return Job([("ready", ready), ("read", read)], lambda: {"sum": found["sum"], "of": of})


def sum_of(tensors: Iterable[Tensor]) -> int:
    """Every byte of the tensors, once, in the model's order: the sum of their 64-bit words."""
    import torch

    # One thread: with several, each waits for the others at every parameter, and one that lost its core stops all.
    torch.set_num_threads(1)
    total = 0
    for tensor in {one.data_ptr(): one.detach() for one in tensors}.values():
        words = tensor.view(-1).view(torch.int64) if tensor.data_ptr() % 8 == 0 else tensor.view(-1).view(torch.int16)
        total += int(words.sum(dtype=torch.int64))
    return total & (2**64 - 1)
