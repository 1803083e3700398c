"""How large the parts of an object are."""

from __future__ import annotations

from typing import Final

_LEAST_PART: Final = 8 << 20
"""S3 and GCS take parts of 5 MiB and more, but for the last one."""
_MOST_PARTS: Final = 10_000
"""S3 and GCS; Azure takes 50,000."""


def part_bytes(object_bytes: int) -> int:
    """How large the parts of an object are: a function of its size alone, the same for every writer.

    Example:
        >>> part_bytes(5 << 40) >> 20
        525
    """
    least = -(-object_bytes // _MOST_PARTS)
    whole_mib = -(-least // (1 << 20)) << 20
    return max(_LEAST_PART, whole_mib)
