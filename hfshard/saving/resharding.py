"""Resharding from end to end: open the source, copy its tensors into other files, check it again, commit."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

import torch

from hfshard.checkpoint.companion_files import reject_companion_conflicts
from hfshard.checkpoint.folder import Folder, LocalFolder
from hfshard.checkpoint.load_options import LoadOptions
from hfshard.checkpoint.locate import config_in
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint, cast, is_compared, is_packed, raw_tensors
from hfshard.commit.directory_state import reject_hub_directory, weights_override_of
from hfshard.constants import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    MAX_CONFIG_BYTES,
    METADATA_KEY,
    README,
    SIGNATURE_NAME,
)
from hfshard.disk.byte_source import ByteSource, BytesSource
from hfshard.disk.safe_open import Identity, identity_of, reject_links_to_outside
from hfshard.errors import CheckpointChangedError, InvalidArgumentError, SignatureError
from hfshard.foreign.find_foreign import folder_of_model, is_of_run
from hfshard.format.index import CheckpointIndex, Checksum, Verify, without_commit_marker, without_weights_override
from hfshard.format.strict_json import parse_json_object
from hfshard.hub.pull_target import OwnFiles
from hfshard.places.place import ResolvedSource, SavePlace, is_same_directory
from hfshard.places.source import CheckpointSource, open_source
from hfshard.saving.pipeline import plan_request, save_request
from hfshard.saving.reshard_in_place import reshard_in_place
from hfshard.saving.save_request import SaveOptions, SaveRequest
from hfshard.shards.shard_file import SafetensorsFile
from hfshard.shards.write_shards import COMPLEX_AS_REAL_KEY
from hfshard.tensors.tied import find_shared_tensors

logger = logging.getLogger(__name__)

ListCompanions = Callable[[OpenCheckpoint], Mapping[str, ByteSource]]
"""Function that finds the companion files of an open checkpoint."""

_FLOATS: Final = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
"""Dtypes that tensors can be cast to."""


@dataclass(frozen=True, slots=True)
class ReshardResult:
    """Result of a resharding."""

    directory: str
    """The directory or address that was written."""
    index: CheckpointIndex
    source: str
    """The directory, address or single file that the tensors were read from."""
    files_before: dict[str, int]
    """The source's files of weights -> bytes."""
    is_compared: bool
    """True if every byte was compared with a checksum; otherwise the source has no checksums."""
    companion_files: tuple[str, ...]
    """Names of the other files that were copied."""


_LINKS: Final = (
    "the checkpoint's directory, and their targets would be published with the copy. Pass follow_links=True "
    "(--follow-links) to copy the targets, or move the links away."
)


def reshard_source(
    source: CheckpointSource,
    target: SavePlace,
    options: SaveOptions,
    *,
    dtype: str | torch.dtype | None = None,
    low_disk: bool = False,
    key: str | None = None,
    follow_links: bool = False,
    config: str | None = None,
    beside: ListCompanions | None = None,
    overwrite: bool = True,
    verify: Verify = "structure",
) -> ReshardResult:
    """Save a checkpoint in files of another size, and return what was read and written.

    Args:
        source: The checkpoint.
        target: Where to save it; the source's own place: in place.
        options: How to save it; `variant` is the source's.
        dtype, low_disk, key, follow_links: The arguments of `reshard_checkpoint`.
        config: The directory with config.json and the companion files; None: that of the weights, or, if another
            framework saved them in parts, the one above.
        beside: For a copy, whose files have the same tensors as the source's: finds the other files that go along, and
            replace existing ones of the same names. None: the files are planned by size, and the companion files that
            are found replace nothing.
        overwrite: For a copy: also replace files in `dst` that don't belong to the checkpoint; otherwise such files are
            an error (see `OwnFiles`).
        verify: Level of the source's check before the first byte is written.

    Raises:
        Everything that `reshard_checkpoint` raises.
    """
    floating = _floating_dtype(dtype)
    dst = target.address
    source.reject_unused_revision()
    local = source.find_local()
    if local is not None and local.weights_name is not None:
        reject_beside_file(local, target)
    is_in_place = local is not None and target.is_same(local.folder)
    if low_disk and (not is_in_place or floating is not None or not target.is_read_from_disk):
        raise InvalidArgumentError(
            "low_disk re-shards a checkpoint in place, without a cast. Pass the same directory twice, and no dtype. "
            "(With a store, nothing is written to disk anyway.)",
            path=dst,
        )
    if local is None:
        query = replace(source.query, needs_companions=True)
        local = replace(source, query=query).fetch(options.progress)
    is_file = local.weights_name is not None
    if not is_file:
        check_places(source, local, target, is_in_place=is_in_place)
    with open_source(source, LoadOptions(progress=options.progress, key=key, verify=verify), local) as checkpoint:
        if is_in_place:
            check_in_place(checkpoint, low_disk=low_disk)
            if not options.drop_signature:
                reject_signed(checkpoint)
        request = SaveRequest(options=options)
        if beside is not None:
            options = replace(options, checksum=recorded_checksum(checkpoint))
            files = tuple(tuple(shard.header.tensors) for shard in checkpoint.shards.values())  # of pickles, none
            request = SaveRequest(options=options, kept_files=files)
        of_model = _folder_of_model(checkpoint, config)
        request = with_tensors(request, checkpoint, None if is_file and config is None else of_model)
        if floating is not None:
            request = with_dtype(request, floating, checkpoint.directory)
        if beside is not None:
            request = replace(request, companion_files=beside(checkpoint), replaces_readme=overwrite)
        elif not is_in_place and (not is_file or config is not None):
            request = _with_companion_files(request, checkpoint, of_model, dst, follow_links=follow_links)
            companions = request.companion_files
            reject_companion_conflicts(companions, dst, target.folder().existing(companions.keys()))
        was_compared = is_compared(checkpoint)
        if not was_compared:
            logger.info("'%s' has no checksums: only its structure was checked.", checkpoint.weights_path)
        save = partial(reshard_in_place, checkpoint) if low_disk else save_request
        check: Callable[[], None] = SourceUnchangedCheck(checkpoint)
        if not overwrite:
            request, check = _without_own_files(request, target, check)
        index = save(request, target, check)
    return ReshardResult(
        dst, index, source_text(local), sizes_of(checkpoint), was_compared, tuple(request.companion_files)
    )


def _folder_of_model(checkpoint: OpenCheckpoint, config: str | None) -> Folder:
    """Return the folder with the config and the companion files."""
    if config is not None:
        if not os.path.isfile(os.path.join(config, CONFIG_NAME)):
            raise InvalidArgumentError(
                f"There is no '{CONFIG_NAME}' in '{config}'. Pass the directory that the model was trained from, or "
                "leave out --config to write the weights alone.",
                path=config,
            )
        return LocalFolder(config)
    if checkpoint.foreign is None:
        return checkpoint.folder
    return LocalFolder(folder_of_model(checkpoint.directory, checkpoint.weights.name))


def _with_companion_files(
    request: SaveRequest, checkpoint: OpenCheckpoint, folder: Folder, address: str, *, follow_links: bool
) -> SaveRequest:
    """Add the files of a folder that go along with a checkpoint to the place of this address."""
    companions = folder.companions(request.small_files.keys())
    if checkpoint.foreign is not None:
        companions = {name: file for name, file in companions.items() if not is_of_run(name)}
    if folder.traits.is_directory and not follow_links:
        reject_links_to_outside(folder.path, [*request.small_files, *companions], _LINKS)
    if companions.pop(SIGNATURE_NAME, None) is not None:
        logger.warning(
            "The signature of '%s' is not copied: it does not cover the new files. To sign them, run: hfshard sign "
            "%s --private-key KEY",
            folder.path,
            address,
        )
    return replace(request, companion_files=companions)


def request_of_parts(
    checkpoint: OpenCheckpoint, options: SaveOptions, address: str, *, follow_links: bool
) -> SaveRequest:
    """Return what a save of weights in parts writes to `address`, and the files that go along.

    The checkpoint must stay open until it is saved.
    """
    folder = _folder_of_model(checkpoint, None)
    request = with_tensors(SaveRequest(options=options), checkpoint, folder)
    return _with_companion_files(request, checkpoint, folder, address, follow_links=follow_links)


def _without_own_files(
    request: SaveRequest, target: SavePlace, check: Callable[[], None]
) -> tuple[SaveRequest, Callable[[], None]]:
    """Reject replacing the user's own files in the target, now and right before the commit, and keep a README there."""
    small = {name: BytesSource(raw) for name, raw in request.small_files.items()}
    own_files = OwnFiles(target.folder(), request.options.names, {**small, **request.companion_files})

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
        raise InvalidArgumentError(f"dtype must be one of {', '.join(_FLOATS)}, or None to keep it, got {dtype!r}.")
    return _FLOATS[name]


# Save requests from a checkpoint in files: its tensors, unchanged or cast, and the files that go along.


_DTYPE_KEYS: Final = ("dtype", "torch_dtype")
"""Config keys for the dtype in which a model is loaded: transformers' current key, and its older one."""

_OWN_KEYS: Final = frozenset({METADATA_KEY, COMPLEX_AS_REAL_KEY, "format"})
"""Keys of a file's `__metadata__` that a save writes itself."""

_MetadataValue = TypeVar("_MetadataValue")


def with_tensors(request: SaveRequest, checkpoint: OpenCheckpoint, of_model: Folder | None) -> SaveRequest:
    """Return a request with everything that a checkpoint contains, unchanged, and the configs in a folder.

    The checkpoint must stay open until it is saved.
    """
    index = checkpoint.index
    tensors = raw_tensors(checkpoint)
    tied_names = find_shared_tensors(checkpoint.pickled_tensors()) if checkpoint.pickles else index.tied_names
    file_metadata: dict[str, str] = {}
    for shard in checkpoint.shards.values():
        file_metadata = shard.header.metadata | file_metadata
    metadata = _without(index.metadata, frozenset() if checkpoint.weights.is_index else _OWN_KEYS)
    request = replace(
        request,
        tensors={name: value for name, value in tensors.items() if name not in tied_names},
        tied_names=tied_names,
        undeclared_ties=index.undeclared_ties,
        options=replace(request.options, metadata=metadata),
        file_metadata=_without(file_metadata, _OWN_KEYS | tied_names.keys()),
        total_parameters=index.total_parameters,
        config=None if of_model is None else _config_without_override(of_model),
        model_files={} if of_model is None else _model_files_of(of_model),
    )
    if checkpoint.pickles or request.kept_files:
        return request
    if plan_request(request).weight_map == index.weight_map:
        return request
    return replace(request, tensors={name: tensors[name] for name in infer_name_order(checkpoint)})


def _config_without_override(folder: Folder) -> bytes | None:
    """Read the config, without the weights override that an unfinished commit may have left."""
    raw = config_in(folder)
    if raw is None:
        return None
    config = without_commit_marker(raw)  # a config from a store has a mark
    return config if weights_override_of(config) is None else without_weights_override(config)


def _model_files_of(folder: Folder) -> dict[str, bytes]:
    if not folder.has(GENERATION_CONFIG_NAME):
        return {}
    return {GENERATION_CONFIG_NAME: without_commit_marker(folder.read_small(GENERATION_CONFIG_NAME, MAX_CONFIG_BYTES))}


def infer_name_order(checkpoint: OpenCheckpoint) -> list[str]:
    """Infer the name order of the saved state dict from the safetensors files.

    1. Files are filled in that order, but a tensor that is too large gets its own file, before the file that is being
       filled. So if a file has one tensor, and more bytes than any file with several, its tensor came after the first
       tensor of the next file. It is placed after the last, where an output layer is.
    2. Large files at the beginning, such as that of an embedding, may have been written when none was being filled.
       They stay first.
    """
    files = [list(shard.header.tensors) for shard in checkpoint.shards.values()]
    sizes = [shard.size for shard in checkpoint.shards.values()]
    limit = max((size for size, names in zip(sizes, files, strict=True) if len(names) > 1), default=0)
    order: list[str] = []
    waiting: list[str] = []
    was_filled = False
    for size, names in zip(sizes, files, strict=True):
        is_large = len(names) == 1 and size > limit > 0
        if is_large and was_filled:
            waiting += names
            continue
        order += names + waiting
        waiting, was_filled = [], was_filled or not is_large
    return order + waiting


def _without(values: Mapping[str, _MetadataValue], keys: frozenset[str]) -> dict[str, _MetadataValue]:
    return {key: value for key, value in values.items() if key not in keys}


def with_dtype(request: SaveRequest, dtype: torch.dtype, directory: str) -> SaveRequest:
    """Return a request whose floating tensors are cast when they are written, with the new dtype in the config.

    Raises:
        InvalidArgumentError: The checkpoint is quantized: its floats mean nothing without their scales.
    """
    path = os.path.join(directory, CONFIG_NAME)
    raw = request.config
    config: dict[str, Any] | None = None
    if raw is not None:
        remedy = "Save the model again."
        config = parse_json_object(raw, path=path, what="Config", remedy=remedy, takes_constants=True)
    packed = [name for name, value in request.tensors.items() if is_packed(value)]
    if packed or (config is not None and config.get("quantization_config")):
        why = f"'{packed[0]}' is an 8-bit float or smaller" if packed else "its config has a quantization_config"
        raise InvalidArgumentError(
            f"The checkpoint in '{directory}' is quantized ({why}), and a cast would corrupt it. "
            "Re-shard it without dtype, or dequantize the model first.",
            path=directory,
        )
    tensors = {name: cast(value, dtype) for name, value in request.tensors.items()}
    if config is not None:
        keys = [key for key in _DTYPE_KEYS if key in config] or [_DTYPE_KEYS[0]]
        changed = config | dict.fromkeys(keys, str(dtype).removeprefix("torch."))
        if changed != config:
            raw = f"{json.dumps(changed, indent=2, sort_keys=True)}\n".encode()  # as transformers writes it
    return replace(request, tensors=tensors, config=raw)


# Checks of a resharding: directories that it must not write into, and sources that change meanwhile.


def source_text(local: ResolvedSource) -> str:
    """Return the directory, the address or the file that tensors are read from."""
    return local.folder.path if local.weights_name is None else os.path.join(local.folder.path, local.weights_name)


def reject_beside_file(local: ResolvedSource, target: SavePlace) -> None:
    """Reject resharding one file into its own directory, where it may be a part of another checkpoint.

    Raises:
        InvalidArgumentError: The target is that directory.
        SaveDirectoryError: The target is in a directory hub.
    """
    dst = target.address
    reject_hub_directory(dst)
    if target.is_same(local.folder):
        raise InvalidArgumentError(
            f"'{dst}' is the directory of '{local.weights_name}' itself. Pass another one to write into, or the "
            "directory twice to re-shard its checkpoint in place.",
            path=dst,
        )


def check_places(source: CheckpointSource, local: ResolvedSource, target: SavePlace, *, is_in_place: bool) -> None:
    """Reject writes into the source, except to replace it, and into the files of a hub.

    Raises:
        InvalidArgumentError: The target is not allowed; the message says what to give instead.
        SaveDirectoryError: The target is in a directory hub.
    """
    dst = target.address
    reject_hub_directory(dst)
    if not (local.traits.is_directory and target.is_read_from_disk):
        if f"{dst}/".startswith(f"{local.folder.path}/") and not is_in_place:
            raise InvalidArgumentError(
                f"'{dst}' is in the checkpoint to re-shard. Pass another prefix, or "
                f"'{local.folder.path}' itself to re-shard in place.",
                path=dst,
            )
        return
    root, written = os.path.realpath(local.directory), target.key
    subfolder = source.query.subfolder
    if subfolder and not is_in_place and is_same_directory(source.path, dst):
        raise InvalidArgumentError(
            f"'{dst}' contains the source in its folder '{subfolder}'. To re-shard that in place, pass "
            f"'{local.directory}' twice; otherwise pass a directory outside.",
            path=dst,
        )
    hub = source.path if os.path.isdir(source.path) else None
    is_hub = local.commit is not None or _is_snapshot(root)
    roots = [root, os.path.realpath(hub)] if is_hub and hub is not None else [root]
    if any(written.startswith(above.rstrip("/") + "/") or (is_hub and written == above) for above in roots):
        what = "the files of a hub" if is_hub else "the checkpoint to re-shard"
        todo = "" if is_hub else ", or the source itself to re-shard in place"
        raise InvalidArgumentError(f"'{dst}' is in {what}. Pass a directory outside{todo}.", path=dst)
    if is_in_place and is_hub:
        raise InvalidArgumentError(f"'{dst}' is in the files of a hub. Pass a directory outside.", path=dst)


def _is_snapshot(directory: str) -> bool:
    """Return whether a directory is in a snapshot in the Hub's cache, whose files link to blobs that commits share."""
    return re.search(r"/models--[^/]+/snapshots/[0-9a-f]{40}(/|$)", directory) is not None


def check_in_place(checkpoint: OpenCheckpoint, *, low_disk: bool) -> None:
    """Reject converting pickles in place if that would replace other weights, or with low_disk; and rank files.

    Raises:
        InvalidArgumentError: The conversion is not allowed; the message says what to do instead.
    """
    if checkpoint.foreign is not None:
        raise InvalidArgumentError(
            f"'{checkpoint.directory}' has the weights in parts ({checkpoint.foreign.table.framework}), which are not "
            "replaced in place. Pass another directory.",
            path=checkpoint.directory,
        )
    if not checkpoint.pickles:
        return
    if low_disk:
        raise InvalidArgumentError(
            f"low_disk is for safetensors, but '{checkpoint.weights_path}' is a pickle. Convert it without low_disk.",
            path=checkpoint.weights_path,
        )
    names = checkpoint.names
    for name in (names.single, names.index):
        if checkpoint.folder.has(name):
            raise InvalidArgumentError(
                f"'{checkpoint.directory}' also has '{name}', which is loaded instead: converting the pickles in place "
                "would replace it. Pass another directory, or remove the outdated files.",
                path=checkpoint.directory,
            )


def reject_signed(checkpoint: OpenCheckpoint) -> None:
    """Reject resharding a signed checkpoint in place, before a byte is written.

    Raises:
        SignatureError: There is a signature.
    """
    if checkpoint.folder.has(SIGNATURE_NAME):
        raise SignatureError(
            f"'{checkpoint.directory}' is signed, and '{SIGNATURE_NAME}' would become stale. Nothing was changed. "
            "Pass another directory, or drop_signature=True (--drop-signature) to remove the signature.",
            path=checkpoint.directory,
        )


def sizes_of(checkpoint: OpenCheckpoint) -> dict[str, int]:
    """Return the sizes of the weights files: name -> bytes."""
    if checkpoint.foreign is not None:
        return dict(checkpoint.foreign.table.sizes)
    pickles = {name: file.identity[2] for name, file in checkpoint.pickles.items()}
    return pickles | {name: shard.size for name, shard in checkpoint.shards.items()}


def recorded_checksum(checkpoint: OpenCheckpoint) -> Checksum | None:
    """Return the kind of checksum that hfshard recorded for the files; the default if other programs wrote them."""
    records = [checkpoint.index.files[name] for name in checkpoint.shards if name in checkpoint.index.files]
    if not records or any(record.sha256 is not None for record in records):
        return "sha256"
    return "xxh3" if any(record.xxh3 is not None for record in records) else None


class SourceUnchangedCheck:
    """A check, called before the commit, that no other process has changed the source since this was created."""

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._identities = _identities_of(checkpoint)

    def __call__(self) -> None:
        """Check the source.

        Raises:
            CheckpointChangedError: A file is missing, or was replaced.
        """
        try:
            found = {path: identity_of(os.stat(path)) for path in self._identities}
        except OSError as error:
            raise _changed(self._checkpoint) from error
        if found != self._identities or not self._checkpoint.is_unchanged():
            raise _changed(self._checkpoint)


def _identities_of(checkpoint: OpenCheckpoint) -> dict[str, Identity]:
    """Return path -> identity of the weights files on disk, as opened; empty for a store, which has its own listing."""
    if not checkpoint.folder.traits.is_directory:
        return {}
    pickles = {file.path: file.identity for file in checkpoint.pickles.values()}
    local = {shard.path: shard.identity for shard in checkpoint.shards.values() if isinstance(shard, SafetensorsFile)}
    return pickles | local


def _changed(checkpoint: OpenCheckpoint) -> CheckpointChangedError:
    return CheckpointChangedError(
        f"The checkpoint in '{checkpoint.directory}' was replaced or changed while it was being re-sharded. Nothing "
        "was saved. Retry when no save is running.",
        path=checkpoint.directory,
    )
