"""Looks at a run: the page of its checkpoints, and what one of them has beside its model."""

from __future__ import annotations

import os

from hfshard._util.addresses import is_address
from hfshard._util.arguments import absolute_path, path_text
from hfshard.checkpoint.verifier import Problem
from hfshard.errors import HfshardError
from hfshard.training.run.find_checkpoint import current_problems, files_at
from hfshard.training.run.manifest import MANIFEST, MetricMode, RunCheckpoint
from hfshard.training.run.reports import as_problems, is_run
from hfshard.viewing.page.page import Page
from hfshard.viewing.page.run_page import make_run_page
from hfshard.viewing.page.step_data import with_problem, with_step
from hfshard.viewing.runs.listing import checkpoints_of, list_checkpoints
from hfshard.viewing.runs.space import counts_of, parts_of, spaces_of


def run_at(place: str | os.PathLike[str]) -> str | None:
    """Find the run at a place.

    Returns:
        Its absolute path or its address; None where there is none, such as at one of its checkpoints.
    """
    text = path_text(place)
    if not is_address(text) and not os.path.isdir(os.path.expanduser(text)):
        return None
    root = absolute_path(place)
    return root if is_run(root) else None


def page_of_run(root: str, best: str | None, metric_mode: MetricMode) -> Page:
    """Lay out a run. Of each checkpoint is checked what can be checked without reading tensors.

    Raises:
        CheckpointChangedError: A checkpoint was replaced again and again.
    """
    found = checkpoints_of(root)
    listed = list_checkpoints(found, _check, best=best, metric_mode=metric_mode)
    return make_run_page(root, listed, spaces_of(found), best=best, is_store=is_address(root))


def with_parts(page: Page, directory: str) -> Page:
    """Add to the page of a model what else was saved with it, where it lies in a checkpoint of a run.

    Args:
        page: Of the model.
        directory: Where its files are.
    """
    files = files_at(directory)
    if not (is_address(directory) or os.path.isdir(directory)) or not files.has(MANIFEST):
        return page
    try:
        manifest = files.manifest()
    except HfshardError as error:  # damaged, or another tool's: the model is shown all the same
        return with_problem(page, error.message)
    return with_step(page, manifest, parts_of(directory, manifest), counts_of(manifest))


def _check(found: RunCheckpoint) -> list[Problem]:
    return as_problems(current_problems(found, "structure") or [], found.path)
