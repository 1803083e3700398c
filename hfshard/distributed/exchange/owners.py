"""Which rank writes which file."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def assign_owners(file_bytes: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Give each file to one rank: the largest first, always to the rank that has the least to write so far.

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
    loads = [(0, rank) for rank in sorted(ranks)]
    for number in sorted(range(len(file_bytes)), key=lambda number: (-file_bytes[number], number)):
        load, rank = heapq.heappop(loads)
        owners[number] = rank
        heapq.heappush(loads, (load + file_bytes[number], rank))
    return owners
