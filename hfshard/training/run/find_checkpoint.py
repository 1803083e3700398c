"""Queries of a run: find its checkpoints, or one from elsewhere, distinguish intact from damaged ones, and report."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

from hfshard._util.arguments import absolute_path, wraps_os_errors
from hfshard._util.progress import byte_progress
from hfshard.checkpoint.check_files import ReplacedMeanwhile, check_files, retry_if_replaced
from hfshard.checkpoint.folder import Folder, LocalFolder
from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.checkpoint.reports import Problem, VerifyReport
from hfshard.checkpoint.verifier import verify_directory
from hfshard.constants import BIN_SUFFIX, SAFETENSORS_SUFFIX, TRAINING_FILES
from hfshard.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    HfshardError,
    IntegrityError,
    InvalidArgumentError,
    StoreError,
)
from hfshard.format.file_names import INDEX_FILE, MODEL_BASE, WeightNames
from hfshard.format.parts_of_ranks import describe_parts_in
from hfshard.hub.directory.directory_hub import absolute_repo_id, split_address
from hfshard.hub.resolve import ResolvedCheckpoint
from hfshard.places.place import (
    DirectoryPlace,
    SavePlace,
    StorePlace,
    explain_missing_directory,
    place_to_load,
    place_to_save,
)
from hfshard.places.source import CheckpointSource
from hfshard.training.run.manifest import (
    CHECKPOINT,
    MANIFEST,
    CheckpointManifest,
    MetricMode,
    RunCheckpoint,
    best_of,
    checkpoint_path,
    folder_at,
    read_manifest,
)
from hfshard.training.run.run_directory import REPLACED, RunDirectory
from hfshard.training.run.run_storage import RunStorage
from hfshard.training.run.run_store import RunStore
from hfshard.training.state.collect_state import PARTS

if TYPE_CHECKING:
    from hfshard.hub.repo import CommitFiles

logger = logging.getLogger(__name__)

_RUN_TRAITS: Final = replace(LocalFolder.traits, retries=50)
"""Traits of a reader of a run whose checkpoints are being replaced: it may save constantly and keep only one."""

Level = Literal["structure", "full"]


class RunReader:
    """The queries of a `CheckpointManager` about its run; each waits for a save of this process."""

    root: str
    keep_best: str | None
    metric_mode: MetricMode
    progress: bool | None
    _storage: RunStorage

    @wraps_os_errors("root")
    def latest_step(self, verify: Level | None = None) -> int | None:
        """Find the step of the checkpoint that was saved last.

            start = manager.latest_step() or 0

        Args:
            verify: Check its files as `restore` does, and skip damaged checkpoints with a warning. None: only check
                that the save was finished.

        Returns:
            The step, or None if there is no checkpoint.

        Raises:
            DamagedCheckpointError: With `verify`, all checkpoints are damaged.
        """
        with self._settled():
            if verify is not None:
                newest = newest_intact(self._storage, verify, self.progress)
                return None if newest is None else newest[0].step
            return next((one.step for one in self._storage.checkpoints() if one.is_finished), None)

    @wraps_os_errors("root")
    def best_step(self) -> int | None:
        """Find the step of the checkpoint with the best value of the metric that `keep_best` names.

            manager.restore(state, manager.best_step())

        Returns:
            The step, or None if no checkpoint has the metric.

        Raises:
            InvalidArgumentError: The manager was created without `keep_best`.
        """
        if self.keep_best is None:
            raise InvalidArgumentError(
                "The manager has no metric to select the best checkpoint. Pass one: CheckpointManager(..., "
                "keep_best='eval_loss')."
            )
        with self._settled():
            manifests = [one.manifest for one in self._storage.checkpoints() if one.manifest is not None]
            best = best_of(manifests, self.keep_best, self.metric_mode)
        return None if best is None else best.step

    @wraps_os_errors("root")
    def all_steps(self) -> list[int]:
        """List the steps of all checkpoints whose saves were finished, in ascending order.

        for step in manager.all_steps():
            print(manager.path_of(step))
        """
        with self._settled():
            return sorted(one.step for one in self._storage.checkpoints() if one.is_finished)

    def path_of(self, step: int | Literal["best", "latest"]) -> str:
        """Return the directory or address of a step's checkpoint, whether or not it exists.

        Args:
            step: A step; or "best" or "latest", which must exist, as found by `best_step` and `latest_step`.

        Raises:
            CheckpointNotFoundError: There is no checkpoint, or none with the metric.
            InvalidArgumentError: "best", and the manager was created without `keep_best`.

        Example:
            hfshard.load_model(model, manager.path_of("best"))
        """
        return checkpoint_path(self.root, self._step_called(step) if isinstance(step, str) else step)

    def _step_called(self, word: str) -> int:
        """Find the step of the best or the latest checkpoint."""
        if word not in ("best", "latest"):
            raise InvalidArgumentError(f"step must be a number, 'best' or 'latest', got {word!r}.")
        step = self.best_step() if word == "best" else self.latest_step()
        if step is None:
            lacks = f"with the metric '{self.keep_best}' " if word == "best" else ""
            raise CheckpointNotFoundError(f"There is no checkpoint {lacks}in '{self.root}'.", path=self.root)
        return step

    @wraps_os_errors("root")
    def verify(self, step: int | None = None, *, level: Level = "full") -> dict[int, list[HfshardError]]:
        """Check every file of one checkpoint, or of all; damage is reported, not raised.

            damaged = {step: errors for step, errors in manager.verify().items() if errors}

        Args:
            step: The checkpoint's step; None: all checkpoints.
            level: Like `verify` of `restore`.

        Returns:
            Step -> the errors found in its checkpoint; the list of an intact checkpoint is empty. Checkpoints that
            another process removes during the check are left out.

        Raises:
            CheckpointNotFoundError: There is no checkpoint of this step.
        """
        with self._settled():
            checkpoints = self._storage.checkpoints() if step is None else [checkpoint_of_step(self._storage, step)]
            problems = {one.step: live_problems(one, level) for one in sorted(checkpoints, key=lambda one: one.step)}
            return {number: found for number, found in problems.items() if found is not None}

    def _settled(self) -> AbstractContextManager[None]:
        """Keep the run as it is while the block runs, as far as this process saves into it."""
        return nullcontext()


# The checkpoints of a run, one by one.


def checkpoint_of_step(storage: RunStorage, step: int) -> RunCheckpoint:
    """Find the checkpoint of a step, damaged or not.

    Raises:
        CheckpointNotFoundError: There is none of this step.
    """
    found = storage.checkpoints()
    if candidates := [one for one in found if one.step == step]:
        return max(candidates, key=lambda one: one.manifest is not None)  # another tool's directory may exist as well
    steps = ", ".join(str(one.step) for one in found) or "none"
    raise CheckpointNotFoundError(
        f"There is no checkpoint of step {step} in '{storage.root}'. It has: {steps}.", path=storage.root
    )


def check_run_checkpoint(
    checkpoint: RunCheckpoint, verify: Level, progress: bool | None = None, *, is_read_next: bool = False
) -> CheckpointManifest:
    """Check that the files of a checkpoint are those that were saved, and return its manifest.

    Args:
        checkpoint: The checkpoint.
        verify: "structure": sizes, headers and fingerprints; "full": every byte.
        progress: Whether to show a bar with "full".
        is_read_next: Leave to the reader what it compares while it reads.

    Raises:
        DamagedCheckpointError, UnsafePathError: A file is missing, or differs from the saved one.
    """
    if verify not in ("structure", "full"):
        raise InvalidArgumentError(f"verify must be 'structure' or 'full', got {verify!r}.")
    manifest = checkpoint.require_manifest()
    folder = checkpoint.folder()
    if is_read_next and folder.traits.verifies_reads:
        return manifest
    total = sum(record.size or 0 for record in manifest.files.values())
    with byte_progress("Verifying", total, progress if verify == "full" else False) as progress_callback:
        check_files(folder, manifest.files, verify, progress_callback=progress_callback)
    return manifest


def newest_intact(
    storage: RunStorage,
    verify: Level,
    progress: bool | None = None,
    *,
    is_read_next: bool = False,
    passed_over: Collection[str] = (),
) -> tuple[RunCheckpoint, CheckpointManifest] | None:
    """Find the intact checkpoint that was saved last; warn of each that is skipped. Return None for an empty run.

    Args:
        storage: The run's.
        verify, progress, is_read_next: As in `check_run_checkpoint`.
        passed_over: Paths of checkpoints that proved damaged when they were read.

    Raises:
        DamagedCheckpointError: All checkpoints are damaged.
        StoreError: The store did not respond, or refused.
    """

    def find() -> tuple[RunCheckpoint, CheckpointManifest] | None:
        found = storage.checkpoints()
        damaged: list[tuple[RunCheckpoint, HfshardError]] = []
        for one in (one for one in found if one.path not in passed_over):
            try:
                manifest = check_run_checkpoint(one, verify, progress, is_read_next=is_read_next)
            except (InvalidArgumentError, StoreError):
                raise  # a failing store says nothing about the checkpoint
            except HfshardError as error:
                if not one.is_current():  # a run that is saving there has removed it, and has a newer one
                    raise ReplacedMeanwhile from error
                damaged.append((one, error))
            else:
                _warn_of(damaged)
                return one, manifest
        _warn_of(damaged)
        if not found:
            return None
        raise DamagedCheckpointError(
            f"None of the {len(found)} checkpoints in '{storage.root}' is intact. The warnings say what is wrong "
            "with each. To train from the beginning, pass the manager another directory.",
            path=storage.root,
        )

    too_often = f"The checkpoints in '{storage.root}' were replaced while they were being read. Retry."
    return retry_if_replaced(find, _RUN_TRAITS, storage.root, too_often)


def _warn_of(damaged: list[tuple[RunCheckpoint, HfshardError]]) -> None:
    for one, error in damaged:
        logger.warning("Skipped the checkpoint '%s': %s", one.path, error)


def checkpoint_problems(
    checkpoint: RunCheckpoint, level: Level, progress_callback: Callable[[int], object] | None = None
) -> list[HfshardError]:
    """List the problems of a checkpoint; `progress_callback` gets the bytes that were hashed."""
    problems: list[HfshardError] = []
    if checkpoint.manifest is not None:
        folder = checkpoint.folder()
        records = checkpoint.manifest.files
        check_files(folder, records, level, progress_callback=progress_callback, on_problem=problems.append)
        problems += _strays(folder, checkpoint.manifest)
    elif checkpoint.problem is not None:
        problems.append(checkpoint.problem)
    return problems


def live_problems(checkpoint: RunCheckpoint, level: Level) -> list[HfshardError] | None:
    """List the current problems of a checkpoint; None if a run that is saving there has removed it.

    Raises:
        CheckpointChangedError: The checkpoint was replaced on every attempt.
    """
    latest = checkpoint

    def check() -> list[HfshardError] | None:
        nonlocal latest
        problems = checkpoint_problems(latest, level)
        if not problems or latest.is_current():
            return problems
        if not latest.folder().exists():
            return None
        latest = latest.reread()
        raise ReplacedMeanwhile

    too_often = f"'{checkpoint.path}' was replaced while it was being checked. Retry."
    traits = replace(checkpoint.folder().traits, retries=_RUN_TRAITS.retries)
    return retry_if_replaced(check, traits, checkpoint.path, too_often)


def _strays(folder: Folder, manifest: CheckpointManifest) -> list[HfshardError]:
    """Report files in a checkpoint that other tools would load instead of its own."""
    problems: list[HfshardError] = []
    for base in PARTS:
        names = WeightNames(base=base)
        path = os.path.join(folder.path, names.single)
        if names.single not in manifest.files and folder.has(names.single):
            problems.append(
                DamagedCheckpointError(
                    f"'{path}' does not belong to the checkpoint, but other tools load it instead of the checkpoint's "
                    "own files. Move it elsewhere.",
                    path=path,
                )
            )
    return problems


# Lookup by path: a run, or one checkpoint.


STORAGES: Final[dict[type[SavePlace], Callable[[str], RunStorage]]] = {
    DirectoryPlace: RunDirectory,
    StorePlace: RunStore,
}
"""Class of a place -> storage of a run in such a place, given its path or address."""


def open_run(root: str) -> RunStorage:
    """Return the storage of a run; nothing is read or created yet.

    Raises:
        InvalidArgumentError: It is a place for checkpoints only.
    """
    storage = STORAGES.get(type(place_to_save(root, "path")))
    if storage is None:
        raise InvalidArgumentError(
            f"'{root}' is a place for checkpoints, not for runs. Pass a directory, or an address in a store.", path=root
        )
    return storage(root)


# Checkpoints from elsewhere than the run: in a directory, at an address, or on a hub.


_RESUME_THERE: Final = "Only the program that saved the optimizer and the rest of the run can resume them."
"""Follows a description of parts, from which hfshard restores no run."""


def absolute_place(step: int | str | os.PathLike[str] | None) -> int | str | os.PathLike[str] | None:
    """Return a step unchanged, and another checkpoint's or file's place as an absolute one.

    Raises:
        InvalidPathError: It is neither.
    """
    if not isinstance(step, str | os.PathLike):
        return step
    place = place_to_load(step, "step")
    if not place.is_read_from_disk:
        return place.address
    return absolute_path(step, "step") if os.path.exists(step) else absolute_repo_id(step)


def checked_at(
    place: str | os.PathLike[str], verify: Level, *, token: str | bool | None, progress: bool | None
) -> tuple[RunCheckpoint, CheckpointManifest]:
    """Find and check a checkpoint to read in a directory, at an address, or on a hub; one on the Hub is downloaded.

    Args:
        place: A path, an address or `file://` URL, or "org/name"; on a hub with "@revision" unless it is main.
        verify: As in `check_run_checkpoint`.
        token: A token, as in huggingface_hub.
        progress: Whether to show a bar on stderr. None: on a terminal.

    Raises:
        InvalidArgumentError: `place` is not valid, or it is a store's address, which takes no token.
        CheckpointNotFoundError: There is no training checkpoint; a model alone is not one.
        HubNotFoundError, HubAccessError, HubConnectionError, HubError: The repo cannot be read.
        DamagedCheckpointError, UnsafePathError: The checkpoint is damaged.
    """
    if isinstance(place, str) and place.isdecimal() and not os.path.isdir(place):
        raise InvalidArgumentError(f"'{place}' is neither a place nor a step. Pass a step as a number: {int(place)}.")
    resolved = place_to_load(place, "place")
    if not resolved.is_read_from_disk:
        resolved.reject_hub_arguments(token=token)
        found = _in(resolved.address)
        return found, check_run_checkpoint(found, verify, progress, is_read_next=True)
    path, revision = split_address(place)
    query = CheckpointQuery(revision=revision, token=token)
    local = CheckpointSource(path, query).find_local()
    if local is not None:
        found = _in(local.directory)
    else:
        from hfshard.hub.download import fetch

        with explain_missing_directory(path):
            found = _in(fetch(path, _resolve_run_checkpoint, query, progress).directory)
    try:
        return found, check_run_checkpoint(found, verify, progress)
    except IntegrityError as error:
        if local is not None:
            raise
        at = f" --revision {revision}" if revision is not None else ""
        raise IntegrityError(
            f"{error.message} The cached copy may be damaged. To download it again, run: hfshard pull {path}{at} "
            "--include '*' --force-download",
            path=error.path,
            expected=error.expected,
            actual=error.actual,
        ) from error


def _resolve_run_checkpoint(files: CommitFiles) -> ResolvedCheckpoint:
    """Find all files of a training checkpoint, and download them."""
    if not files.has(MANIFEST):
        if (parts := files.parts("")) is not None:
            raise CheckpointNotFoundError(f"{parts} {_RESUME_THERE}")
        what, todo = files.description()
        raise _no_checkpoint(what, f"{todo}. To load a model alone, use hfshard.load_model.")
    files.download([MANIFEST])
    paths = [MANIFEST, *read_manifest(files.snapshot()).files]
    files.download(paths)
    return ResolvedCheckpoint(files.snapshot(), files.commit, tuple(paths), None, ())


def _no_checkpoint(what: str, todo: str, path: str | None = None) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(f"{what} holds no training checkpoint: there is no {MANIFEST}. {todo}", path=path)


def _in(directory: str) -> RunCheckpoint:
    """Return the checkpoint in a directory or at an address, which must be one."""
    folder = folder_at(directory)
    if folder.has(MANIFEST):
        return RunCheckpoint.of(directory, read_manifest(folder))
    checkpoints = [one.path for one in open_run(directory).checkpoints()]
    parts = describe_parts_in(directory) if folder.traits.is_directory and not checkpoints else None
    if parts is not None:
        raise CheckpointNotFoundError(f"{parts} {_RESUME_THERE}", path=directory)
    todo = (
        f"It is a run. Pass one of its checkpoints, such as '{checkpoints[0]}'."
        if checkpoints
        else "If it is a model, load it with hfshard.load_model."
    )
    raise _no_checkpoint(f"'{directory}'", todo, directory)


# Reports of training checkpoints: every file that the manifest names, not only the model's.


def is_checkpoint(folder: Folder) -> bool:
    """Return whether a folder, as `folder_at` returns it, is, or was, that of a training checkpoint."""
    return folder.has_any(TRAINING_FILES)


def is_run(folder: Folder, folders: Collection[str] | None = None) -> bool:
    """Return whether a folder is that of a run with a training checkpoint, not of a checkpoint.

    Args:
        folder: As `folder_at` returns it.
        folders: The names of the folders in it, if they are known.
    """
    names = folder.folders() if folders is None else folders
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
