"""How much memory transfers may take, as users say it."""

from __future__ import annotations

import pytest

from hfshard.errors import InvalidArgumentError
from hfshard.stores.byte_budget import MEMORY_VARIABLE, file_push_memory_bytes, store_memory_bytes


def test_memory_is_a_quarter_of_a_gib_unless_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MEMORY_VARIABLE, raising=False)

    assert store_memory_bytes() == 268_435_456
    assert file_push_memory_bytes() == 805_306_368  # no tensors are beside the files
    monkeypatch.setenv(MEMORY_VARIABLE, " 1.5 GiB")
    assert store_memory_bytes() == file_push_memory_bytes() == 1_610_612_736


@pytest.mark.parametrize("text", ["much", "0", "-1", "1MiB", "256"])
def test_memory_that_is_no_size_names_the_variable(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(MEMORY_VARIABLE, text)

    with pytest.raises(InvalidArgumentError, match="HFSHARD_STORE_MEMORY"):
        store_memory_bytes()
