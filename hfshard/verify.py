"""Check a checkpoint and report everything that is wrong with it, not only the first thing."""

from __future__ import annotations

import os
from functools import partial
from typing import Literal

from hfshard._util.addresses import is_address
from hfshard._util.arguments import check_texts
from hfshard._util.file_errors import names_files
from hfshard._util.paths import absolute_path
from hfshard.errors import CheckpointNotFoundError, DamagedCheckpointError
from hfshard.hub.address import directory_of
from hfshard.hub.directory.hub import DirectoryHub
from hfshard.hub.directory.report import verify_hub
from hfshard.hub.resolve import CheckpointQuery
from hfshard.loading.source import CheckpointSource
from hfshard.signing.report import with_signature
from hfshard.signing.signed_by import SignedBy
from hfshard.storage.checkpoint.locate import adapter_weights, split_weights_path
from hfshard.storage.checkpoint.report import VerifyReport
from hfshard.storage.checkpoint.verifier import verify_directory
from hfshard.storage.disk.hub_place import has_hub_marker
from hfshard.storage.format.names import WeightNames


@names_files("path")
def verify_checkpoint(
    path: str | os.PathLike[str],
    *,
    variant: str | None = None,
    subfolder: str = "",
    level: Literal["structure", "full"] = "full",
    public_key: str | os.PathLike[str] | SignedBy | None = None,
    progress: bool | None = None,
) -> VerifyReport:
    """Check a checkpoint in a directory or a store, and report each file and tensor that is damaged.

    Of a directory hub, the checkpoint on its `main` is checked, with the sha256 of every file of the commit; and
    whether commits have lost their manifests, or weights lie beside the commits.

    Args:
        path: A directory, an address of a store, or a directory hub; or one file of weights, or an index, which is
            checked whatever else lies beside it. The checksum of one of several shards is in their index. Of a file of
            torch.save all bytes are compared, and every set of weights in it is looked at.
        variant, subfolder: As in `from_pretrained`.
        level: "structure": names, sizes, headers and, of a directory, fingerprints; "full": the checksum of every file
            too. Safetensors files that hfshard did not write have none: that is a warning. Of .bin files, those in the
            zip are compared.
        public_key: The file of a public key, or a `hfshard.signing.SignedBy`: its holder must have signed every file of
            the directory or below the address (`model.sig`); what differs, is missing or was added is in the report.
            None: signatures are not looked at.
        progress: Whether to show a bar on stderr; None: only on a terminal.

    Returns:
        The report. Damage is reported there, not raised.

    Raises:
        CheckpointNotFoundError: There is no such directory, or it holds no weights.
        CheckpointChangedError: It kept being replaced in a store.
        StoreError: The store refuses, or can't be reached.
        InvalidArgumentError: `level` has another value, or the path is a file that is no checkpoint; or `public_key`
            is none, or what is in a store was signed in a way that is only checked on a disk, or model-signing is not
            installed.

    Example:
        report = hfshard.verify_checkpoint("out")
        assert report.ok, report.problems
    """
    check_texts(subfolder=subfolder or None)
    signed_by = SignedBy.of(public_key)
    if signed_by is None:
        return _verify(path, variant, subfolder, level, progress)[0]
    if is_address(path):
        from hfshard.transfer.signed_store import verify_signed_store  # imports huggingface_hub, which takes time

        source = CheckpointSource(str(path), CheckpointQuery(variant=variant, subfolder=subfolder), takes_files=True)
        check = partial(_verify, path, variant, subfolder, level, progress)
        return verify_signed_store(source, signed_by, lambda: check()[0], level=level, progress=progress)
    try:
        report, directory = _verify(path, variant, subfolder, level, progress)
    except CheckpointNotFoundError:
        directory = os.path.join(absolute_path(path), subfolder).rstrip(os.sep)
        adapter = adapter_weights(directory)
        if adapter is None:
            raise
        report = verify_directory(directory, WeightNames(), level, progress, adapter)
    if has_hub_marker(directory):
        try:
            snapshot = DirectoryHub.open(directory).snapshot(None)
        except DamagedCheckpointError:  # such as a manifest that is lost
            if report.ok:
                raise
            return report
        directory = os.path.join(snapshot, *subfolder.strip("/").split("/"))
    return with_signature(report, signed_by, directory, subfolder, level=level, progress=progress)


def _verify(
    path: str | os.PathLike[str],
    variant: str | None,
    subfolder: str,
    level: Literal["structure", "full"],
    progress: bool | None,
) -> tuple[VerifyReport, str]:
    """Check what was saved; and tell where it is: of a directory hub, the hub."""
    if is_address(path):
        query = CheckpointQuery(variant=variant, subfolder=subfolder)
        local = CheckpointSource(str(path), query, takes_files=True).find_local()
        assert local is not None and local.folder is not None
        report = verify_directory(local.folder, WeightNames(variant), level, progress, local.weights_name)
        return report, local.folder.path
    directory = absolute_path(directory_of(path) or path)
    if has_hub_marker(directory):
        report = verify_hub(directory, WeightNames(variant), subfolder=subfolder, level=level, progress=progress)
        return report, directory
    if subfolder:
        directory = os.path.join(directory, subfolder)
    directory, weights_name = split_weights_path(directory)
    return verify_directory(directory, WeightNames(variant), level, progress, weights_name), directory
