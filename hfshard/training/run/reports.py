"""Reports of training checkpoints: every file that the manifest names, not only the model's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

from hfshard._util.progress import byte_progress
from hfshard.checkpoint.folder import Folder
from hfshard.checkpoint.verifier import verify_directory
from hfshard.checkpoint.verify_report import Problem, VerifyReport
from hfshard.constants import BIN_SUFFIX, SAFETENSORS_SUFFIX
from hfshard.errors import CheckpointChangedError, CheckpointNotFoundError, HfshardError
from hfshard.format.file_names import INDEX_FILE, MODEL_BASE, WeightNames
from hfshard.places.place import place_to_save
from hfshard.places.source import CheckpointSource
from hfshard.training.run.find_checkpoint import Level, checkpoint_problems, open_run
from hfshard.training.run.manifest import (
    CHECKPOINT,
    MANIFEST,
    TRAINING_STATE,
    CheckpointManifest,
    RunCheckpoint,
    folder_at,
    read_manifest,
)
from hfshard.training.run.run_directory import REPLACED


def is_checkpoint(folder: Folder) -> bool:
    """Return whether a folder, as `folder_at` returns it, is, or was, that of a training checkpoint."""
    return folder.has_any((MANIFEST, TRAINING_STATE))


def is_run(folder: Folder) -> bool:
    """Return whether a folder is that of a run with a training checkpoint, not of a checkpoint."""
    names = folder.folders()
    if not any(CHECKPOINT.fullmatch(name) or REPLACED.fullmatch(name) for name in names) or is_checkpoint(folder):
        return False
    return any(is_checkpoint(one.folder()) for one in open_run(folder.path).checkpoints())


def may_be_run(place: str) -> bool:
    """Return whether there can be checkpoints of a run; in a store by a listing of one level, not of everything."""
    folder = place_to_save(place, "path").folder()
    return folder.traits.is_directory or any(map(CHECKPOINT.fullmatch, folder.folders()))


def reports_of_run(root: str, check: Callable[[str], VerifyReport]) -> Iterator[VerifyReport]:
    """Check each checkpoint of a run, in the order in which they were saved; those of unknown time come last.

    A damaged checkpoint that another process is removing is left out.

    Args:
        root: The run's directory or address.
        check: Checks the checkpoint at a path.
    """
    for one in open_run(root).checkpoints()[::-1]:
        if one.problem is not None:
            yield VerifyReport(one.path, (MANIFEST,), tuple(as_problems([one.problem], one.path)), (), 0)
            continue
        try:
            report = check(one.path)
        except (CheckpointNotFoundError, CheckpointChangedError):
            if one.folder().exists():
                raise
            continue
        if not report.problems or one.folder().exists():
            yield report


def report_of(directory: str, level: Level, *, progress: bool | None) -> VerifyReport:
    """Check every file that a training checkpoint's manifest names; name the damaged tensors of weights."""
    folder = folder_at(directory)
    try:
        manifest = read_manifest(folder)
    except HfshardError as error:
        return VerifyReport(directory, (MANIFEST,), tuple(as_problems([error], directory)), (), 0)
    total = sum(digest.size or 0 for digest in manifest.files.values())
    with byte_progress("Verifying", total, progress if level == "full" else False) as progress_callback:
        errors = checkpoint_problems(RunCheckpoint.of(directory, manifest), level, progress_callback)
    problems = _name_damaged_tensors(as_problems(errors, directory), directory, manifest, level)
    damaged = {os.path.basename(problem.file) for problem in problems}
    warnings = tuple(
        f"'{name}' in '{directory}' belongs to no checkpoint: its manifest does not name it."
        for name in sorted(set(folder.names()) - manifest.files.keys() - damaged)
        if _is_weights_file(name)
    )
    compared = sum(digest.size or 0 for name, digest in manifest.files.items() if name not in damaged)
    checked = (*sorted(manifest.files), MANIFEST)
    return VerifyReport(directory, checked, tuple(problems), warnings, compared if level == "full" else 0)


def _name_damaged_tensors(
    problems: list[Problem], directory: str, manifest: CheckpointManifest, level: Level
) -> list[Problem]:
    """Add the damaged tensors that the model's own index can name."""
    model = WeightNames(base=MODEL_BASE)
    if model.index not in manifest.files or not any(model.is_shard(os.path.basename(one.file)) for one in problems):
        return problems
    local = CheckpointSource(directory).find_local()
    place = directory if local is None else local.folder
    known = verify_directory(place, model, level, progress=False).problems
    named = [problem for problem in known if problem.tensor is not None]
    return [one for one in problems if one.file not in {problem.file for problem in named}] + named


def as_problems(errors: Sequence[HfshardError], directory: str) -> list[Problem]:
    """Convert the errors of a check to the problems that a report lists."""
    return [
        Problem(error.path or directory, error.fqn, error.message.replace(f", or run 'hfshard verify {directory}'", ""))
        for error in errors
    ]


def _is_weights_file(name: str) -> bool:
    return name.endswith((SAFETENSORS_SUFFIX, BIN_SUFFIX)) or INDEX_FILE.fullmatch(name) is not None
