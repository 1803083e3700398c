"""A restored step: an int, with what was saved along with the state."""

from __future__ import annotations

from typing import Any


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
