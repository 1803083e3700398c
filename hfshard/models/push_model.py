"""Push a model straight from memory, or files that a save has just written, with a card if the repo has none."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from huggingface_hub import CommitInfo, ModelCard, ModelCardData

from hfshard.commit.hub_marker import hub_directory
from hfshard.constants import CONFIG_NAME, README
from hfshard.disk.byte_source import ByteSource, file_source
from hfshard.distributed.push_together import send, stage, staging_folder
from hfshard.distributed.rendezvous import Session
from hfshard.errors import InvalidArgumentError
from hfshard.format.file_names import WeightNames
from hfshard.format.index import CheckpointIndex
from hfshard.hub.push_files import CardBuilder, PushOptions, PushRequest, collect_directory, push_files
from hfshard.hub.repo import PushResult
from hfshard.models.module_weights import abort_peers_on_error, require_whole_tensors
from hfshard.saving.pipeline import stream_request
from hfshard.saving.save_request import SaveRequest

DEFAULT_MESSAGE: Final = "Upload model"
"""The commit message for a class with "Model" in its name, as in transformers."""


def push_model(
    request: SaveRequest,
    repo_id: str | os.PathLike[str],
    make_card: CardBuilder,
    options: PushOptions,
    ranks: Session,
) -> CommitInfo | PushResult:
    """Push what a save of this request would write: straight from memory, or from the files that its owners stage.

    Args:
        request: What `save_model` would save.
        repo_id: As in `push_checkpoint`; the same on all ranks.
        make_card: Creates the repo's card.
        options: How to push.
        ranks: The session of the ranks that have parts of it; all of them call.
    """
    if ranks.is_alone:
        contents, _ = stream_request(require_whole_tensors(request))
        variants = frozenset({request.options.variant})
        gone = {CONFIG_NAME} if request.drops_config else set()
        push = _pushing(contents, variants, repo_id, make_card, options, ranks, gone)
        return _answer(send(ranks, push)[0], repo_id, options)
    with staging_folder(ranks) as folder:
        index = stage(ranks, request, folder)
        return push_saved_files(request, index, folder.path, repo_id, make_card, options, ranks)


def push_saved_files(
    request: SaveRequest,
    index: CheckpointIndex | None,
    directory: str,
    repo_id: str | os.PathLike[str],
    make_card: CardBuilder,
    options: PushOptions,
    ranks: Session,
) -> CommitInfo | PushResult:
    """Push the files that a save has just written into a directory, and nothing else in it.

    Args:
        request: What was saved.
        index: The save's result; needed on the leader.
        directory: The directory of the save.
        repo_id, make_card, options, ranks: As in `push_model`.
    """

    def push() -> Sequence[PushResult]:
        written = {*index.weight_map.values(), *index.files} if index is not None else set()
        names = {*written, request.options.names.index, *request.small_files}
        contents, _ = collect_directory(directory, names=names, follow_links=True)  # a link whose bytes did not change
        variants = frozenset({request.options.variant})
        gone = {CONFIG_NAME} if request.drops_config else set()
        return _pushing(contents, variants, repo_id, make_card, options, ranks, gone)()

    return _answer(send(ranks, push)[0], repo_id, options)


def push_by_directory(
    save: Callable[..., object],
    variant: str | None,
    repo_id: str | os.PathLike[str],
    make_card: CardBuilder,
    options: PushOptions,
    ranks: Session,
    *,
    keep_card: bool = False,
) -> CommitInfo | PushResult | None:
    """Push by a temporary directory, for a `save_pretrained` that does more than hfshard can do from memory.

    Links in the directory were created by this call of `save_pretrained`, and are followed.

    Args:
        save: Saves into an empty directory; takes `is_main_process`.
        variant: The weights' variant.
        repo_id, make_card, options, ranks: As in `push_model`.
        keep_card: Whether to keep the repo's README.md: the saved one is pushed only if the repo has none.

    Returns:
        The result of the push, as from `push_model`; None if another process of the group saves instead.
    """
    with staging_folder(ranks) as folder:
        folder.reject_unseen()
        with abort_peers_on_error(folder.path, lambda: not ranks.is_alone):
            save(folder.path, **({} if ranks.is_leader else {"is_main_process": False}))

        def push() -> Sequence[PushResult]:
            names = os.listdir(folder.path)
            if not names:
                return []
            if any(WeightNames(variant).index == name or WeightNames(variant).single == name for name in names):
                contents, indexes = collect_directory(folder.path, follow_links=True)
                variants = frozenset(indexes)
            else:  # an adapter; the repo may also contain its base model
                contents = {name: file_source(os.path.join(folder.path, name)) for name in _files_below(folder.path)}
                variants = frozenset()
            card = contents.pop(README, None) if keep_card else None
            make = make_card if card is None else partial(_kept_card, card)
            return _pushing(contents, variants, repo_id, make, options, ranks)()

        results = send(ranks, push)
        return _answer(results[0], repo_id, options) if results else None


def _files_below(folder: str) -> list[str]:
    """List the paths below a folder in the form that they have in a repo."""
    found = [os.path.join(above, name) for above, _, files in os.walk(folder) for name in files]
    return sorted(os.path.relpath(path, folder).replace(os.sep, "/") for path in found)


def _bytes_of(source: ByteSource) -> bytes:
    with source.open() as reader:
        return reader.read()


def _kept_card(card: ByteSource, read_old: Callable[[], bytes] | None) -> bytes | None:
    return None if read_old is not None else _bytes_of(card)


def tags_of(model: Any, tags: Sequence[str] | str | None) -> list[str]:
    """Collect the tags of a model's card: the model's own, and the requested ones."""
    requested = [tags] if isinstance(tags, str) else list(tags or ())
    return list(dict.fromkeys([*(getattr(model, "model_tags", None) or ()), *requested]))


def _pushing(
    contents: dict[str, ByteSource],
    variants: frozenset[str | None],
    repo_id: str | os.PathLike[str],
    make_card: CardBuilder,
    options: PushOptions,
    ranks: Session,
    gone: Collection[str] = (),
) -> Callable[[], Sequence[PushResult]]:
    request = PushRequest(
        contents=contents,
        variants=variants,
        options=options,
        default_message=DEFAULT_MESSAGE,
        make_card=make_card,
        find_stale=lambda files, read: gone,
        check=ranks.look,
    )
    return lambda: [push_files(request, repo_id)]


def _answer(result: PushResult, repo_id: str | os.PathLike[str], options: PushOptions) -> CommitInfo | PushResult:
    """Build the result of `push_to_hub`: for a repo of the Hub, the one that huggingface_hub would return."""
    if hub_directory(repo_id) is not None:
        return result
    return CommitInfo(
        commit_url=result.url,
        commit_message=options.commit_message or DEFAULT_MESSAGE,
        commit_description=options.commit_description or "",
        oid=result.commit,
        pr_url=result.pr_url,
    )


def with_message(model_class: type, options: PushOptions) -> PushOptions:
    """Return the options with transformers' commit message for a class, unless they have a message."""
    if options.commit_message:
        return options
    name = model_class.__name__
    return replace(options, commit_message=DEFAULT_MESSAGE if "Model" in name else f"Upload {name}")


def default_repo_id(directory: str) -> str:
    """Return the default repo name of `save_pretrained(push_to_hub=True)`, which is that of the directory."""
    return os.path.basename(os.path.abspath(directory))


# README.md of a pushed model, as transformers creates it: a card from the template, and its tags.


_DESCRIPTION: Final = (
    "This is the model card of a 🤗 transformers model that has been pushed on the Hub. "
    "This model card has been automatically generated."
)


def make_model_card(read_old: Callable[[], bytes] | None, tags: Sequence[str]) -> bytes | None:
    """Create the card to push, or return None if the card on the hub needs no change.

    Args:
        read_old: Reads the README.md on the hub; None if there is none.
        tags: The tags that it must have.

    Raises:
        InvalidArgumentError: The card on the hub cannot be read.

    Source: transformers `create_and_tag_model_card`.
    """
    if read_old is None:
        data = ModelCardData(tags=list(tags), library_name="transformers")
        return _to_bytes(ModelCard.from_template(data, model_description=_DESCRIPTION))
    if not tags:
        return None
    raw = read_old()
    try:
        if b"\0" in raw:
            raise ValueError("it contains NUL bytes")
        card: Any = ModelCard(raw.decode("utf-8"), ignore_metadata_errors=True)
    except Exception as error:  # they have no common base class: PyYAML's, UnicodeDecodeError, ValueError
        raise InvalidArgumentError(
            f"Cannot add the tags to the README.md on the hub, whose metadata cannot be read: {error}. Fix it there, "
            "or push without tags."
        ) from error
    there = card.data.tags or []
    there = [there] if isinstance(there, str) else list(there)
    missing = [tag for tag in tags if tag not in there]
    if not missing:
        return None
    card.data.tags = [*there, *missing]
    return _to_bytes(card)


def _to_bytes(card: ModelCard) -> bytes:
    return str(card).encode("utf-8")
