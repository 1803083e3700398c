"""Re-shards from end to end: opens the source, copies its tensors into other files, checks it again, commits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from hfshard._util.addresses import is_address
from hfshard._util.arguments import absolute_path
from hfshard.checkpoint.companion_files import companions_at, refuse_conflicts, taken_at
from hfshard.checkpoint.load_options import LoadOptions
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint, is_compared
from hfshard.constants import README, SIGNATURE_NAME
from hfshard.disk.byte_source import ByteSource, BytesSource
from hfshard.disk.safe_open import refuse_links_to_outside
from hfshard.errors import InvalidArgumentError
from hfshard.format.digests import Verify
from hfshard.format.index import CheckpointIndex
from hfshard.hub.own_files import OwnFiles
from hfshard.loading.source import CheckpointSource, open_source
from hfshard.resharding.checks import (
    SourceCheck,
    check_in_place,
    check_places,
    files_of,
    is_same_place,
    recorded_checksum,
    refuse_beside_file,
    refuse_signed,
    sizes_of,
    source_text,
)
from hfshard.resharding.in_place import reshard_in_place
from hfshard.resharding.request import with_dtype, with_tensors
from hfshard.saving.options import SaveOptions
from hfshard.saving.request import SaveRequest
from hfshard.saving.to_directory import save_request

logger = logging.getLogger(__name__)

BesideOf = Callable[[OpenCheckpoint], Mapping[str, ByteSource]]
"""Finds the files that lie beside a checkpoint which is open."""

_FLOATS: Final = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
"""What tensors can be cast to."""


@dataclass(frozen=True, slots=True)
class ReshardResult:
    """What a re-shard read and wrote."""

    directory: str
    """The directory, or the address, that was written."""
    index: CheckpointIndex
    source: str
    """The directory, the address, or the one file, that the tensors were read from."""
    files_before: dict[str, int]
    """The source's files of weights -> bytes."""
    is_compared: bool
    """Whether every byte was compared with a checksum while it was copied; else the source has none."""
    companion_files: tuple[str, ...]
    """Names of the files that were copied too."""


_LINKS: Final = (
    "the checkpoint's directory, and what they lead to would be published with the copy. Pass follow_links=True "
    "(--follow-links) to copy what is there, or move the links away."
)


def reshard_source(
    source: CheckpointSource,
    dst: str,
    options: SaveOptions,
    *,
    dtype: str | torch.dtype | None = None,
    low_disk: bool = False,
    key: str | None = None,
    follow_links: bool = False,
    beside: BesideOf | None = None,
    overwrite: bool = True,
    verify: Verify = "structure",
) -> ReshardResult:
    """Save a checkpoint in files of another size, and tell what was read and written.

    Args:
        source: The checkpoint.
        dst: Directory, or address of a store, to save it in; the source's own: in place.
        options: How to save it; `variant` is the source's.
        dtype, low_disk, key, follow_links: As in `reshard_checkpoint`.
        beside: For a copy, whose files hold what those of the source do: finds the other files that go along, and
            replace those of the same names. None: the files are planned by size, and companions are found, and replace
            nothing.
        overwrite: For a copy: replace files that don't belong to the checkpoint in `dst` too; else they are refused
            (see `OwnFiles`).
        verify: How the source is checked before the first byte is written.

    Raises:
        Everything that `reshard_checkpoint` raises.
    """
    floating = _floating_dtype(dtype)
    dst = absolute_path(dst, "dst")
    local = source.find_local()
    if local is not None and local.weights_name is not None:
        refuse_beside_file(local, dst)
    is_in_place = local is not None and is_same_place(local, dst)
    if low_disk and (not is_in_place or floating is not None or is_address(dst)):
        raise InvalidArgumentError(
            "low_disk re-shards a checkpoint in place and as it is: give the same directory twice, and no dtype. "
            "(In a store, nothing is written to the disk in any case.)",
            path=dst,
        )
    if local is None:
        query = replace(source.query, needs_companions=True)
        local = replace(source, query=query).fetch(options.progress)
    is_file = local.weights_name is not None
    if not is_file:
        check_places(source, local, dst, is_in_place=is_in_place)
    with open_source(source, LoadOptions(progress=options.progress, key=key, verify=verify), local) as checkpoint:
        if is_in_place:
            check_in_place(checkpoint, low_disk=low_disk)
            if not options.drop_signature:
                refuse_signed(checkpoint)
        request = SaveRequest(options=options)
        if beside is not None:
            options = replace(options, checksum=recorded_checksum(checkpoint))
            request = SaveRequest(options=options, kept_files=files_of(checkpoint))
        request = with_tensors(request, checkpoint, weights_only=is_file)
        if floating is not None:
            request = with_dtype(request, floating, checkpoint.directory)
        if beside is not None:
            request = replace(request, companion_files=beside(checkpoint), replaces_readme=overwrite)
        elif not is_in_place and not is_file:
            request = _with_companion_files(request, checkpoint.directory, dst, follow_links=follow_links)
        was_compared = is_compared(checkpoint)
        if not was_compared:
            logger.info(
                "'%s' has no checksums: its structure was checked, its bytes can't be.", checkpoint.weights_path
            )
        save = partial(reshard_in_place, checkpoint) if low_disk else save_request
        check: Callable[[], None] = SourceCheck(checkpoint, is_in_place=is_in_place)
        if not overwrite:
            request, check = _without_own_files(request, dst, check)
        index = save(request, dst, check)
    return ReshardResult(
        dst, index, source_text(local), sizes_of(checkpoint), was_compared, tuple(request.companion_files)
    )


def _with_companion_files(request: SaveRequest, place: str, dst: str, *, follow_links: bool) -> SaveRequest:
    """Add the files beside the checkpoint, which `dst` must not have with other contents."""
    companions = companions_at(place, request.small_files.keys())
    if not (follow_links or is_address(place)):
        refuse_links_to_outside(place, [*request.small_files, *companions], _LINKS)
    if companions.pop(SIGNATURE_NAME, None) is not None:
        logger.warning(
            "The signature of '%s' is not copied, as it does not hold for other files. To sign them, run: hfshard sign "
            "%s --private-key KEY",
            place,
            dst,
        )
    refuse_conflicts(companions, dst, taken_at(dst, companions))
    return replace(request, companion_files=companions)


def _without_own_files(
    request: SaveRequest, dst: str, check: Callable[[], None]
) -> tuple[SaveRequest, Callable[[], None]]:
    """Refuse to replace the user's own files in `dst`, now and right before the commit, and keep a README there."""
    small = {name: BytesSource(raw) for name, raw in request.small_files.items()}
    own_files = OwnFiles(dst, request.options.names, {**small, **request.companion_files})

    def check_both() -> None:
        check()
        own_files()

    companions = dict(request.companion_files)
    if own_files.keeps_readme:
        del companions[README]
    return replace(request, companion_files=companions), check_both


def _floating_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in _FLOATS:
        raise InvalidArgumentError(f"dtype must be one of {', '.join(_FLOATS)}, or None to leave it, got {dtype!r}.")
    return _FLOATS[name]
