"""A step of a run: as it is named in a save, and as a restore returns it."""

from __future__ import annotations

import operator
from typing import Any, Final

from hfshard.errors import InvalidArgumentError

_MAX_STEP: Final = 10**18 - 1
"""Of a directory's name."""


class RestoredStep(int):
    """The step that was restored, as an int, with what else was saved with it."""

    path: str
    """The checkpoint's directory."""
    extra: Any
    """What was passed to `save`."""
    metrics: dict[str, float]
    differences: tuple[str, ...]
    """With strict=False: what did not fit and was left as it was built, in words."""


def checked_step(step: object) -> int:
    """The number of a step.

    Raises:
        InvalidArgumentError: It is none, or is too large for a directory's name.
    """
    try:
        number = operator.index(step) if not isinstance(step, bool) else -1  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number <= _MAX_STEP:
        raise InvalidArgumentError(f"step must be a number of at least 0, got {step!r}.")
    return number
