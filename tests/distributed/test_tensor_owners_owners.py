"""Which rank writes which file."""

from __future__ import annotations

from hfshard.distributed.tensor_owners import assign_owners


def test_the_largest_file_goes_first_to_who_has_least() -> None:
    assert assign_owners([5, 9, 4, 4, 1], [0, 1]) == [1, 0, 1, 0, 1]
    assert assign_owners([1, 1, 1, 1], [3, 1, 2]) == [1, 2, 3, 1]
    assert assign_owners([], [0]) == []


def test_few_files_go_to_ranks_far_from_each_other() -> None:
    assert assign_owners([3, 2, 1], range(12)) == [0, 4, 8]
    assert assign_owners([1, 2, 3, 4], [0, 2, 4, 6, 8]) == [6, 4, 2, 0]
    assert assign_owners([7], range(4)) == [0]


def test_loads_are_even_for_many_ranks_and_files() -> None:
    sizes = [4_000_000_000 + 1_000_000 * (number % 700) for number in range(4096)]
    owners = assign_owners(sizes, range(1024))
    loads = [0] * 1024
    for size, owner in zip(sizes, owners, strict=True):
        loads[owner] += size
    assert max(loads) < 1.01 * sum(sizes) / 1024
