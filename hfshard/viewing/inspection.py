"""Open a checkpoint to view it, and read its contents: only headers are read, no tensors."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from hfshard._util.arguments import absolute_path, checked_path_text
from hfshard.checkpoint.load_options import LoadOptions
from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.constants import SIGNATURE_NAME
from hfshard.errors import AmbiguousWeightsError, CheckpointNotFoundError, InvalidArgumentError
from hfshard.foreign.foreign_shard import ForeignShard
from hfshard.format.index import FileDigest
from hfshard.hub.directory.directory_hub import split_address
from hfshard.places.place import place_to_load, place_to_save
from hfshard.places.source import CheckpointSource, open_source, open_source_by_ranges
from hfshard.shards.shard import SafetensorsShard
from hfshard.tensors.stored_tensor import stored_dtype_name
from hfshard.training.run.find_checkpoint import checkpoint_of_step, open_run
from hfshard.training.run.manifest import CHECKPOINT
from hfshard.viewing.model_summary import read_model_summary
from hfshard.viewing.results import FileEntry, Inspection, TensorEntry


def inspect_checkpoint(
    path: str | os.PathLike[str],
    *,
    variant: str | None = None,
    key: str | None = None,
    subfolder: str = "",
    revision: str | None = None,
    token: str | bool | None = None,
) -> Inspection:
    """Read the index and headers of the checkpoint at a place, as in `open_for_viewing`.

    Args:
        variant, subfolder, revision, token: As in transformers' `from_pretrained`.
        key: For a file of torch.save, as in `load_state_dict`.
    """
    query = CheckpointQuery(variant=variant, subfolder=subfolder, revision=revision, token=token)
    with open_for_viewing(path, query, LoadOptions(verify="none", key=key)) as viewed:
        return _inspected(viewed, os.fspath(path))


def _inspected(viewed: ViewedCheckpoint, typed: str) -> Inspection:
    checkpoint = viewed.checkpoint
    checkpoint.reject_others()
    is_as_typed = os.path.isdir(typed) and checkpoint.directory == absolute_path(typed)
    return Inspection(
        place=viewed.place,
        directory=typed if is_as_typed else checkpoint.directory,
        entry=checkpoint.weights.name,
        key=next((pickled.key for pickled in checkpoint.pickles.values()), None),
        files=tuple(_files(checkpoint)),
        tensors=tuple(_tensors(checkpoint)),
        tied_names=dict(checkpoint.index.tied_names),
        metadata=dict(checkpoint.index.metadata),
        is_verifiable=checkpoint.index.is_verifiable,
        signature=SIGNATURE_NAME if checkpoint.folder.has(SIGNATURE_NAME) else None,
        framework=None if checkpoint.foreign is None else checkpoint.foreign.table.framework,
        model=read_model_summary(checkpoint.folder, checkpoint.weights.name),
    )


def _files(checkpoint: OpenCheckpoint) -> list[FileEntry]:
    if checkpoint.foreign is not None:
        counts = Counter(tensor.file for tensor in _tensors(checkpoint))
        sizes = checkpoint.foreign.table.sizes
        return [FileEntry(name, nbytes, counts[name], FileDigest()) for name, nbytes in sizes.items()]
    counts = Counter(checkpoint.index.weight_map.values())
    digests = checkpoint.index.files
    configs = [name for name in digests if name not in checkpoint.shards]
    entries = []
    for name in [*checkpoint.shards, *checkpoint.pickles, *sorted(configs)]:
        nbytes = checkpoint.folder.size(name)
        is_config = name in configs and name not in checkpoint.pickles
        entries.append(FileEntry(name, nbytes, None if is_config else counts[name], digests.get(name, FileDigest())))
    return entries


def _tensors(checkpoint: OpenCheckpoint) -> list[TensorEntry]:
    entries = [
        TensorEntry(info.name, info.dtype, info.shape, info.nbytes, _file_of(shard, info.name, file))
        for file, shard in checkpoint.shards.items()
        for info in shard.header.tensors.values()
    ]
    for file, pickled in checkpoint.pickles.items():
        for name, tensor in pickled.tensors.items():
            dtype = stored_dtype_name(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")
            entries.append(TensorEntry(name, dtype, tuple(tensor.shape), tensor.nbytes, file))
    return entries


def _file_of(shard: SafetensorsShard, name: str, file: str) -> str:
    """Return the file with a tensor; of one in parts, that of its first byte."""
    if not isinstance(shard, ForeignShard):
        return file
    runs = shard.table.tensors[name].runs
    return runs[0].file if runs else next(iter(shard.table.sizes), file)


# Opening a checkpoint for viewing from any place that hfshard can read: only headers are read, no tensors.


_TRAINER_STATE: Final = "trainer_state.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ViewedCheckpoint:
    """An open checkpoint, and its place."""

    place: str
    """An absolute path, a store address, or "org/name@revision", followed by the subfolder; for a run, that of its
    checkpoint."""
    checkpoint: OpenCheckpoint
    is_of_hub: bool = False
    """Whether its files are read from the Hub by ranges, so that their ETags are those that the Hub lists."""


class OpenRequest(NamedTuple):
    """Arguments of `open_for_viewing`."""

    place: str | os.PathLike[str]
    query: CheckpointQuery
    options: LoadOptions


@contextmanager
def open_for_viewing(
    place: str | os.PathLike[str], query: CheckpointQuery, options: LoadOptions
) -> Iterator[ViewedCheckpoint]:
    """Open the checkpoint at a place.

    From the Hub, headers are read by ranges, and nothing is downloaded unless the weights are pickled.

    Args:
        place: A directory, a file of weights, a store address, "org/name" or a directory hub (either with an optional
            "@revision"), a run, also of transformers' Trainer, whose latest checkpoint is opened, or one of its
            checkpoints, "run/checkpoint-30". Each may contain a PEFT adapter instead of a model.
        query: The variant, subfolder, token and so on; a revision in the place takes precedence.
        options: How to check it.

    Raises:
        CheckpointNotFoundError: There are no weights.
        DamagedCheckpointError: The manifest of a run's latest checkpoint cannot be read.
        Everything that `open_source` and `open_source_by_ranges` raise.
    """
    path, revision = _split_place(place)
    query = replace(query, revision=query.revision if revision is None else revision, opens_adapter=True)
    with ExitStack() as stack:
        try:
            viewed = _opened(stack, path, query, options)
        except CheckpointNotFoundError as error:
            step_path = _checkpoint_of_run(path)
            if step_path is None:
                raise
            logger.info("%s Opening its checkpoint '%s'.", error, step_path)
            viewed = _opened(stack, step_path, query, options)
        yield viewed


def open_with_one_key(stack: ExitStack, requests: Sequence[OpenRequest]) -> list[ViewedCheckpoint]:
    """Open checkpoints with the key in their options, which applies to those that are files of torch.save.

    Raises:
        InvalidArgumentError: The key applies to none of them.
    """
    refusals: list[InvalidArgumentError] = []
    found = [_opened_with_key(stack, request, refusals) for request in requests]
    if len(refusals) == len(requests):
        raise refusals[0]
    return found


def _opened_with_key(stack: ExitStack, request: OpenRequest, refusals: list[InvalidArgumentError]) -> ViewedCheckpoint:
    try:
        return stack.enter_context(open_for_viewing(*request))
    except AmbiguousWeightsError:
        raise
    except InvalidArgumentError as error:
        keyless = request._replace(options=replace(request.options, key=None))
        try:
            viewed = stack.enter_context(open_for_viewing(*keyless))
        except AmbiguousWeightsError:
            raise error from None
        if viewed.checkpoint.weights.kind == "bin":
            raise
        refusals.append(error)
        return viewed


def _opened(stack: ExitStack, path: str, query: CheckpointQuery, options: LoadOptions) -> ViewedCheckpoint:
    source = CheckpointSource(path, query, takes_files=True)
    source.reject_unused_revision()
    local = source.find_local()
    if local is not None:
        checkpoint = stack.enter_context(open_source(source, options, local))
        return ViewedCheckpoint(_place(source.path, query), checkpoint)
    from hfshard.hub.download import is_offline  # imports huggingface_hub, which is slow

    place = _place(path, query)
    if not is_offline(query.local_files_only):
        try:
            checkpoint = stack.enter_context(open_source_by_ranges(source, options))
        except InvalidArgumentError as error:
            logger.info("%s Downloading them.", error)  # pickles; any other error is raised again
        else:
            return ViewedCheckpoint(place, checkpoint, is_of_hub=True)
    return ViewedCheckpoint(place, stack.enter_context(open_source(source, options)))


def _split_place(place: str | os.PathLike[str]) -> tuple[str, str | None]:
    text = checked_path_text(place)
    at = place_to_load(text)
    if not at.is_read_from_disk:
        return at.address, None
    if os.path.exists(text):
        return absolute_path(place), None
    return split_address(place)


def _place(path: str, query: CheckpointQuery) -> str:
    subfolder = query.subfolder.strip("/")
    revision = "" if query.revision is None else f"@{query.revision}"
    return f"{path}{revision}/{subfolder}" if subfolder else f"{path}{revision}"


def _checkpoint_of_run(path: str) -> str | None:
    """Find the latest checkpoint of the run at a path, or that of the step in its name, ignoring leading zeros."""
    root, _, name = path.rpartition("/")
    named = CHECKPOINT.fullmatch(name)
    if place_to_load(path).is_read_from_disk and not os.path.isdir(path if named is None else root):
        return None
    if named is not None:
        try:
            found = checkpoint_of_step(open_run(root), int(named[1])).path
        except CheckpointNotFoundError:
            return None
        return None if found == path else found
    checkpoints = open_run(path).checkpoints()
    if not checkpoints:
        return _latest_of_trainer(path)
    if checkpoints[0].problem is not None:
        raise checkpoints[0].problem
    return checkpoints[0].path


def _latest_of_trainer(path: str) -> str | None:
    """Find the latest checkpoint of a run of transformers' Trainer, which writes its state after the model."""
    folder = place_to_save(path, "path").folder()
    steps = {name: int(match[1]) for name in folder.folders() if (match := CHECKPOINT.fullmatch(name))}
    states = folder.look_up([f"{name}/{_TRAINER_STATE}" for name in steps])
    found = {step: name for name, step in steps.items() if f"{name}/{_TRAINER_STATE}" in states}
    return f"{path}/{found[max(found)]}" if found else None
