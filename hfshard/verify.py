"""Check a checkpoint, a run or a directory hub, and report all problems, not only the first."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from hfshard._util.arguments import check_text_arguments, wraps_os_errors
from hfshard.checkpoint.folder import Folder
from hfshard.checkpoint.locate import CheckpointQuery, adapter_weights
from hfshard.checkpoint.reports import VerifyReport
from hfshard.checkpoint.verifier import verify_directory
from hfshard.constants import TRAINING_FILES
from hfshard.errors import CheckpointNotFoundError, DamagedCheckpointError, InvalidArgumentError
from hfshard.format.file_names import WeightNames
from hfshard.places.place import CheckPlace, place_to_check
from hfshard.places.source import CheckpointSource
from hfshard.signing.check_signature import with_signature
from hfshard.signing.signer import SignedBy
from hfshard.training.run.find_checkpoint import Level, is_run, report_of, reports_of_run


@wraps_os_errors("path")
def verify_checkpoint(
    path: str | os.PathLike[str],
    *,
    variant: str | None = None,
    subfolder: str = "",
    level: Level = "full",
    public_key: str | os.PathLike[str] | SignedBy | None = None,
    progress: bool | None = None,
) -> VerifyReport:
    """Check a checkpoint or a run in a directory or a store, and report each file and tensor that is damaged.

    For a training checkpoint, all files that its manifest names are checked, including the optimizer's. For a run (a
    directory or an address with folders checkpoint-<step>), each checkpoint is checked, and a model next to them; the
    report's `checkpoints` has the report of each.

    For a directory hub, the checkpoint on its `main` is checked, with the sha256 of every file of the commit; commits
    without manifests, and weights outside the commits, are reported too.

    Args:
        path: A directory, an address of a store, or a directory hub; or one file of weights, or an index, which is
            checked regardless of other files next to it. The checksum of one of several shards is in their index. For a
            file of torch.save, all bytes are compared, and every set of weights in it is checked.
        variant, subfolder: As in `from_pretrained`. With a variant, only its weights and configs are checked.
        level: "structure": names, sizes, headers and, in a directory, fingerprints; "full": the checksum of every file
            too. Safetensors files that hfshard did not write have none, which is a warning. For .bin files, the
            checksums in the zip are compared. Of DeepSpeed's ZeRO 1 and 2, each weight must be the cast of its float32
            master, which finds model and optimizer files of different saves if a weight changed between them.
        public_key: The file of a public key, or a `hfshard.signing.SignedBy`: its holder must have signed every file of
            the directory or below the address (`model.sig`); changed, missing and added files are reported. None:
            signatures are not checked.
        progress: Whether to show a bar on stderr; None: only on a terminal.

    Returns:
        The report. Damage is reported there, not raised.

    Raises:
        CheckpointNotFoundError: There is no such directory, or it has no weights.
        CheckpointChangedError: It was replaced in a store on every attempt.
        StoreError: The store refused, or cannot be reached.
        InvalidArgumentError: `level` has another value; the path is a file that is not a checkpoint; `public_key` is
            not a public key; a checkpoint in a store was signed in a way that can only be checked on disk; or
            model-signing is not installed.

    Example:
        report = hfshard.verify_checkpoint("out")
        assert report.ok, report.problems
    """
    check_text_arguments(subfolder=subfolder or None)
    signed_by = None if public_key is None else SignedBy.of(public_key)
    if level not in ("structure", "full"):
        raise InvalidArgumentError(f"level must be 'structure' or 'full', got {level!r}.")
    place = place_to_check(path)
    query = CheckpointQuery(variant=variant, subfolder=subfolder)
    run = _folder_of_run(place, subfolder) if variant is None else None
    if run is not None:
        root = run.path.rstrip("/") or "/"
        if run.has_any(TRAINING_FILES):
            return _verify_step(place, root, subfolder, level, signed_by, progress)
        folders = run.folders()
        if folders and is_run(run, folders):
            return _verify_run(place, root, subfolder, level, signed_by, progress)
    return _verify_signed(place, query, level, signed_by, progress)


def _folder_of_run(place: CheckPlace, subfolder: str) -> Folder | None:
    """Return the folder that may have training checkpoints; None for a file, a hub, or a missing one."""
    if place.is_for_hfshard_only and place.is_read_from_disk:
        return None
    folder = place.folder(subfolder)
    return folder.entered(WeightNames()) if not place.is_read_from_disk or folder.exists() else None


def _verify_run(
    place: CheckPlace, root: str, subfolder: str, level: Level, signed_by: SignedBy | None, progress: bool | None
) -> VerifyReport:
    """Check each checkpoint of a run, and the model next to them if there is one."""
    reports = list(reports_of_run(root, lambda path: _verify_step(place, path, subfolder, level, signed_by, progress)))
    with suppress(CheckpointNotFoundError):
        reports.append(_verify_signed(place_to_check(root), CheckpointQuery(), level, signed_by, progress))
    return _united(root, reports)


def _verify_step(
    place: CheckPlace, path: str, subfolder: str, level: Level, signed_by: SignedBy | None, progress: bool | None
) -> VerifyReport:
    """Check one training checkpoint."""
    check = partial(report_of, path, level, progress=progress)
    if signed_by is None:
        return check()
    if place.is_read_from_disk:
        return with_signature(check(), signed_by, path, subfolder, level=level, progress=progress)
    from hfshard.saving.signed_store import verify_signed_store  # imports huggingface_hub, which takes time

    source = CheckpointSource(path)
    return verify_signed_store(source, signed_by, check, level=level, progress=progress, trusts_index=False)


def _united(root: str, reports: Sequence[VerifyReport]) -> VerifyReport:
    """Merge the reports of a run's checkpoints; files have their paths in the run."""
    folders = [one.directory.removeprefix(root).strip("/") for one in reports]
    files = [f"{folder}/{name}".lstrip("/") for folder, one in zip(folders, reports, strict=True) for name in one.files]
    signers = {one.signed_by for one in reports}
    return VerifyReport(
        root,
        tuple(files),
        problems=tuple(problem for one in reports for problem in one.problems),
        warnings=tuple(warning for one in reports for warning in one.warnings),
        checked_bytes=sum(one.checked_bytes for one in reports),
        signed_by=signers.pop() if len(signers) == 1 else None,
        checkpoints=tuple(reports),
    )


def _verify_signed(
    place: CheckPlace, query: CheckpointQuery, level: Level, signed_by: SignedBy | None, progress: bool | None
) -> VerifyReport:
    """Check a model's checkpoint, and its signature if requested."""
    check = partial(place.verify, query, level, progress)
    if signed_by is None:
        return check()
    if not place.is_read_from_disk:
        from hfshard.saving.signed_store import verify_signed_store  # imports huggingface_hub, which takes time

        source = CheckpointSource(place.address, query, takes_files=True)
        return verify_signed_store(source, signed_by, check, level=level, progress=progress)
    try:
        report = check()
    except CheckpointNotFoundError:
        directory = place.folder(query.subfolder).path.rstrip(os.sep)
        adapter = None if place.is_for_hfshard_only else adapter_weights(directory)
        if adapter is None:
            raise
        report = verify_directory(directory, WeightNames(), level, progress, adapter)
    try:
        found = place.find(CheckpointQuery(subfolder=query.subfolder), takes_files=True)
    except DamagedCheckpointError:  # such as a lost manifest
        if report.ok:
            raise
        return report
    assert found is not None
    return with_signature(report, signed_by, found.directory, query.subfolder, level=level, progress=progress)
