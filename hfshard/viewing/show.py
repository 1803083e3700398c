"""Write an HTML page that shows a checkpoint, a run, or the differences between two checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from hfshard._util.arguments import absolute_path, checked_path_text, parse_size, wraps_os_errors
from hfshard._util.text import printable
from hfshard.checkpoint.load_options import LoadOptions
from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.checkpoint.reports import Problem
from hfshard.errors import HfshardError, InvalidArgumentError, InvalidPathError
from hfshard.places.place import place_to_check, place_to_load
from hfshard.training.run.find_checkpoint import as_problems, is_run, live_problems
from hfshard.training.run.manifest import MANIFEST, MetricMode, RunCheckpoint, folder_at, read_manifest
from hfshard.viewing.describe import headline
from hfshard.viewing.diff_checkpoints import diff_by_digests, diff_checkpoints
from hfshard.viewing.diff_tensors import Side, side_of
from hfshard.viewing.inspection import ViewedCheckpoint, inspect_checkpoint, open_for_viewing
from hfshard.viewing.model_summary import ModelSummary, read_model_summary
from hfshard.viewing.page.checkpoint_page import make_checkpoint_page, with_problem, with_step
from hfshard.viewing.page.diff_page import make_diff_page, short_names
from hfshard.viewing.page.page import Page, checked_output, describe_model, is_path, render_page, write_page
from hfshard.viewing.page.run_page import MOST_CHECKPOINTS, StepChange, make_run_page
from hfshard.viewing.results import CheckpointDiff
from hfshard.viewing.run_listing import (
    ListedCheckpoint,
    checkpoints_of,
    list_checkpoints,
    parts_of,
    unchanged_bytes,
)
from hfshard.viewing.screenshot import ScreenshotOptions, require_chromium, take_screenshot
from hfshard.viewing.tensor_values import measure_values

_Read = TypeVar("_Read")


@wraps_os_errors("checkpoint")
def show_checkpoint(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    variant: str | None = None,
    key: str | None = None,
    subfolder: str = "",
    revision: str | None = None,
    token: str | bool | None = None,
    max_shard_size: int | str | None = None,
    best: str | None = None,
    metric_mode: MetricMode = "min",
    against: str | os.PathLike[str] | None = None,
    values: bool = False,
    png: str | os.PathLike[str] | None = None,
    still: ScreenshotOptions | None = None,
    paths: bool = False,
    diff: bool = False,
    progress: bool | None = None,
) -> str:
    """Write one HTML file that shows the contents of a checkpoint or a run, or the differences between two checkpoints.

    Tensors are read only for `values`, or to compare two checkpoints whose digests do not suffice.

    The file is self-contained: it needs no network and no other file. It shows the modules by bytes, the files, the
    dtypes, tied names, the largest tensors and the metadata, and has a search for tensor names.

    Args:
        checkpoint: A directory, a store address ("s3://bucket/prefix"), one file of weights, or a repo of the Hub
            ("org/name" or "org/name@revision"), from which only the index and the headers are fetched; a checkpoint of
            a training run ("run/checkpoint-30"); or a run, whose checkpoints are shown side by side.
        output: The file to write. An existing page is replaced; any other file is kept, with an error. None: write
            only `png`.
        variant, subfolder, revision, token: As in transformers' `from_pretrained`. With `against`, they apply to both,
            and a revision must follow its checkpoint: "org/name@revision".
        key: For a file of torch.save, as in `load_state_dict`; with `against`, for whichever is such a file.
        max_shard_size: The size that fills a file's bar, such as "5GB"; None: the largest file.
        best: For a run: the metric that selects the checkpoint marked as the best.
        metric_mode: "min": its lowest value is the best; "max": its highest.
        against: Another checkpoint: the page shows the differences from it, as found by `diff_checkpoints`.
        values: Read the tensors and show the distribution of their numbers; with `against`, how much they differ.
        png: A file for a screenshot of the page, which an installed Chromium draws.
        still: The screenshot's size and theme; None: 1200 x 630, light, the size of social cards.
        paths: Show absolute paths of this machine; False: the names of folders and files only, since pages are shared.
        diff: For a run: also show what changed in the model from each checkpoint to the next, where digests tell;
            reads indexes and headers, and no tensors.
        progress: Whether to show a bar on stderr while tensors are read; None: only on a terminal.

    Returns:
        The absolute path of the page; without `output`, that of the screenshot.

    Raises:
        InvalidSizeError, InvalidSizeTypeError: `max_shard_size` is not a size.
        InvalidArgumentError: Neither `output` nor `png` is given, or an argument is for another kind of page.
        InvalidPathError: `output` cannot be written, or is an existing file that is not an hfshard page.
        CheckpointNotFoundError: There are no weights.
        DamagedCheckpointError, UnsafePathError, UnsafePickleError: A file is damaged or not safe to read.
        StoreError, HubError: The store or the Hub refuses access, or cannot be reached.
        BrowserError: `png` is given, but no browser was found, or it failed.

    Example:
        hfshard.show_checkpoint("out", "out.html")
    """
    limit = None if max_shard_size is None else parse_size(max_shard_size)
    path = None if output is None else checked_output(output)
    picture = None
    if png is not None:
        picture = checked_output(png, is_picture=True)
        if picture == path:
            raise InvalidPathError(f"'{path}' cannot be both the page and its screenshot. Pass two files.", path=path)
        require_chromium()
    written = path or picture
    if written is None:
        raise InvalidArgumentError("There is nothing to write. Pass output=, the file of the page, or png=, or both.")
    root = run_at(checkpoint) if against is None else None
    if values and root is not None:
        raise InvalidArgumentError("values=True is for one checkpoint or for two, not for a run.")
    if against is not None:
        if revision is not None:
            raise InvalidArgumentError("With against=, append a revision to its checkpoint: 'org/name@revision'.")
        _refuse({"max_shard_size": limit, "best": best, "diff": diff or None}, "cannot be used with against=")
        found_diff = diff_checkpoints(
            against,
            checkpoint,
            values=values,
            variant=variant,
            key=key,
            subfolder=subfolder,
            token=token,
            progress=progress,
        )
        page = make_diff_page(found_diff if paths else _without_paths(found_diff))
    elif root is not None:
        of_one = {"variant": variant, "key": key, "subfolder": subfolder, "revision": revision, "max_shard_size": limit}
        _refuse(of_one, "is for one checkpoint, not for a run")
        place_to_check(root).reject_hub_arguments(token=token)
        page = page_of_run(root, best, metric_mode, diff=diff, paths=paths)
    else:
        _refuse({"best": best, "diff": diff or None}, "is for a run, not for one checkpoint")
        query = CheckpointQuery(variant=variant, subfolder=subfolder, revision=revision, token=token)
        found = inspect_checkpoint(
            checkpoint, variant=variant, key=key, subfolder=subfolder, revision=revision, token=token
        )
        options = LoadOptions(key=key, progress=progress)
        page = make_checkpoint_page(found, limit, measure_values(checkpoint, query, options) if values else None)
        page = with_components(page, found.directory, paths=paths)
        page = replace(page, place=printable(found.place)) if paths else page
    if path is not None:
        write_page(render_page(page), path)
    if picture is not None:
        write_page(take_screenshot(render_page(page, is_still=True), still or ScreenshotOptions()), picture)
    return written


def _without_paths(found: CheckpointDiff) -> CheckpointDiff:
    """Name two folders of this machine by as much of their paths as tells them apart."""
    names = short_names(found.a, found.b)
    shown = {place: name if is_path(place) else place for name, place in zip(names, (found.a, found.b), strict=True)}
    merged = found.merged
    if merged is not None:
        merged = replace(merged, a=shown[merged.a], b=shown[merged.b])
    return replace(found, a=shown[found.a], b=shown[found.b], merged=merged)


def _without_path(problem: Problem, root: str) -> Problem:
    return replace(problem, message=_without_folder(problem.message, root))


def _without_folder(text: str, path: str) -> str:
    """Leave out the folder above a path of this machine, wherever the text has it."""
    folder = os.path.dirname(absolute_path(path)) if "://" not in path else ""
    return text if folder in ("", "/") else text.replace(f"{folder}/", "")


def _refuse(arguments: dict[str, Any], why: str) -> None:
    """Reject arguments that would be ignored, since they were meant to change the page."""
    for name, value in arguments.items():
        if value not in (None, ""):
            raise InvalidArgumentError(f"{name} {why}.")


# Runs: the page of a run's checkpoints, and the parts of a checkpoint besides its model.


def run_at(place: str | os.PathLike[str]) -> str | None:
    """Find the absolute path or the address of the run at a place; None if there is none, as at its checkpoints."""
    at = place_to_load(place)
    if at.is_read_from_disk and not os.path.isdir(checked_path_text(place)):
        return None
    return at.address if is_run(folder_at(at.address)) else None


def page_of_run(
    root: str, best: str | None, metric_mode: MetricMode, *, diff: bool = False, paths: bool = False
) -> Page:
    """Build the page of a run, checking each checkpoint without reading tensors.

    Args:
        root: The run's absolute path or its address.
        best, metric_mode, diff, paths: As in `show_checkpoint`.
    """
    found = checkpoints_of(root)
    listed = list_checkpoints(found, _check, best=best, metric_mode=metric_mode)
    if not paths:
        listed = [
            replace(one, problems=tuple(_without_path(problem, root) for problem in one.problems)) for one in listed
        ]
    is_store = not place_to_check(root).is_read_from_disk
    changes = step_changes([one.path for one in found[-MOST_CHECKPOINTS:]]) if diff else None
    model, training = outline_of_run(listed)
    page = make_run_page(
        root,
        listed,
        unchanged_bytes(found),
        best=best,
        is_store=is_store,
        changes=changes,
        about=describe_model(model),
        training=training,
    )
    return replace(page, place=printable(root)) if paths else page


def outline_of_run(listed: Sequence[ListedCheckpoint]) -> tuple[ModelSummary | None, str]:
    """Find what model a run trains, and what changed in it from the first checkpoint to the best or the latest.

    Opens two checkpoints, and more only in place of ones that cannot be opened; reads no tensors.

    Returns:
        What the later checkpoint's config says; and a printable sentence, "" if digests do not tell.
    """
    whole = [one for one in listed if not one.problems]
    best = [one for one in whole[1:] if one.is_best]
    for last in (*best, *reversed(whole)):
        if (found := _open(last.path, _side_and_model)) is not None:
            side, model = found
            return model, _change_since_first(whole[: whole.index(last)], last, side)
    return None, ""


def _change_since_first(earlier: Sequence[ListedCheckpoint], last: ListedCheckpoint, side: Side) -> str:
    for first in earlier:
        if (side_before := _open(first.path, side_of)) is not None:
            found = diff_by_digests(side_before, side)
            if found is None or not found.counts.keys().isdisjoint(("only_in_a", "only_in_b")):
                return ""
            return printable(headline(found, f"From step {first.step:,} to step {last.step:,}"))
    return ""


def _side_and_model(viewed: ViewedCheckpoint) -> tuple[Side, ModelSummary | None]:
    return side_of(viewed), read_model_summary(viewed.checkpoint.folder, viewed.checkpoint.weights.name)


def _open(path: str, read: Callable[[ViewedCheckpoint], _Read]) -> _Read | None:
    """Open a checkpoint of a run and read what it is; None if that fails, of which the list says why."""
    try:
        with open_for_viewing(path, CheckpointQuery(), LoadOptions()) as viewed:
            return read(viewed)
    except HfshardError:
        return None


def step_changes(paths: Sequence[str]) -> dict[str, StepChange]:
    """Find what changed in the model from each checkpoint of a run to the next, without reading any tensor.

    Returns:
        Path -> what changed since the one before. Checkpoints that cannot be opened are passed over, and those that
        only the bytes of their tensors could tell apart are left out.
    """
    changes: dict[str, StepChange] = {}
    before: Side | None = None
    for path in paths:
        if (side := _open(path, side_of)) is None:
            continue
        found = None if before is None else diff_by_digests(before, side)
        if found is not None:
            changes[path] = StepChange(len(found.differing), len(found.tensors), printable(headline(found)))
        before = side
    return changes


def with_components(page: Page, directory: str, *, paths: bool = False) -> Page:
    """Add to a model's page what else was saved with it, if its directory or address is a checkpoint of a run."""
    folder = folder_at(directory)
    if (folder.traits.is_directory and not folder.exists()) or not folder.has(MANIFEST):
        return page
    try:
        manifest = read_manifest(folder)
    except HfshardError as error:  # damaged, or another tool's: the model is shown anyway
        return with_problem(page, error.message if paths else _without_folder(error.message, directory))
    return with_step(page, manifest, parts_of(manifest, folder.size(MANIFEST)))


def _check(found: RunCheckpoint) -> list[Problem]:
    return as_problems(live_problems(found, "structure") or [], found.path)
