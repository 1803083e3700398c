"""Push a model straight from memory, or files that a save has just written, with a card if the repo has none."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from huggingface_hub import CommitInfo, ModelCard, ModelCardData

from hfshard._util.call_ranks import Session
from hfshard.constants import CONFIG_NAME, README
from hfshard.disk.byte_source import ByteSource, file_source
from hfshard.distributed.push_together import agree_on_repo, send, stage, staging_folder
from hfshard.errors import InvalidArgumentError
from hfshard.format.file_names import MODEL_BASE, WeightNames
from hfshard.format.index import CheckpointIndex
from hfshard.hub.directory.directory_hub import absolute_repo_id
from hfshard.hub.push_files import CardBuilder, PushOptions, PushRequest, collect_directory, push_files
from hfshard.hub.repo import PushResult
from hfshard.models.module_weights import abort_peers_on_error, require_whole_tensors
from hfshard.places.place import DirectoryPlace
from hfshard.saving.hub_transaction import HubTransaction
from hfshard.saving.pipeline import Save
from hfshard.saving.save_request import SaveRequest


@dataclass(frozen=True, slots=True)
class ModelPush:
    """One push of a model of any kind, by this process or by the ranks that have parts of it."""

    repo_id: str
    """"org/name", or the absolute path of a directory hub; the same on all ranks."""
    make_card: CardBuilder
    options: PushOptions
    default_message: str
    """The title of the commit, if the options have none."""
    ranks: Session
    """The session of the ranks that take part; all of them make the same calls."""

    def send(self, request: SaveRequest) -> CommitInfo | PushResult | None:
        """Push what a save of this request would write: from memory, or from the files that its owners stage."""
        if self.ranks.is_alone:
            save = Save({MODEL_BASE: require_whole_tensors(request)})
            variants, gone = {request.options.variant}, _replaced_files(request)
            target = HubTransaction(save.new, lambda contents: self._push_files(contents, variants, gone))
            save.into(target)
            return self._run(lambda: target.results)
        with staging_folder(self.ranks) as folder:
            index = stage(self.ranks, request, folder)
            return self.send_saved(request, index, folder.path)

    def send_saved(
        self, request: SaveRequest, index: CheckpointIndex | None, directory: str
    ) -> CommitInfo | PushResult | None:
        """Push the files that a save has just written into a directory, and nothing else in it.

        The leader needs the save's index.
        """

        def push() -> list[PushResult]:
            written = {*index.weight_map.values(), *index.files} if index is not None else set()
            names = {*written, request.options.names.index, *request.small_files}
            # A link, if the bytes of a file did not change.
            contents, _ = collect_directory(directory, names=names, follow_links=True)
            return self._push_files(contents, {request.options.variant}, _replaced_files(request))

        return self._run(push)

    def send_by_directory(
        self, save: Callable[..., object], variant: str | None, *, keep_card: bool = False
    ) -> CommitInfo | PushResult | None:
        """Push by a temporary directory, for a `save_pretrained` that does more than hfshard can do from memory.

        Links in the directory were created by this call of `save_pretrained`, and are followed.

        Args:
            save: Saves into an empty directory; takes `is_main_process`.
            keep_card: Whether to keep the repo's README.md: the saved one is pushed only if the repo has none.

        Returns:
            The result of the push; None if another process of the group saves instead.
        """
        with staging_folder(self.ranks) as folder:
            folder.reject_unseen()
            with abort_peers_on_error(DirectoryPlace(folder.path), lambda: not self.ranks.is_alone):
                save(folder.path, **({} if self.ranks.is_leader else {"is_main_process": False}))

            def push() -> list[PushResult]:
                names = os.listdir(folder.path)
                if not names:
                    return []
                weights = WeightNames(variant)
                variants: set[str | None] = set()
                if weights.index in names or weights.single in names:
                    contents, indexes = collect_directory(folder.path, follow_links=True)
                    variants = set(indexes)
                else:  # an adapter; the repo may also contain its base model
                    below = _files_below(folder.path)
                    contents = {name: file_source(os.path.join(folder.path, name)) for name in below}
                card = contents.pop(README, None) if keep_card else None
                make_card = self.make_card if card is None else partial(_kept_card, card)
                return replace(self, make_card=make_card)._push_files(contents, variants)

            return self._run(push)

    def _push_files(
        self, contents: dict[str, ByteSource], variants: Iterable[str | None], gone: Collection[str] = ()
    ) -> list[PushResult]:
        request = PushRequest(
            contents=contents,
            variants=frozenset(variants),
            options=self.options,
            default_message=self.default_message,
            make_card=self.make_card,
            find_stale=lambda files, read: gone,
            check=self.ranks.look,
        )
        return [push_files(request, self.repo_id)]

    def _run(self, push: Callable[[], Sequence[PushResult]]) -> CommitInfo | PushResult | None:
        """Return what `push_to_hub` returns: for a repo of the Hub, what huggingface_hub's own would."""
        results = list(push()) if self.ranks.is_alone else send(self.ranks, push)
        if not results or os.path.isabs(self.repo_id):  # a directory hub, whose path was made absolute
            return results[0] if results else None
        return CommitInfo(
            commit_url=results[0].url,
            commit_message=self.options.commit_message or self.default_message,
            commit_description=self.options.commit_description or "",
            oid=results[0].commit,
            pr_url=results[0].pr_url,
        )


def begin_push(
    repo_id: str | os.PathLike[str],
    make_card: CardBuilder,
    options: PushOptions,
    default_message: str,
    ranks: Session,
) -> ModelPush:
    """Agree with the other ranks on the repo of a push, `repo_id` as in `push_checkpoint`; each has its fields' values.

    Raises:
        InvalidArgumentError: The repo is not one, or another rank pushes to another repo.
    """
    name = absolute_repo_id(repo_id)
    if not ranks.is_alone:
        agree_on_repo(ranks, name)
    return ModelPush(name, make_card, options, default_message, ranks)


def _replaced_files(request: SaveRequest) -> set[str]:
    return {CONFIG_NAME} if request.drops_config else set()


def _files_below(folder: str) -> list[str]:
    """List the paths below a folder in the form that they have in a repo."""
    found = [os.path.join(above, name) for above, _, files in os.walk(folder) for name in files]
    return sorted(os.path.relpath(path, folder).replace(os.sep, "/") for path in found)


def _kept_card(card: ByteSource, read_old: Callable[[], bytes] | None) -> bytes | None:
    if read_old is not None:
        return None
    with card.open() as reader:
        return reader.read()


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
    merged = merge_tags(card.data.tags, tags)
    if merged == merge_tags(card.data.tags):
        return None
    card.data.tags = merged
    return _to_bytes(card)


def merge_tags(*groups: Iterable[Any] | str | None) -> list[Any]:
    """Merge the tags of a card; each group is one tag, several, or None. A card of others may have mappings as tags."""
    tags: list[Any] = []
    for group in groups:
        for tag in [group] if isinstance(group, str) else group or ():
            if tag not in tags:
                tags.append(tag)
    return tags


def _to_bytes(card: ModelCard) -> bytes:
    return str(card).encode("utf-8")
