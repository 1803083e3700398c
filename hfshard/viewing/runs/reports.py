"""What `hfshard verify` reports about training checkpoints: all their files, not the model's alone."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence

from hfshard._util.paths import absolute_path
from hfshard._util.progress import bytes_bar
from hfshard.constants import BIN_SUFFIX, SAFETENSORS_SUFFIX
from hfshard.errors import CheckpointNotFoundError, HfshardError
from hfshard.signing.report import refuse_address, with_signature
from hfshard.signing.signed_by import SignedBy
from hfshard.storage.checkpoint.report import Problem, VerifyReport
from hfshard.storage.format.names import INDEX_FILE, MODEL_BASE, WeightNames
from hfshard.training.run.finding import Level, checkpoint_problems
from hfshard.training.run.manifest import MANIFEST, CheckpointManifest
from hfshard.training.run.places.opening import files_at, run_place
from hfshard.training.run.run_checkpoint import RunCheckpoint
from hfshard.training.run.writing import TRAINING_STATE
from hfshard.verify import verify_checkpoint


def is_checkpoint(directory: str) -> bool:
    """Whether a directory is, or was, a training checkpoint."""
    files = files_at(directory)
    return files.has(MANIFEST) or files.has(TRAINING_STATE)


def is_training(directory: str) -> bool:
    """Whether a directory is a training checkpoint, or a run that has one."""
    return is_checkpoint(directory) or any(is_checkpoint(one.path) for one in run_place(directory).checkpoints())


def reports(arguments: argparse.Namespace, signed_by: SignedBy | None = None) -> Iterator[VerifyReport]:
    """Check a training checkpoint; or each one of a run, and a model that lies beside them.

    Args:
        arguments: Those of the command.
        signed_by: Who must have signed each of them; None: nobody.
    """
    level = arguments.level
    progress = arguments.progress
    if signed_by is not None:
        refuse_address(arguments.directory)
    if is_checkpoint(arguments.directory):
        yield _signed(report_of(arguments.directory, level, progress=progress), signed_by, arguments)
        return
    for one in run_place(arguments.directory).checkpoints()[::-1]:
        if one.problem is not None:
            yield VerifyReport(one.path, (MANIFEST,), tuple(as_problems([one.problem], one.path)), (), 0)
        else:
            report = report_of(one.path, level, progress=progress)
            if not report.problems or files_at(one.path).is_there():  # or else a run that saves there has removed it
                yield _signed(report, signed_by, arguments)
    try:
        yield verify_checkpoint(arguments.directory, level=level, public_key=signed_by, progress=progress)
    except CheckpointNotFoundError:
        return  # a run directory need not hold a model


def _signed(report: VerifyReport, signed_by: SignedBy | None, arguments: argparse.Namespace) -> VerifyReport:
    if signed_by is None:
        return report
    place = absolute_path(report.directory)
    return with_signature(report, signed_by, place, level=arguments.level, progress=arguments.progress)


def report_of(directory: str, level: Level, *, progress: bool | None) -> VerifyReport:
    """Check every file that the manifest of a training checkpoint names; of damaged weights, name the tensors."""
    files = files_at(directory)
    try:
        manifest = files.manifest()
    except HfshardError as error:
        return VerifyReport(directory, (MANIFEST,), tuple(as_problems([error], directory)), (), 0)
    total = sum(digest.size or 0 for digest in manifest.files.values())
    with bytes_bar("Verifying", total, progress if level == "full" else False) as progress_callback:
        errors = checkpoint_problems(RunCheckpoint.of(directory, manifest), level, progress_callback)
    problems = _name_damaged_tensors(as_problems(errors, directory), directory, manifest, level)
    damaged = {os.path.basename(problem.file) for problem in problems}
    warnings = tuple(
        f"'{name}' in '{directory}' belongs to no checkpoint: its manifest does not name it."
        for name in sorted(set(files.names()) - manifest.files.keys() - damaged)
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
    known = verify_checkpoint(directory, level=level, progress=False).problems
    named = [problem for problem in known if problem.tensor is not None]
    return [one for one in problems if one.file not in {problem.file for problem in named}] + named


def as_problems(errors: Sequence[HfshardError], directory: str) -> list[Problem]:
    """Turn the errors of a check into what a report lists."""
    return [
        Problem(error.path or directory, error.fqn, error.message.replace(f", or run 'hfshard verify {directory}'", ""))
        for error in errors
    ]


def _is_weights_file(name: str) -> bool:
    return name.endswith((SAFETENSORS_SUFFIX, BIN_SUFFIX)) or INDEX_FILE.fullmatch(name) is not None
