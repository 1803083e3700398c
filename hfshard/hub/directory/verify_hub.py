"""Check a revision of a directory hub, and the hub around it, and report every problem."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from hfshard.checkpoint.reports import Problem, VerifyReport
from hfshard.checkpoint.verifier import verify_directory
from hfshard.constants import BIN_SUFFIX, CONFIG_NAME, HUB_MARKER, WEIGHTS_SUFFIXES
from hfshard.errors import DamagedCheckpointError, HfshardError, IntegrityError
from hfshard.format.file_names import INDEX_FILE, WeightNames
from hfshard.hub.directory import commit_graph
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.hub.directory.snapshot import check_size, check_snapshot, hash_errors, reject_unexpected_files

_OWN: Final = frozenset({HUB_MARKER, commit_graph.COMMITS, commit_graph.SNAPSHOTS, commit_graph.DELETED, "refs"})
"""Files and folders of a hub in its directory; names that begin with a dot are ignored."""


def verify_hub(
    path: str,
    names: WeightNames,
    *,
    subfolder: str = "",
    level: str,
    progress: bool | None = None,
) -> VerifyReport:
    """Check the checkpoint on a directory hub's `main`, all other files of the commit, and the hub around it.

    Args:
        path, names, subfolder: The hub, and the checkpoint in it.
        level: "structure": names, sizes and headers; "full": the sha256 of every file of the commit too.
        progress: Whether to show a bar on stderr.

    Raises:
        HubNotFoundError: There is no main.
        CheckpointNotFoundError: Its commit has no weights.
    """
    hub = DirectoryHub.open(path)
    commit = hub.resolve()
    folder = commit_graph.snapshot_path(hub.root, commit)
    around = [*_lost(hub.root), *(_stray(hub.root, name) for name in _beside(hub.root) if _is_weights(name))]
    warnings = tuple(
        f"'{name}' in '{hub.root}' does not belong to the hub." for name in _beside(hub.root) if not _is_weights(name)
    )
    try:
        manifest = commit_graph.read_commit_manifest(hub.root, commit)
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


def _differences(
    folder: str, manifest: commit_graph.CommitManifest, level: str, progress: bool | None
) -> list[HfshardError]:
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
    for commit in commit_graph.lost_commits(root):
        yield _problem(commit_graph.missing_manifest(root, commit, ""), root)


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
