"""What `ShardedModelMixin` pushes: a model straight from memory, or the files that a save has just written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from huggingface_hub import CommitInfo

from hfshard.errors import InvalidArgumentError
from hfshard.hub.address import directory_of
from hfshard.hub.listing import PushResult
from hfshard.hub.local_files import directory_contents
from hfshard.hub.push import PushRequest, folder_of, push
from hfshard.model_card import tagged_card
from hfshard.staging import SaveRequest
from hfshard.storage.content import Content
from hfshard.storage.index import CheckpointIndex
from hfshard.streaming import stream_request

DEFAULT_MESSAGE: Final = "Upload model"
"""As upstream's, for a model."""


def publish_model(request: SaveRequest, repo_id: str, tags: Sequence[str], **options: Any) -> CommitInfo | PushResult:
    """Push what a save of this request would write, without writing it.

    Args:
        request: What `save_model` would save.
        repo_id: As in `push_checkpoint`.
        tags: Of the model card.
        options: Arguments of `push_to_hub`.
    """
    _check_checksum(request)
    contents, _ = stream_request(request)
    return _publish(contents, request, repo_id, tags, **options)


def publish_saved(
    request: SaveRequest, index: CheckpointIndex, directory: str, repo_id: str, tags: Sequence[str], **options: Any
) -> CommitInfo | PushResult:
    """Push the files that a save has just written into a directory, and nothing else that is there."""
    names = {*index.weight_map.values(), *index.files, request.names.index, "config.json", *request.extras}
    contents, _ = directory_contents(directory, names=names)
    return _publish(contents, request, repo_id, tags, **options)


def tags_of(model: Any, tags: Sequence[str] | str | None) -> list[str]:
    """The tags of a model's card: the model's own, and those that were asked for."""
    asked = [tags] if isinstance(tags, str) else list(tags or ())
    return list(dict.fromkeys([*(getattr(model, "model_tags", None) or ()), *asked]))


def _publish(
    contents: dict[str, Content],
    request: SaveRequest,
    repo_id: str,
    tags: Sequence[str],
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    path_in_repo: str = "",
) -> CommitInfo | PushResult:
    message = commit_message or DEFAULT_MESSAGE
    pushing = PushRequest(
        contents,
        frozenset({request.names.variant}),
        message,
        commit_description,
        revision,
        create_pr,
        folder_of(path_in_repo),
        card=partial(tagged_card, tags=tags),
        progress=request.progress,
    )
    result = push(pushing, repo_id, private=private, token=token)
    if directory_of(repo_id) is not None:
        return result
    return CommitInfo(
        commit_url=result.url,
        commit_message=message,
        commit_description=commit_description or "",
        oid=result.commit,
        pr_url=result.pr_url,
    )


def _check_checksum(request: SaveRequest) -> None:
    if request.checksum != "sha256":
        raise InvalidArgumentError("A push needs checksum='sha256': it is what the Hub tells files by.")


def default_repo_id(save_directory: str | os.PathLike[str]) -> str:
    """The repo that `save_pretrained(push_to_hub=True)` pushes to where none is named: as the directory is called."""
    return os.path.basename(os.path.abspath(os.fspath(save_directory)))
