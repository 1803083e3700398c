"""Check a checkpoint, a run or a directory hub, and report all problems, not only the first."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, Literal

from hfshard._util.addresses import is_store_address
from hfshard._util.arguments import absolute_path, check_text_arguments, wraps_os_errors
from hfshard.checkpoint.locate import adapter_weights, split_file_path
from hfshard.checkpoint.verifier import Problem, VerifyReport, verify_directory
from hfshard.commit.hub_marker import has_hub_marker, hub_directory
from hfshard.constants import BIN_SUFFIX, CONFIG_NAME, HUB_MARKER, WEIGHTS_SUFFIXES
from hfshard.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    HfshardError,
    IntegrityError,
    InvalidArgumentError,
)
from hfshard.format.file_names import INDEX_FILE, WeightNames
from hfshard.hub.directory.commit_graph import (
    COMMITS,
    DELETED,
    SNAPSHOTS,
    CommitManifest,
    lost_commits,
    missing_manifest,
    read_commit_manifest,
    snapshot_path,
)
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.hub.directory.snapshot import check_size, check_snapshot, hash_errors, reject_unexpected_files
from hfshard.hub.resolve import CheckpointQuery
from hfshard.places.source import CheckpointSource
from hfshard.signing.check_signature import with_signature
from hfshard.signing.signer import SignedBy
from hfshard.training.run.find_checkpoint import Level
from hfshard.training.run.reports import is_checkpoint, is_run, report_of, reports_of_run


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
            checksums in the zip are compared.
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
    signed_by = SignedBy.of(public_key)
    if level not in ("structure", "full"):
        raise InvalidArgumentError(f"level must be 'structure' or 'full', got {level!r}.")
    place = _folder_at(path, subfolder) if variant is None else None
    if place is not None and is_checkpoint(place):
        return _verify_step(place, subfolder, level, signed_by, progress)
    if place is not None and is_run(place):
        return _verify_run(place, subfolder, level, signed_by, progress)
    return _verify_signed(path, variant, subfolder, level, signed_by, progress)


def _folder_at(path: str | os.PathLike[str], subfolder: str) -> str | None:
    """Return the directory or address that may have training checkpoints; None for a file, a hub, or a missing one."""
    if is_store_address(path):
        return f"{absolute_path(path)}/{subfolder}".rstrip("/")
    root = absolute_path(hub_directory(path) or path)
    directory = os.path.join(root, subfolder).rstrip(os.sep)
    return directory if os.path.isdir(directory) and not has_hub_marker(root) else None


def _verify_run(
    root: str, subfolder: str, level: Level, signed_by: SignedBy | None, progress: bool | None
) -> VerifyReport:
    """Check each checkpoint of a run, and the model next to them if there is one."""
    reports = list(reports_of_run(root, lambda path: _verify_step(path, subfolder, level, signed_by, progress)))
    with suppress(CheckpointNotFoundError):
        reports.append(_verify_signed(root, None, "", level, signed_by, progress))
    return _united(root, reports)


def _verify_step(
    place: str, subfolder: str, level: Level, signed_by: SignedBy | None, progress: bool | None
) -> VerifyReport:
    """Check one training checkpoint."""
    if signed_by is not None and is_store_address(place):
        from hfshard.saving.signed_store import verify_signed_store  # imports huggingface_hub, which takes time

        check = partial(report_of, place, level, progress=progress)
        source = CheckpointSource(place)
        return verify_signed_store(source, signed_by, check, level=level, progress=progress, trusts_index=False)
    report = report_of(place, level, progress=progress)
    if signed_by is None:
        return report
    return with_signature(report, signed_by, place, subfolder, level=level, progress=progress)


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
    path: str | os.PathLike[str],
    variant: str | None,
    subfolder: str,
    level: Level,
    signed_by: SignedBy | None,
    progress: bool | None,
) -> VerifyReport:
    """Check a model's checkpoint, and its signature if requested."""
    if signed_by is None:
        return _verify(path, variant, subfolder, level, progress)[0]
    if is_store_address(path):
        from hfshard.saving.signed_store import verify_signed_store  # imports huggingface_hub, which takes time

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
        except DamagedCheckpointError:  # such as a lost manifest
            if report.ok:
                raise
            return report
        directory = os.path.join(snapshot, *subfolder.strip("/").split("/"))
    return with_signature(report, signed_by, directory, subfolder, level=level, progress=progress)


def _verify(
    path: str | os.PathLike[str],
    variant: str | None,
    subfolder: str,
    level: Level,
    progress: bool | None,
) -> tuple[VerifyReport, str]:
    """Check a checkpoint's files; return the report and the directory or address: for a directory hub, the hub."""
    if is_store_address(path):
        query = CheckpointQuery(variant=variant, subfolder=subfolder)
        local = CheckpointSource(str(path), query, takes_files=True).find_local()
        assert local is not None and local.folder is not None
        report = verify_directory(local.folder, WeightNames(variant), level, progress, local.weights_name)
        return report, local.folder.path
    directory = absolute_path(hub_directory(path) or path)
    if has_hub_marker(directory):
        report = verify_hub(directory, WeightNames(variant), subfolder=subfolder, level=level, progress=progress)
        return report, directory
    if subfolder:
        directory = os.path.join(directory, subfolder)
    directory, weights_name = split_file_path(directory)
    return verify_directory(directory, WeightNames(variant), level, progress, weights_name), directory


# Checks of a revision of a directory hub, and of the hub around it, with all problems in the report.


_OWN: Final = frozenset({HUB_MARKER, COMMITS, SNAPSHOTS, DELETED, "refs"})
"""Files and folders of a hub in its directory; names that begin with a dot are ignored."""


def verify_hub(
    path: str,
    names: WeightNames,
    *,
    subfolder: str = "",
    level: Literal["structure", "full"],
    progress: bool | None = None,
) -> VerifyReport:
    """Check the checkpoint on a directory hub's `main`, all other files of the commit, and the hub around it.

    Args:
        path: The hub.
        names: The file names of the checkpoint.
        subfolder: The folder of the checkpoint.
        level: "structure": names, sizes and headers; "full": the sha256 of every file of the commit too.
        progress: Whether to show a bar on stderr.

    Raises:
        HubNotFoundError: There is no main.
        CheckpointNotFoundError: Its commit has no weights.
    """
    hub = DirectoryHub.open(path)
    commit = hub.resolve()
    folder = snapshot_path(hub.root, commit)
    around = [*_lost(hub.root), *(_stray(hub.root, name) for name in _beside(hub.root) if _is_weights(name))]
    warnings = tuple(
        f"'{name}' in '{hub.root}' does not belong to the hub." for name in _beside(hub.root) if not _is_weights(name)
    )
    try:
        manifest = read_commit_manifest(hub.root, commit)
    except DamagedCheckpointError as error:
        problems = dict.fromkeys([_problem(error, hub.root), *around])
        return VerifyReport(folder, (), tuple(problems), warnings, 0)
    checkpoint = os.path.join(folder, subfolder) if subfolder else folder
    wrong = _differences(folder, manifest, level, progress)
    # Among intact files, only pickles need another check of their bytes: a push accepts them as they are.
    is_read_again = bool(wrong) or any(name.endswith(BIN_SUFFIX) for name in manifest.files)
    report = verify_directory(checkpoint, names, level if is_read_again else "structure", progress)
    known = {problem.file for problem in report.problems}
    damaged = [_problem(error, folder) for error in wrong if error.path not in known]
    bad_paths = {error.path for error in wrong}
    compared = sum(file.size for path, file in manifest.files.items() if os.path.join(folder, path) not in bad_paths)
    return replace(
        report,
        files=tuple(sorted(manifest.files)),
        problems=(*report.problems, *damaged, *around),
        warnings=(*(report.warnings if level == "structure" else ()), *warnings),
        checked_bytes=compared if level == "full" else 0,
    )


def _differences(folder: str, manifest: CommitManifest, level: str, progress: bool | None) -> list[HfshardError]:
    """Compare a snapshot with its manifest: sizes, hashes with "full", and files that the manifest does not name."""
    found = check_snapshot(folder, {})
    errors: list[HfshardError] = []
    whole = {}
    for path, file in manifest.files.items():
        try:
            check_size(folder, path, file, found)
            whole[path] = file
        except DamagedCheckpointError as error:
            errors.append(error)
    if level == "full":
        errors += hash_errors(folder, whole, progress)
    try:
        reject_unexpected_files(folder, manifest.files, found)
    except IntegrityError as error:
        errors.append(error)
    return errors


def _lost(root: str) -> Iterator[Problem]:
    for commit in lost_commits(root):
        yield _problem(missing_manifest(root, commit, ""), root)


def _beside(root: str) -> list[str]:
    return sorted(name for name in os.listdir(root) if name not in _OWN and not name.startswith("."))


def _is_weights(name: str) -> bool:
    return name == CONFIG_NAME or name.endswith(WEIGHTS_SUFFIXES) or INDEX_FILE.fullmatch(name) is not None


def _stray(root: str, name: str) -> Problem:
    return Problem(
        os.path.join(root, name),
        None,
        f"'{name}' in '{root}' belongs to no commit of the hub, so loading from the hub ignores it. Move it "
        f"into its own directory, and run: hfshard push DIR {root}",
    )


def _problem(error: HfshardError, root: str) -> Problem:
    return Problem(error.path or root, error.fqn, error.message)
