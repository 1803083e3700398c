"""Loads whose parts are mapped from the files: which are, and that training goes on as after a load that copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hfshard
from tests.distributed.gloo import check_ranks, make_mesh
from tests.distributed.test_save_on_ranks_costs import number_in
from tests.helpers.memory import anonymous_bytes, file_mapped_at

PART_BYTES = 33 * 2**20
"""A rank's part of `large_model`: more than the most (32 MiB) that the C library takes from memory that was freed."""


class Small(nn.Module):
    """Rows that two ranks share evenly and unevenly, one row alone, a tie, and buffers that a forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.even = nn.Linear(8, 12)
        self.norm = nn.BatchNorm1d(12)
        self.odd = nn.Linear(12, 7)
        self.one = nn.Linear(7, 1)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        found: torch.Tensor = self.head(hidden) * self.one(self.odd(self.norm(self.even(hidden))))
        return found


def by_rows(model: nn.Module, *shape: int) -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = make_mesh(*(shape or (2,)))
    for child in model.children():
        if not isinstance(child, nn.Embedding) and child is not getattr(model, "head", None):
            fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_columns(model: nn.Module) -> Any:
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    return parallelize_module(model, make_mesh(2), {"even": RowwiseParallel(), "odd": RowwiseParallel()})


def on_meta(make: Callable[[], nn.Module], spread: Callable[[nn.Module], Any] = by_rows) -> Any:
    with torch.device("meta"):
        model = make()
    return spread(model)


def large_model() -> nn.Module:
    return nn.Linear(1024, 2 * PART_BYTES // 4096, bias=False)


def local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


def mapped_names(tensors: dict[str, Any], place: Path) -> set[str]:
    """Names of the tensors whose local memory is a file's below a directory."""
    return {name for name, one in tensors.items() if file_mapped_at(local(one).data_ptr()).startswith(str(place))}


def trained(model: nn.Module) -> Iterator[torch.Tensor]:
    """The local tensors after three steps, and what the steps got."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(torch.tensor([step, 3, 8, 5])).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()
    yield from (local(tensor) for tensor in model.state_dict().values())


def digests(place: Path) -> dict[str, str]:
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in sorted(place.iterdir())}


ALL = {
    *("embedding.weight", "head.weight", "even.weight", "even.bias", "odd.weight", "odd.bias"),
    *("one.weight", "one.bias", "norm.weight", "norm.bias"),
    *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
}
PADDED = {"embedding.weight", "head.weight", "odd.weight", "odd.bias", "one.weight", "one.bias"}
"""Those of which rank 1 has fewer rows than rank 0, so that FSDP2 copies them."""


def map_and_train(rank: int, saved: Path) -> None:
    before = digests(saved)
    mapped = on_meta(Small)
    hfshard.load_model(mapped, saved)
    copied = on_meta(Small)
    hfshard.load_model(copied, saved, read="pread")

    assert mapped_names(mapped.state_dict(), saved) == ALL - (PADDED if rank else set())
    assert mapped_names(copied.state_dict(), saved) == set()
    assert mapped.head.weight is mapped.embedding.weight
    for found, expected in zip(trained(mapped), trained(copied), strict=True):
        assert torch.equal(found, expected)
    assert digests(saved) == before

    hfshard.load_model(mapped, saved)  # into the memory that it has by now
    again = hfshard.load_model(on_meta(Small), saved, verify="full")
    for found, expected in zip(trained(mapped), trained(again), strict=True):
        assert torch.equal(found, expected)
    assert digests(saved) == before


def map_in_layouts(rank: int, saved: Path) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    expected = hfshard.load_state_dict(saved)
    for spread, found in (
        (lambda model: by_rows(model, 2, 1), ALL),  # copies
        (lambda model: by_rows(model, 1, 2), ALL - (PADDED if rank else set())),
        (by_columns, ALL - {"even.weight", "odd.weight"}),
    ):
        model = on_meta(Small, spread)
        hfshard.load_model(model, saved)
        assert mapped_names(model.state_dict(), saved) == found
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, expected[name]), name

    like = on_meta(Small).state_dict()
    state = hfshard.load_state_dict(saved, like=like)
    kept = {name: local(tensor).clone() for name, tensor in state.items()}
    empty = {"one.weight", "one.bias"} if rank else set()
    assert mapped_names(state, saved) == ALL - empty
    assert all(local(tensor).untyped_storage().nbytes() == local(tensor).nbytes for tensor in state.values())
    assert mapped_names(hfshard.load_state_dict(saved, like=like, read="pread"), saved) == set()
    assert mapped_names(hfshard.load_state_dict(saved, like=like, disable_mmap=True), saved) == set()

    # memory of its own for each layout and dtype, and for what is not as in the file
    mesh = make_mesh(2)
    zeros = torch.zeros(12, 8)
    others = {
        "even.weight": distribute_tensor(zeros.half(), mesh, [Shard(0)]),
        "odd.weight": distribute_tensor(torch.zeros(7, 12), mesh, [Shard(1)]),
        "embedding.weight": distribute_tensor(torch.zeros(9, 8), mesh, [Shard(0)]),
        "head.weight": distribute_tensor(torch.zeros(9, 8), mesh, [Replicate()]),
        "norm.weight": torch.zeros(24)[::2],
    }
    loaded = hfshard.load_state_dict(saved, like=others)
    assert mapped_names(loaded, saved) == {"embedding.weight"}
    local(loaded["embedding.weight"]).zero_()
    assert torch.equal(local(loaded["head.weight"]), expected["head.weight"])

    # nor does a later save change what was loaded
    dist.barrier()
    hfshard.save_state_dict({name: torch.zeros_like(one) for name, one in expected.items()}, saved)
    assert all(torch.equal(local(state[name]), one) for name, one in kept.items())


def load_large(rank: int, saved: Path) -> None:
    model, copied = on_meta(large_model), on_meta(large_model)
    hfshard.load_model(on_meta(large_model), saved)  # which imports, and reads ahead

    def cost(load: Callable[[], object]) -> tuple[int, int]:
        before = anonymous_bytes(), number_in("/proc/self/io", "rchar")
        load()
        return anonymous_bytes() - before[0], number_in("/proc/self/io", "rchar") - before[1]

    memory, read = cost(lambda: hfshard.load_model(model, saved))
    assert memory < 0.1 * PART_BYTES
    assert read < 0.1 * PART_BYTES
    memory, read = cost(lambda: hfshard.load_model(copied, saved, read="pread"))
    assert memory > 0.9 * PART_BYTES
    assert read > 0.9 * PART_BYTES
    for found, expected in zip(model.parameters(), copied.parameters(), strict=True):
        assert torch.equal(local(found), local(expected))


def map_in_many_ways(rank: int, place: Path) -> None:
    map_and_train(rank, place / "small")
    dist.barrier()
    map_in_layouts(rank, place / "small")
    load_large(rank, place / "large")


def test_parts_that_are_one_run_of_a_file_are_mapped(tmp_path: Path) -> None:
    torch.manual_seed(3)
    hfshard.save_model(Small(), tmp_path / "small", max_shard_size="1kB", checksum="xxh3")
    hfshard.save_model(large_model(), tmp_path / "large")

    check_ranks(tmp_path / "ranks", 2, map_in_many_ways, tmp_path)
