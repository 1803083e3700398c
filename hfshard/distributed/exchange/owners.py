"""Which rank writes which file."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def assign_owners(file_bytes: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Give each file to one rank: the largest first, always to the rank that has the least to write so far.

    Where there are fewer files than ranks, the owners are spread over them: neighbours share a machine and its network.

    Args:
        file_bytes: The size of each file.
        ranks: Those that may write.

    Returns:
        The rank of each file. It depends on the arguments alone, so that all ranks find the same.

    Example:
        >>> assign_owners([5, 9, 4], [0, 1])
        [1, 0, 1]
    """
    owners = [0] * len(file_bytes)
    count = min(len(file_bytes), len(ranks))
    in_order = sorted(ranks)
    loads = [(0, in_order[number * len(ranks) // count]) for number in range(count)]
    for number in sorted(range(len(file_bytes)), key=lambda number: (-file_bytes[number], number)):
        load, rank = heapq.heappop(loads)
        owners[number] = rank
        heapq.heappush(loads, (load + file_bytes[number], rank))
    return owners
