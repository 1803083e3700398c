"""What a step of a run has beside its model, on the page of its checkpoint: the optimizer, the state, other files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hfshard.training.run.manifest import CheckpointManifest
from hfshard.viewing.page.page import Fact, Page, shown_value
from hfshard.viewing.runs.space import Part


@dataclass(frozen=True, slots=True)
class _PartRow:
    part: Part
    nbytes: int
    files: int
    percent: float
    """Of the checkpoint."""


def with_step(page: Page, manifest: CheckpointManifest, parts: Mapping[Part, int], counts: Mapping[Part, int]) -> Page:
    """Add to the page of a model what was saved with it.

    Args:
        page: Of the checkpoint's model.
        manifest: Of the checkpoint.
        parts: The bytes of each part of it.
        counts: The files of each.
    """
    total = sum(parts.values())
    rows = [_PartRow(part, size, counts[part], round(100 * size / max(1, total), 2)) for part, size in parts.items()]
    metrics = ", ".join(f"{name} {value:.6g}" for name, value in sorted(manifest.metrics.items()))
    fact = Fact("step of a run", f"{manifest.step:,}", shown_value(metrics)[:200])
    step = {"rows": rows, "nbytes": total, "problem": None}
    return replace(page, facts=(*page.facts, fact), view={**page.view, "step": step})


def with_problem(page: Page, message: str) -> Page:
    """Add to the page of a model why nothing is known of what was saved with it."""
    return replace(page, view={**page.view, "step": {"rows": (), "nbytes": 0, "problem": shown_value(message)}})
