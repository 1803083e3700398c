"""How much memory transfers to and from stores may take."""

from __future__ import annotations

import os
from typing import Final

from hfshard._util.text import parse_size
from hfshard.errors import InvalidArgumentError, InvalidSizeError

MEMORY_VARIABLE: Final = "HFSHARD_STORE_MEMORY"
"""The environment variable that says how much."""

_DEFAULT_BYTES: Final = 256 * 2**20
_FILES_BYTES: Final = 768 * 2**20
"""Where no tensors are in memory beside: as much as hf_xet takes by itself to send files (measured: 810 MB)."""
_LEAST_BYTES: Final = 32 * 2**20
"""Three parts of 8 MiB under way, and one that is being filled."""


def store_memory_bytes() -> int:
    """Bytes that all transfers of this process may hold at once, beside the tensors themselves.

    Raises:
        InvalidArgumentError: The variable is no size, or a very small one.

    Example:
        HFSHARD_STORE_MEMORY=1GiB python train.py
    """
    return _asked_bytes() or _DEFAULT_BYTES


def file_push_memory_bytes() -> int:
    """Bytes that a push of files over Xet may hold at once; else as `store_memory_bytes`."""
    return _asked_bytes() or _FILES_BYTES


def _asked_bytes() -> int | None:
    text = os.environ.get(MEMORY_VARIABLE, "").strip()
    if not text:
        return None
    try:
        size = parse_size(text)
    except InvalidSizeError as error:
        raise InvalidArgumentError(f"The environment variable {MEMORY_VARIABLE}: {error}", actual=text) from error
    if size < _LEAST_BYTES:
        raise InvalidArgumentError(
            f"The environment variable {MEMORY_VARIABLE} is {text}: transfers to a store need at least 32MiB.",
            expected=_LEAST_BYTES,
            actual=size,
        )
    return size
