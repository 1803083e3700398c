"""Rounds: what each owner gets, and what each rank sends."""

from __future__ import annotations

from collections import Counter

from hfshard.distributed.exchange import Stretch, cut_windows, schedule
from hfshard.distributed.tensor_owners import Mesh, TensorOwners
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
