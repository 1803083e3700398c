"""Rounds: what each owner gets, and what each rank sends."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from hfshard.distributed.exchange import Stretch, byte_range, cut_windows, schedule
from hfshard.distributed.tensor_owners import Mesh, TensorOwners
from hfshard.tensors.stored_tensor import RawTensor, TensorLayout, iter_blocks
from tests.distributed.test_tensor_owners import listing, split, unite


def test_windows_go_across_tensors() -> None:
    assert list(cut_windows([("a", 5), ("none", 0), ("b", 2), ("c", 9)], 4)) == [
        [Stretch("a", 0, 4)],
        [Stretch("a", 4, 5), Stretch("b", 0, 2), Stretch("c", 0, 1)],
        [Stretch("c", 1, 5)],
        [Stretch("c", 5, 9)],
    ]


def rows_on(world_size: int, names: list[str]) -> TensorOwners:
    """Tensors of one kilobyte for each rank."""
    entries = {name: split((world_size, 256), 0) for name in names}
    return unite((tuple(range(world_size)), listing(entries), (Mesh((world_size,), tuple(range(world_size))),)))


def test_all_owners_get_a_window_in_each_round_where_no_rank_has_much_to_send() -> None:
    holders = rows_on(4, ["a", "b"])

    found = list(schedule({2: [("a", 4096)], 0: [("b", 3000)]}, holders, window_bytes=2048))

    assert found == [
        {0: [Stretch("b", 0, 2048)], 2: [Stretch("a", 0, 2048)]},
        {0: [Stretch("b", 2048, 3000)], 2: [Stretch("a", 2048, 4096)]},
    ]


def test_owners_wait_where_one_rank_would_send_too_much() -> None:
    names = [f"w{owner}" for owner in range(32)]
    holders = rows_on(32, names)
    streams = {owner: [(name, 32 * 1024)] for owner, name in enumerate(names)}

    rounds = list(schedule(streams, holders, window_bytes=1024, source_bytes=4096))

    got: dict[int, list[Stretch]] = {}
    for windows in rounds:
        sent: Counter[int] = Counter()
        for owner, window in windows.items():
            got.setdefault(owner, []).extend(window)
            sent.update(stretch.start // 1024 for stretch in window)
        assert max(sent.values()) <= 4 + 1  # its own does not count
    assert got == {
        owner: [Stretch(name, at, at + 1024) for at in range(0, 32768, 1024)] for owner, name in enumerate(names)
    }
    assert len(rounds) <= 32 + 32 // 4


# Stretches of a tensor's bytes.

BASE = torch.arange(5 * 6 * 4, dtype=torch.int16).view(5, 6, 4)


@pytest.mark.parametrize(
    "tensor",
    [
        BASE,
        BASE.transpose(0, 2),
        BASE[:, 1:4, ::2],
        BASE[2, :, 3],
        BASE[:1].expand(3, 6, 4),
        torch.tensor(2.5, dtype=torch.float64),
        torch.complex(BASE[0].double(), BASE[1].double()),
        torch.complex(BASE[0].float(), BASE[1].float()).t().conj(),
        torch.arange(32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).view(4, 8).t(),
        RawTensor(TensorLayout("U8", (9,), 9), lambda _: iter([memoryview(b"01234"), memoryview(b"5678")])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_stretch_is_that_of_the_whole(tensor: torch.Tensor) -> None:
    everything = b"".join(bytes(block) for block in iter_blocks(tensor, 64))
    step = max(1, len(everything) // 9)
    for start in range(0, len(everything), step):
        for stop in range(start + 1, len(everything) + 1, step):
            assert byte_range(tensor, start, stop).tobytes() == everything[start:stop]


def test_a_contiguous_tensor_is_not_copied() -> None:
    tensor = torch.zeros(4, 4, dtype=torch.uint8)
    stretch = byte_range(tensor, 4, 12)
    tensor[1, 2] = 7
    assert stretch.tolist() == [0, 0, 7, 0, 0, 0, 0, 0]


def test_of_a_strided_tensor_only_some_rows_are_copied() -> None:
    peak: list[int] = []

    class Watched(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if getattr(func, "__name__", "") == "contiguous":
                peak.append(result.numel())
            return result

    columns = torch.zeros(1000, 100).t()
    with Watched():
        byte_range(columns, 4000 * 50 + 4, 4000 * 51 + 4)
        byte_range(columns, 4000 * 50 + 4, 4000 * 50 + 8)

    assert peak == [2000, 1]
