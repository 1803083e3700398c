"""A context variable in a block and after it, however the block ends."""

from __future__ import annotations

from contextvars import ContextVar

import pytest

from hfshard._util.context import bound


def test_the_value_before_is_back_after_the_block_and_after_an_error() -> None:
    variable: ContextVar[str | None] = ContextVar("variable", default=None)

    with bound(variable, "outer"):
        with pytest.raises(KeyError), bound(variable, "inner"):
            assert variable.get() == "inner"
            raise KeyError
        assert variable.get() == "outer"

    assert variable.get() is None
