"""What a re-shard refuses: directories that it must not write into, and sources that change meanwhile."""

from __future__ import annotations

import os
import re

from hfshard._util.addresses import is_address
from hfshard.checkpoint.folder import RangedFolder
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.commit.hub_marker import directory_of, refuse_hub
from hfshard.constants import SIGNATURE_NAME
from hfshard.disk.safe_open import Identity, identity_of
from hfshard.errors import CheckpointChangedError, InvalidArgumentError, SignatureError
from hfshard.format.digests import Checksum
from hfshard.loading.source import CheckpointSource, LocalCheckpoint
from hfshard.shards.shard_file import SafetensorsFile


def place_of(local: LocalCheckpoint) -> str:
    """Where a checkpoint lies: its directory, or its address."""
    return local.directory if local.folder is None else local.folder.path


def source_text(local: LocalCheckpoint) -> str:
    """The directory, the address or the file that tensors are read from."""
    place = place_of(local)
    return place if local.weights_name is None else os.path.join(place, local.weights_name)


def is_same_place(local: LocalCheckpoint, other: str) -> bool:
    """Whether a path leads to the directory of a checkpoint, or an address is its own."""
    if local.folder is not None or is_address(other):
        return place_of(local) == other
    return is_same_directory(local.directory, other)


def is_same_directory(directory: str, other: str) -> bool:
    """Whether two paths lead to one directory."""
    return os.path.isdir(directory) and os.path.isdir(other) and os.path.samefile(directory, other)


def refuse_beside_file(local: LocalCheckpoint, dst: str) -> None:
    """Refuse to write what one file holds into its own directory, where it may be a part of another checkpoint.

    Raises:
        InvalidArgumentError: `dst` is that directory.
        SaveDirectoryError: `dst` lies in a directory hub.
    """
    refuse_hub(dst)
    if is_same_place(local, dst):
        raise InvalidArgumentError(
            f"'{dst}' is the directory of '{local.weights_name}' itself: give another one to write into, or the "
            "directory twice, to re-shard what it holds in place.",
            path=dst,
        )


def check_places(source: CheckpointSource, local: LocalCheckpoint, dst: str, *, is_in_place: bool) -> None:
    """Refuse to write into the source, except to replace it, and into what a hub keeps.

    Raises:
        InvalidArgumentError: `dst` is not allowed; the message says what is.
        SaveDirectoryError: `dst` lies in a directory hub.
    """
    refuse_hub(dst)
    if local.folder is not None or is_address(dst):
        if f"{dst}/".startswith(f"{place_of(local)}/") and not is_in_place:
            raise InvalidArgumentError(
                f"'{dst}' lies in the checkpoint that is re-sharded: give another prefix, or '{place_of(local)}' "
                "itself to re-shard in place.",
                path=dst,
            )
        return
    root, target = os.path.realpath(local.directory), os.path.realpath(dst)
    subfolder = source.query.subfolder
    if subfolder and not is_in_place and is_same_directory(source.path, dst):
        raise InvalidArgumentError(
            f"'{dst}' holds the source in its folder '{subfolder}': to re-shard that in place, give "
            f"'{local.directory}' twice; else give a directory outside.",
            path=dst,
        )
    hub = directory_of(source.path) or (source.path if os.path.isdir(source.path) else None)
    is_hub = local.commit is not None or _is_snapshot(root)
    roots = [root, os.path.realpath(hub)] if is_hub and hub is not None else [root]
    if any(target.startswith(above.rstrip("/") + "/") or (is_hub and target == above) for above in roots):
        what = "what a hub keeps" if is_hub else "the checkpoint that is re-sharded"
        todo = "" if is_hub else ", or the source itself to re-shard in place"
        raise InvalidArgumentError(f"'{dst}' lies in {what}: give a directory outside{todo}.", path=dst)
    if is_in_place and is_hub:
        raise InvalidArgumentError(f"'{dst}' lies in what a hub keeps: give a directory outside.", path=dst)


def _is_snapshot(directory: str) -> bool:
    """Whether it is a snapshot in the Hub's cache, where files are links to blobs that all commits share."""
    return re.search(r"/models--[^/]+/snapshots/[0-9a-f]{40}(/|$)", directory) is not None


def check_in_place(checkpoint: OpenCheckpoint, *, low_disk: bool) -> None:
    """Refuse to convert pickles in place where that replaces other weights, or group by group.

    Raises:
        InvalidArgumentError: It says what to do instead.
    """
    if not checkpoint.pickles:
        return
    if low_disk:
        raise InvalidArgumentError(
            f"low_disk is for safetensors, and '{checkpoint.weights_path}' is a pickle. Convert it without low_disk.",
            path=checkpoint.weights_path,
        )
    names = checkpoint.names
    for name in (names.single, names.index):
        if checkpoint.folder.has(name):
            raise InvalidArgumentError(
                f"'{checkpoint.directory}' has '{name}' too, which is what is loaded: converting the pickles in place "
                "would replace it. Give another directory, or remove what is old.",
                path=checkpoint.directory,
            )


def refuse_signed(checkpoint: OpenCheckpoint) -> None:
    """Refuse to re-shard a signed checkpoint in place, before a byte is written.

    Raises:
        SignatureError: There is a signature.
    """
    if checkpoint.folder.has(SIGNATURE_NAME):
        raise SignatureError(
            f"'{checkpoint.directory}' is signed, and '{SIGNATURE_NAME}' would no longer hold: nothing was changed. "
            "Give another directory, or drop_signature=True (--drop-signature) to remove the signature.",
            path=checkpoint.directory,
        )


def sizes_of(checkpoint: OpenCheckpoint) -> dict[str, int]:
    """File of weights -> bytes."""
    pickles = {name: file.identity[2] for name, file in checkpoint.pickles.items()}
    return pickles | {name: shard.size for name, shard in checkpoint.shards.items()}


def files_of(checkpoint: OpenCheckpoint) -> tuple[tuple[str, ...], ...]:
    """The names in each safetensors file, in the order of the files and of the bytes in them; pickles are no such."""
    return tuple(tuple(shard.header.tensors) for shard in checkpoint.shards.values())


def recorded_checksum(checkpoint: OpenCheckpoint) -> Checksum | None:
    """The kind of checksum that hfshard has recorded of the files; where others have written them, the default."""
    records = [checkpoint.index.files[name] for name in checkpoint.shards if name in checkpoint.index.files]
    if not records or any(record.sha256 is not None for record in records):
        return "sha256"
    return "xxh3" if any(record.xxh3 is not None for record in records) else None


class SourceCheck:
    """Refuses a source that somebody else has saved over since this was made; called before the commit.

    A store that is re-sharded in place is looked at once, by the first call: from then on, the save itself changes it,
    and commits only on top of what it has seen.
    """

    def __init__(self, checkpoint: OpenCheckpoint, *, is_in_place: bool) -> None:
        self._checkpoint = checkpoint
        self._identities = _identities_of(checkpoint)
        self._looks_once = is_in_place and isinstance(checkpoint.folder, RangedFolder)
        self._has_looked = False

    def __call__(self) -> None:
        """Look.

        Raises:
            CheckpointChangedError: A file is missing, or is another one.
        """
        if self._has_looked and self._looks_once:
            return
        self._has_looked = True
        try:
            found = {path: identity_of(os.stat(path)) for path in self._identities}
        except OSError as error:
            raise _changed(self._checkpoint) from error
        if found != self._identities or not self._checkpoint.is_unchanged():
            raise _changed(self._checkpoint)


def _identities_of(checkpoint: OpenCheckpoint) -> dict[str, Identity]:
    """Path -> identity of the files of weights on the disk, as they were opened; a store keeps its own account."""
    if isinstance(checkpoint.folder, RangedFolder):
        return {}
    pickles = {file.path: file.identity for file in checkpoint.pickles.values()}
    local = {shard.path: shard.identity for shard in checkpoint.shards.values() if isinstance(shard, SafetensorsFile)}
    return pickles | local


def _changed(checkpoint: OpenCheckpoint) -> CheckpointChangedError:
    return CheckpointChangedError(
        f"The checkpoint in '{checkpoint.directory}' was replaced or changed while it was re-sharded, and nothing "
        "was saved. Do it again when the process that saves there is done.",
        path=checkpoint.directory,
    )
