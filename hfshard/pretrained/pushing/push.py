"""What `ShardedModelMixin` pushes: a model straight from memory, or the files that a save has just written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from huggingface_hub import CommitInfo

from hfshard.hub.address import directory_of
from hfshard.hub.pushing.local_files import directory_contents
from hfshard.hub.pushing.push_files import push_files
from hfshard.hub.pushing.request import PushOptions, PushRequest
from hfshard.hub.repo_tree import PushResult
from hfshard.pretrained.pushing.model_card import tagged_card
from hfshard.saving.in_memory import stream_request
from hfshard.saving.request import SaveRequest
from hfshard.storage.disk.byte_source import ByteSource, file_source
from hfshard.storage.format.index import CheckpointIndex
from hfshard.storage.format.names import WeightNames

DEFAULT_MESSAGE: Final = "Upload model"
"""As in transformers."""


def push_model(
    request: SaveRequest, repo_id: str | os.PathLike[str], tags: Sequence[str], options: PushOptions
) -> CommitInfo | PushResult:
    """Push what a save of this request would write, straight from memory.

    Args:
        request: What `save_model` would save.
        repo_id: As in `push_checkpoint`.
        tags: Of the model card.
        options: How to push.
    """
    contents, _ = stream_request(request)
    return _push(contents, frozenset({request.options.variant}), repo_id, tags, options)


def push_saved_files(
    request: SaveRequest,
    index: CheckpointIndex,
    directory: str,
    repo_id: str | os.PathLike[str],
    tags: Sequence[str],
    options: PushOptions,
) -> CommitInfo | PushResult:
    """Push the files that a save has just written into a directory, and nothing else that is there."""
    names = {*index.weight_map.values(), *index.files, request.options.names.index, *request.small_files}
    contents, _ = directory_contents(directory, names=names, follow_links=True)  # a link whose bytes did not change
    return _push(contents, frozenset({request.options.variant}), repo_id, tags, options)


def push_by_directory(
    save: Callable[[str], object],
    variant: str | None,
    repo_id: str | os.PathLike[str],
    tags: Sequence[str],
    options: PushOptions,
) -> CommitInfo | PushResult | None:
    """Push what a `save_pretrained` writes that does more than hfshard can do from memory, by a temporary directory.

    Args:
        save: Saves into an empty directory.
        variant: Of the weights.
        repo_id, tags, options: As in `push_model`.

    Returns:
        As `push_model`; None where this process saves nothing, because another one of the group does.
    """
    with tempfile.TemporaryDirectory(prefix="hfshard-push-") as folder:
        save(folder)
        names = os.listdir(folder)
        if not names:
            return None
        if any(WeightNames(variant).index == name or WeightNames(variant).single == name for name in names):
            contents, indexes = directory_contents(folder)
            variants = frozenset(indexes)
        else:  # an adapter, beside which the hub may hold its base
            contents = {name: file_source(os.path.join(folder, name)) for name in names}
            variants = frozenset()
        return _push(contents, variants, repo_id, tags, options)


def tags_of(model: Any, tags: Sequence[str] | str | None) -> list[str]:
    """Collect the tags of a model's card: the model's own, and those that were asked for."""
    requested = [tags] if isinstance(tags, str) else list(tags or ())
    return list(dict.fromkeys([*(getattr(model, "model_tags", None) or ()), *requested]))


def _push(
    contents: dict[str, ByteSource],
    variants: frozenset[str | None],
    repo_id: str | os.PathLike[str],
    tags: Sequence[str],
    options: PushOptions,
) -> CommitInfo | PushResult:
    request = PushRequest(
        contents=contents,
        variants=variants,
        options=options,
        default_message=DEFAULT_MESSAGE,
        make_card=partial(tagged_card, tags=tags),
    )
    result = push_files(request, repo_id)
    if directory_of(repo_id) is not None:
        return result
    return CommitInfo(
        commit_url=result.url,
        commit_message=request.message,
        commit_description=options.commit_description or "",
        oid=result.commit,
        pr_url=result.pr_url,
    )


def default_repo_id(directory: str) -> str:
    """Name the repo that `save_pretrained(push_to_hub=True)` pushes to by default: after the directory."""
    return os.path.basename(os.path.abspath(directory))
