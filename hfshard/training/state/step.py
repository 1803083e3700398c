"""A step of a run: validated when it is saved, and returned with what was saved along with it when restored."""

from __future__ import annotations

import operator
from typing import Any, Final

from hfshard.errors import InvalidArgumentError

_MAX_STEP: Final = 10**18 - 1
"""The highest step that fits into the name of a directory."""


class RestoredStep(int):
    """The step that was restored, as an int, with what was saved along with the state.

    restored = manager.restore_latest(state)
    print(restored + 1, restored.metrics["eval_loss"])
    """

    path: str
    """The checkpoint's directory or address; for another program's, its file or directory."""
    extra: Any
    """The value that was passed to `save` as `extra`."""
    metrics: dict[str, float]
    differences: tuple[str, ...]
    """With strict=False: descriptions of what did not fit and stayed as it was built."""
    lacking: tuple[str, ...] = ()
    """For another program's checkpoint: what it lacks that hfshard's would have, such as random number generators."""


def checked_step(step: object) -> int:
    """Return a step as a plain int.

    Raises:
        InvalidArgumentError: It is not a number from 0, or is too large for the name of a directory.
    """
    try:
        number = operator.index(step) if not isinstance(step, bool) else -1  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number <= _MAX_STEP:
        got = repr(step) if number.bit_length() < 1000 else f"one of {number.bit_length()} bits"
        raise InvalidArgumentError(f"step must be an integer from 0 to {_MAX_STEP}, got {got}.")
    return number
