"""Options of a load check themselves."""

from __future__ import annotations

from typing import Any

import pytest

from hfshard.checkpoint.load_options import LoadOptions
from hfshard.errors import InvalidArgumentError


def test_disable_mmap_reads_without_a_mapping() -> None:
    assert LoadOptions(disable_mmap=True).read == "pread"
    assert LoadOptions(disable_mmap=False).read == "auto"


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("verify must be .* got 'all'", {"verify": "all"}),
        ("read must be", {"read": "fast"}),
        ("Cannot combine read='mmap' with disable_mmap=True", {"read": "mmap", "disable_mmap": True}),
    ],
)
def test_what_is_not_valid_is_refused(message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        LoadOptions(**arguments)
