"""Re-shards a checkpoint: the bytes of its tensors go into files of another size, and are never decoded."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from hfshard.constants import (
    CONFIG_NAME,
    DEFAULT_MAX_SHARD_SIZE,
)
from hfshard.errors import CheckpointChangedError, InvalidArgumentError
from hfshard.hub.address import directory_of
from hfshard.hub.marker import is_marked
from hfshard.loading.source import CheckpointSource, LocalCheckpoint, open_source
from hfshard.planning.plan import Packing
from hfshard.planning.size import parse_size
from hfshard.resharding.in_place import reshard_in_place
from hfshard.resharding.request import with_dtype, with_tensors
from hfshard.save import save_request
from hfshard.saving.prepare import SaveRequest
from hfshard.storage.checkpoint.checkpoint import OpenCheckpoint
from hfshard.storage.checkpoint.raw_tensors import has_checksums
from hfshard.storage.disk.companions import find_companion_files, refuse_conflicts
from hfshard.storage.disk.safe_open import Identity, identity_of
from hfshard.storage.format.index import CheckpointIndex
from hfshard.storage.format.integrity import Checksum, check_checksum
from hfshard.storage.format.names import WeightNames

logger = logging.getLogger(__name__)

_FLOATS: Final = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
"""What tensors can be cast to."""


@dataclass(frozen=True, slots=True)
class ReshardResult:
    """What came of it."""

    directory: str
    index: CheckpointIndex
    source: str
    """The directory that the tensors were read from."""
    files_before: dict[str, int]
    """The source's files of weights, and their bytes."""
    is_compared: bool
    """Whether every byte that was copied was compared with a checksum on the way; else the source has none."""
    companion_files: tuple[str, ...]
    """Files that were copied along."""


def reshard_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
    *,
    packing: Packing = "greedy",
    dtype: str | torch.dtype | None = None,
    low_disk: bool = False,
    checksum: Checksum | None = "sha256",
    variant: str | None = None,
    use_safetensors: bool | None = None,
    subfolder: str = "",
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    progress: bool | None = None,
) -> CheckpointIndex:
    """Save a checkpoint once more in files of another size, durably and all or nothing; pickles become safetensors.

    The bytes of tensors are copied through a few buffers and compared with the checksums that the source has of them;
    of a checkpoint that hfshard did not save, the structure alone can be checked. What is written is what a save of
    the same tensors with the same arguments writes, bit for bit. Their order is that of the source's files and of the
    bytes in them (of a pickle, that of its state dict): the order of the state dict that was saved, but where dtypes
    of several sizes are mixed, or a tensor was too large for its file. Aliases, complex tensors, and the metadata of
    index and files carry over; what stands in the `__metadata__` of a single file comes to stand in the index too.

    config.json and generation_config.json go with the weights. Into another directory go also the other files at the
    top level that are no weights and have at most 256 MiB: tokenizer, README (where there is none), code. Where `dst`
    has another file by such a name, nothing is written.

    Args:
        src: A directory, a repo of the Hub, or a directory that serves as a hub.
        dst: Where to. The same directory: in place; what stands there loads until the new files are whole.
        max_shard_size, packing, checksum, progress: As in `save_state_dict`.
        dtype: Cast the floating tensors ("bfloat16", "float16", "float32", "float64"), block by block, and say so in
            config.json. Integers, complex numbers and fp8 stay; a quantized checkpoint is refused.
        low_disk: In place only, and sharded safetensors only: in groups of files, so that at no time more than one
            shard (of the old or the new size, whichever is larger) is on the disk twice. Each group is committed by
            itself: a run that was killed leaves a whole checkpoint, and another run goes on. A new file is made of
            whole old ones, or of parts of one: there may be a few more files than without.
        variant: Of the source, and of what is written.
        use_safetensors: None: safetensors before pickles; True: only them; False: only pickles. Those of before the
            zip (torch 1.5 and older) are read into memory as a whole.
        subfolder, revision, token, cache_dir, local_files_only: As in `load_state_dict`.

    Returns:
        The index of what was written.

    Raises:
        InvalidSizeError, InvalidArgumentError: Before anything is touched: `dst` lies in `src`, `low_disk` with
            another directory, a dtype that nothing is cast to.
        SaveDirectoryError: `dst` has other files by the names of those that go along; or see `save_state_dict`.
        IntegrityError: A tensor of the source is damaged; nothing was changed (with low_disk: its group was not).
        CheckpointChangedError: Somebody else saved over the source meanwhile; nothing was changed.
        Everything that `load_state_dict` and `save_state_dict` raise.
    """
    source = CheckpointSource(
        os.fspath(src), subfolder, variant, use_safetensors, revision, token, cache_dir, local_files_only
    )
    return resharded(
        source, os.fspath(dst), max_shard_size,
        packing=packing, dtype=dtype, low_disk=low_disk, checksum=checksum, progress=progress,
    ).index  # fmt: skip


def resharded(
    source: CheckpointSource,
    dst: str,
    max_shard_size: int | str = DEFAULT_MAX_SHARD_SIZE,
    *,
    packing: Packing = "greedy",
    dtype: str | torch.dtype | None = None,
    low_disk: bool = False,
    checksum: Checksum | None = "sha256",
    progress: bool | None = None,
) -> ReshardResult:
    """`reshard_checkpoint`, and what there is to tell of it."""
    limit, floating = parse_size(max_shard_size), _floating(dtype)
    check_checksum(checksum)
    names, local = WeightNames(source.variant), source.local_place()
    is_in_place = local is not None and _is_same(local.directory, dst)
    if low_disk and (not is_in_place or floating is not None):
        raise InvalidArgumentError(
            "low_disk re-shards a checkpoint in place and as it is: give the same directory twice, and no dtype.",
            path=dst,
        )
    place = local or replace(source, has_others=True).place(progress)
    _check_places(source, place, dst, is_in_place=is_in_place)
    with open_source(source, "structure", progress, place) as checkpoint:
        if is_in_place:
            _check_in_place(checkpoint, low_disk=low_disk)
        request = with_tensors(SaveRequest({}, names, limit, packing, checksum, progress=progress), checkpoint)
        if floating is not None:
            request = with_dtype(request, floating, checkpoint.directory)
        if not is_in_place:
            companions = find_companion_files(checkpoint.directory, {CONFIG_NAME, *request.model_files})
            request = replace(request, companion_files=companions)
            refuse_conflicts(request.companion_files, dst)
        identities, is_compared = _identities(checkpoint), has_checksums(checkpoint)
        if not is_compared:
            logger.info(
                "'%s' has no checksums: its structure was checked, its bytes can't be.", checkpoint.weights_path
            )
        save = partial(reshard_in_place, checkpoint) if low_disk else save_request
        index = save(request, dst, partial(_check_unchanged, checkpoint, identities))
    files = {os.path.relpath(path, place.directory): size for path, (_, _, size, _) in identities.items()}
    return ReshardResult(dst, index, place.directory, files, is_compared, tuple(request.companion_files))


def _floating(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in _FLOATS:
        raise InvalidArgumentError(f"dtype must be one of {', '.join(_FLOATS)}, or None to leave it, and is {dtype!r}.")
    return _FLOATS[name]


def _is_same(directory: str, other: str) -> bool:
    return os.path.isdir(directory) and os.path.isdir(other) and os.path.samefile(directory, other)


def _check_places(source: CheckpointSource, place: LocalCheckpoint, dst: str, *, is_in_place: bool) -> None:
    """Refuse to write into the source, but for a checkpoint that is replaced; what a hub keeps is nobody's to write."""
    root, target = os.path.realpath(place.directory), os.path.realpath(dst)
    if source.subfolder and not is_in_place and os.path.isdir(source.path) and _is_same(source.path, dst):
        raise InvalidArgumentError(
            f"'{dst}' holds the source in its folder '{source.subfolder}': to re-shard that in place, give "
            f"'{place.directory}' twice; else give a directory outside.",
            path=dst,
        )
    hub = directory_of(source.path) or (source.path if os.path.isdir(source.path) else None)
    is_hub = place.commit is not None or (hub is not None and is_marked(hub)) or _is_snapshot(root)
    roots = [root, os.path.realpath(hub)] if is_hub and hub is not None else [root]
    if any(target.startswith(above.rstrip("/") + "/") or (is_hub and target == above) for above in roots):
        what = "what a hub keeps" if is_hub else "the checkpoint that is re-sharded"
        todo = "" if is_hub else ", or the source itself to re-shard in place"
        raise InvalidArgumentError(f"'{dst}' lies in {what}: give a directory outside{todo}.", path=dst)
    if is_in_place and is_hub:
        raise InvalidArgumentError(f"'{dst}' is of what a hub keeps: give a directory outside.", path=dst)


def _is_snapshot(directory: str) -> bool:
    """Whether it is of the Hub's cache: its files are links to what all commits share."""
    return re.search(r"/models--[^/]+/snapshots/[0-9a-f]{40}(/|$)", directory) is not None


def _check_in_place(checkpoint: OpenCheckpoint, *, low_disk: bool) -> None:
    if not checkpoint.pickles:
        return
    if low_disk:
        raise InvalidArgumentError(
            f"low_disk is for safetensors, and '{checkpoint.weights_path}' is a pickle. Convert it without low_disk.",
            path=checkpoint.weights_path,
        )
    names = checkpoint.names
    for name in (names.single, names.index):
        if os.path.lexists(os.path.join(checkpoint.directory, name)):
            raise InvalidArgumentError(
                f"'{checkpoint.directory}' has '{name}' too, which is what is loaded: converting the pickles in place "
                "would replace it. Give another directory, or remove what is old.",
                path=checkpoint.directory,
            )


def _identities(checkpoint: OpenCheckpoint) -> dict[str, Identity]:
    """Of the files of weights, as they were opened."""
    try:
        pickles = {file.path: identity_of(os.stat(file.path)) for file in checkpoint.pickles.values()}
    except OSError as error:
        raise _changed(checkpoint) from error
    return pickles | {shard.path: shard.identity for shard in checkpoint.shards.values()}


def _check_unchanged(checkpoint: OpenCheckpoint, identities: Mapping[str, Identity]) -> None:
    try:
        found = {path: identity_of(os.stat(path)) for path in identities}
    except OSError as error:
        raise _changed(checkpoint) from error
    if found != identities or not checkpoint.is_unchanged():
        raise _changed(checkpoint)


def _changed(checkpoint: OpenCheckpoint) -> CheckpointChangedError:
    return CheckpointChangedError(
        f"The checkpoint in '{checkpoint.directory}' was replaced or changed while it was re-sharded, and nothing "
        "was saved. Do it again when the process that saves there is done.",
        path=checkpoint.directory,
    )
