"""Sizes of parts, and how long to wait."""

from __future__ import annotations

import pytest

from hfshard.errors import InvalidArgumentError
from hfshard.stores.object_store import part_bytes
from hfshard.stores.retry import idle_timeout, retry_seconds


@pytest.mark.parametrize(
    ("object_bytes", "part_mib"),
    [(0, 8), (5 << 30, 8), (80_000 << 20, 8), ((80_000 << 20) + 1, 9), (5 << 40, 525), (50 * 10**12, 4769)],
)
def test_no_object_has_more_than_ten_thousand_parts(object_bytes: int, part_mib: int) -> None:
    assert part_bytes(object_bytes) == part_mib << 20
    assert -(-object_bytes // part_bytes(object_bytes)) <= 10_000


def test_times_are_numbers_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HFSHARD_STORE_TIMEOUT", raising=False)
    monkeypatch.setenv("HFSHARD_STORE_RETRY_SECONDS", "1.5")
    assert (idle_timeout(), retry_seconds()) == (60.0, 1.5)
    for wrong in ("soon", "-1", "nan", "inf"):
        monkeypatch.setenv("HFSHARD_STORE_TIMEOUT", wrong)
        with pytest.raises(InvalidArgumentError, match="HFSHARD_STORE_TIMEOUT"):
            idle_timeout()
