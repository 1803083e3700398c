"""Write a page on which a checkpoint or a run can be looked at."""

from __future__ import annotations

import os
from typing import Any

from hfshard._util.addresses import is_address, refuse_hub_arguments
from hfshard._util.arguments import absolute_path, names_files, path_text
from hfshard._util.text import parse_size
from hfshard.checkpoint.load_options import LoadOptions
from hfshard.checkpoint.verifier import Problem
from hfshard.errors import HfshardError, InvalidArgumentError, InvalidPathError
from hfshard.hub.resolve import CheckpointQuery
from hfshard.training.run.find_checkpoint import current_problems, files_at
from hfshard.training.run.manifest import MANIFEST, MetricMode, RunCheckpoint
from hfshard.training.run.reports import as_problems, is_run
from hfshard.viewing.diff_checkpoints import diff_checkpoints
from hfshard.viewing.inspection import inspect_checkpoint
from hfshard.viewing.page.checkpoint_page import make_checkpoint_page, with_problem, with_step
from hfshard.viewing.page.diff_page import make_diff_page
from hfshard.viewing.page.page import Page, checked_output, render_page, write_page
from hfshard.viewing.page.run_page import make_run_page
from hfshard.viewing.run_listing import checkpoints_of, counts_of, list_checkpoints, parts_of, spaces_of
from hfshard.viewing.screenshot import Still, require_chromium, take_still
from hfshard.viewing.tensor_values import measure_values


@names_files("checkpoint")
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
    still: Still | None = None,
    progress: bool | None = None,
) -> str:
    """Write one HTML file that shows what a checkpoint consists of, or what differs between two.

    Tensors are read only to compare two checkpoints, and only where their digests do not suffice.

    The file needs nothing beside it: no network, no other file. It shows the modules by bytes, the files, the dtypes,
    tied names, the largest tensors and the metadata, and finds tensors by name.

    Args:
        checkpoint: A directory, an address of a store ("s3://bucket/prefix"), one file of weights, or a repo of the Hub
            ("org/name" or "org/name@revision"), of which only the index and the headers are fetched; a checkpoint of a
            training run ("run/checkpoint-30"); or a run, whose checkpoints are shown beside each other.
        output: The file to write. A page that is there is replaced; any other file is left as it is, with an error.
            None: there is only `png`.
        variant, subfolder, revision, token: As in transformers' `from_pretrained`; with `against`, of both, and a
            revision only behind its checkpoint: "org/name@revision".
        key: Of a file of torch.save, as in `load_state_dict`; with `against`, of whichever is one.
        max_shard_size: What the bars of the files are measured by, such as "5GB"; None: the largest file.
        best: Of a run: the metric by which one checkpoint is marked as the best.
        metric_mode: "min": its lowest value is the best; "max": its highest.
        against: Another checkpoint: the page shows what differs from it, as `diff_checkpoints` finds it.
        values: Read the tensors, and show what their numbers are like; with `against`, by how much they differ.
        png: A file for a picture of the page, which an installed Chromium draws.
        still: The picture's size and theme; None: 1280 x 800, light.
        progress: Whether to show a bar on stderr while tensors are read; None: only on a terminal.

    Returns:
        The absolute path of the page; without `output` that of the picture.

    Raises:
        InvalidSizeError, InvalidSizeTypeError: `max_shard_size` is no size.
        InvalidArgumentError: Neither `output` nor `png` is given, or an argument is for another kind of page.
        InvalidPathError: `output` can't be written, or is there and no page of hfshard.
        CheckpointNotFoundError: There are no weights.
        DamagedCheckpointError, UnsafePathError, UnsafePickleError: Something is wrong with a file.
        StoreError, HubError: The store or the Hub refuses, or can't be reached.
        BrowserError: `png` is asked for, and no browser was found, or it failed.

    Example:
        hfshard.show_checkpoint("out", "out.html")
    """
    limit = None if max_shard_size is None else parse_size(max_shard_size)
    path = None if output is None else checked_output(output)
    picture = None
    if png is not None:
        picture = checked_output(png, is_picture=True)
        if picture == path:
            raise InvalidPathError(f"'{path}' can't be both the page and its picture: give two files.", path=path)
        require_chromium()
    written = path or picture
    if written is None:
        raise InvalidArgumentError("There is nothing to write: give output=, the file of the page, or png=, or both.")
    root = run_at(checkpoint) if against is None else None
    if values and root is not None:
        raise InvalidArgumentError("values=True is for one checkpoint or for two, not for a run.")
    if against is not None:
        if revision is not None:
            raise InvalidArgumentError("With against=, write a revision behind its checkpoint: 'org/name@revision'.")
        _refuse({"max_shard_size": limit, "best": best}, "is not for a page with `against`")
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
        page = make_diff_page(found_diff)
    elif root is not None:
        of_one = {"variant": variant, "key": key, "subfolder": subfolder, "revision": revision, "max_shard_size": limit}
        _refuse(of_one, "is for one checkpoint, not for a run")
        if is_address(root):
            refuse_hub_arguments(root, token=token)
        page = page_of_run(root, best, metric_mode)
    else:
        _refuse({"best": best}, "is for a run, not for one checkpoint")
        query = CheckpointQuery(variant=variant, subfolder=subfolder, revision=revision, token=token)
        found = inspect_checkpoint(
            checkpoint, variant=variant, key=key, subfolder=subfolder, revision=revision, token=token
        )
        options = LoadOptions(key=key, progress=progress)
        page = make_checkpoint_page(found, limit, measure_values(checkpoint, query, options) if values else None)
        page = with_parts(page, found.directory)
    html = render_page(page)
    if path is not None:
        write_page(html, path)
    if picture is not None:
        write_page(take_still(html, still or Still()), picture)
    return written


def _refuse(arguments: dict[str, Any], why: str) -> None:
    """Refuse what would be ignored: it was meant to change what the page shows."""
    for name, value in arguments.items():
        if value not in (None, ""):
            raise InvalidArgumentError(f"{name} {why}.")


# Looks at a run: the page of its checkpoints, and what one of them has beside its model.


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
