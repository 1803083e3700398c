"""A context variable with another value for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

_Value = TypeVar("_Value")


@contextmanager
def bound(variable: ContextVar[_Value], value: _Value) -> Iterator[None]:
    """Give a variable a value in this thread until the block ends."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
