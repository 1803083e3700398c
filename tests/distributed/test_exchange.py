"""Rounds: what each owner gets, and what each rank sends."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard._util.call_ranks import Session
from hfshard.distributed.exchange import GroupAddresses, Stretch, byte_range, connect, cut_windows, schedule
from hfshard.distributed.rendezvous import session
from hfshard.distributed.tensor_owners import Mesh, TensorOwners
from hfshard.errors import RankFailedError
from hfshard.tensors.stored_tensor import RawTensor, TensorLayout, iter_blocks
from tests.distributed.gloo import check_ranks, make_mesh, run_ranks
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


# The group of a session.


def save_two_at_once(rank: int, place: Path) -> None:
    """Two threads of each rank, of which the second rank starts the other one first."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = make_mesh(2)
    states = {
        name: {f"w{number}": distribute_tensor(torch.full((256, 256), value), mesh, [Shard(0)]) for number in range(8)}
        for name, value in (("a", 1.0), ("b", 2.0))
    }
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            saves = [
                pool.submit(hfshard.save_state_dict, states[name], place / name, max_shard_size="600KB")
                for name in ("ba" if rank else "ab")
            ]
            for one in saves:
                one.result()


@pytest.mark.parametrize("connects_when_used", ["0", "1"])
def test_saves_of_two_threads_do_not_mix(
    connects_when_used: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", connects_when_used)

    check_ranks(tmp_path / "ranks", 2, save_two_at_once, tmp_path)

    for name, value in (("a", 1.0), ("b", 2.0)):
        found = hfshard.load_state_dict(tmp_path / name, verify="full")
        assert all(torch.equal(tensor, torch.full((256, 256), value)) for tensor in found.values())


def connect_with_one_that_fails(rank: int, fail: Callable[[Session], None]) -> None:
    expected = ZeroDivisionError if rank == 2 else RankFailedError
    with pytest.raises(expected) as caught, session("a", needs_all=True) as ranks:
        if rank == 2:
            fail(ranks)
        group, _addresses = connect(ranks)
        ranks.await_work(group.barrier())
    if rank != 2:
        assert isinstance(caught.value, RankFailedError)
        assert caught.value.rank == 2
    os._exit(0)  # no barrier: one may be dead


def raise_error(_: Session) -> None:
    raise ZeroDivisionError


def die(_: Session) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_when_all_know_its_address(ranks: Session) -> None:
    class Addresses(GroupAddresses):
        def wait(self, keys: list[str], timeout: object = None) -> None:
            super().wait(keys)
            die(ranks)

    torch.distributed.ProcessGroupGloo(Addresses(ranks), ranks.position, ranks.world_size, timedelta(seconds=1))


@pytest.mark.parametrize("fail", [raise_error, die, die_when_all_know_its_address])
def test_a_rank_that_fails_while_the_ranks_connect_is_named(fail: Callable[[Session], None], tmp_path: Path) -> None:
    ends = run_ranks(tmp_path / "ranks", 3, connect_with_one_that_fails, fail)

    statuses = [0, 0, 0 if fail is raise_error else -signal.SIGKILL]
    assert [end.status for end in ends] == statuses, "\n".join(end.words for end in ends)


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
