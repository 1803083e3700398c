"""Rotation, a pure function: the newest checkpoints of a run stay, the best, and those of every Nth step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hfshard.errors import InvalidArgumentError
from hfshard.training.run.manifest import CheckpointManifest, RunCheckpoint

MetricMode = Literal["min", "max"]


def best_of(manifests: Sequence[CheckpointManifest], metric: str, mode: MetricMode) -> CheckpointManifest | None:
    """Find the checkpoint with the best value of a metric: the earliest of equal ones, never one without it or NaN.

    Args:
        manifests: The manifests of the complete checkpoints, in any order.
        metric: The name of the metric.
        mode: "min": lower is better; "max": higher is better.
    """
    known = [one for one in manifests if not math.isnan(one.metrics.get(metric, math.nan))]
    sign = 1 if mode == "min" else -1
    return min(known, key=lambda one: (sign * one.metrics[metric], one.save_number), default=None)


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rule for which checkpoints of a run stay."""

    max_to_keep: int | None = None
    """The number of newest checkpoints to keep; None: all."""
    keep_best: str | None = None
    """A metric: the checkpoint with its best value stays too."""
    metric_mode: MetricMode = "min"
    """"min": lower is better; "max": higher is better."""
    keep_every: int | None = None
    """Checkpoints whose step is a multiple of it stay too, and do not count."""

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            InvalidArgumentError: A field would keep nothing, or is not one of the known values.
        """
        for name, value in (("max_to_keep", self.max_to_keep), ("keep_every", self.keep_every)):
            if value is not None and (type(value) is not int or value < 1):
                raise InvalidArgumentError(f"{name} must be a number of at least 1, or None, got {value!r}.")
        if self.keep_best is not None and not (isinstance(self.keep_best, str) and self.keep_best):
            raise InvalidArgumentError(
                f"keep_best must be the name of a metric, such as 'eval_loss', or None, got {self.keep_best!r}."
            )
        if self.metric_mode not in ("min", "max"):
            raise InvalidArgumentError(f"metric_mode must be 'min' or 'max', got {self.metric_mode!r}.")

    @property
    def does_remove(self) -> bool:
        """True if any checkpoint is ever removed."""
        return self.max_to_keep is not None

    def to_remove(self, found: Sequence[RunCheckpoint]) -> list[RunCheckpoint]:
        """List the checkpoints to remove, given all finished ones of a run in any order.

        Their manifests are read only if a metric decides.
        """
        if self.max_to_keep is None:
            return []
        in_order = sorted(found, key=lambda one: one.age)
        counted = [one for one in in_order if not (self.keep_every and one.step % self.keep_every == 0)]
        removed = [one for one in counted[: -self.max_to_keep] if one is not in_order[-1]]
        if not removed or self.keep_best is None:
            return removed
        best = best_of([one.manifest for one in found if one.manifest is not None], self.keep_best, self.metric_mode)
        return [one for one in removed if best is None or one.manifest is not best]
