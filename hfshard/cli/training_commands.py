"""The commands for checkpoints of training runs: checkpoints, and convert where it makes one."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from hfshard._util.size import format_size
from hfshard.cli import reshard_commands
from hfshard.cli.commands import print_problems
from hfshard.cli.output import print_json, print_message, print_text, printable, table
from hfshard.cli.training_reports import as_problems, is_checkpoint, report_of
from hfshard.errors import CheckpointNotFoundError, InvalidArgumentError
from hfshard.storage.checkpoint.report import Problem
from hfshard.training.foreign.checkpoint import ForeignCheckpoint
from hfshard.training.foreign.converting import ConvertedRun, convert_foreign, is_foreign_run
from hfshard.training.foreign.directories.trainer import is_trainer_directory
from hfshard.training.run.manifest import MANIFEST, CheckpointManifest
from hfshard.training.run.places.opening import files_at, run_place
from hfshard.training.run.rotation import best_of
from hfshard.training.run.run_checkpoint import RunCheckpoint


@dataclass(frozen=True, slots=True)
class _ListedCheckpoint:
    """One checkpoint of a run, as the list shows it."""

    path: str
    step: int
    problems: tuple[Problem, ...]
    is_verified: bool
    save_number: int | None = None
    saved: datetime | None = None
    size: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    files: int | None = None
    is_latest: bool = False
    is_best: bool = False

    @property
    def state(self) -> str:
        """What there is to say about it, in words."""
        words = ["DAMAGED"] if self.problems else ["whole"] if self.is_verified else []
        words += ["latest"] if self.is_latest else []
        return ", ".join(words + (["best"] if self.is_best else []))


def checkpoints(arguments: argparse.Namespace) -> int:
    """Show the checkpoints of a run; 0 when none is damaged, 1 when one is, or there is none."""
    listed = _list_checkpoints(arguments)
    if arguments.format == "json":
        print_json({"directory": arguments.directory, "checkpoints": [_listed_as_json(entry) for entry in listed]})
    else:
        print_text(_listed_table(listed))
        if problems := [problem for entry in listed for problem in entry.problems]:
            print_text()
            print_problems(problems)
    known = sorted({name for entry in listed for name in entry.metrics})
    if arguments.best is not None and arguments.best not in known:
        print_message(
            f"note: no checkpoint has the metric '{arguments.best}'. They have: {', '.join(known) or 'none'}."
        )
    return 1 if any(entry.problems for entry in listed) else 0


def _list_checkpoints(arguments: argparse.Namespace) -> list[_ListedCheckpoint]:
    """List the checkpoints in the order in which they were saved; those that do not say come last."""
    root = arguments.directory
    if is_checkpoint(root):
        raise CheckpointNotFoundError(
            f"'{root}' is one checkpoint, not a run. To check it, run: hfshard verify {root}", path=root
        )
    found = run_place(root).checkpoints()[::-1]
    if not found:
        raise CheckpointNotFoundError(f"There is no training checkpoint in '{root}'. Check the path.", path=root)
    problems = {one.path: _problems_of(one, arguments) for one in found}
    whole = [one.manifest for one in found if one.manifest is not None and not problems[one.path]]
    latest = max((one.save_number for one in whole), default=None)
    best = best_of(whole, arguments.best, arguments.metric_mode) if arguments.best is not None else None
    return [_list_one(one, problems[one.path], latest, best, is_verified=arguments.verify) for one in found]


def _problems_of(found: RunCheckpoint, arguments: argparse.Namespace) -> tuple[Problem, ...]:
    if found.manifest is None:
        return tuple(as_problems([found.problem] if found.problem is not None else [], found.path))
    if not arguments.verify:
        return ()
    return report_of(found.path, "full", progress=arguments.progress).problems


def _list_one(
    found: RunCheckpoint,
    problems: tuple[Problem, ...],
    latest: int | None,
    best: CheckpointManifest | None,
    *,
    is_verified: bool,
) -> _ListedCheckpoint:
    manifest = found.manifest
    if manifest is None:
        return _ListedCheckpoint(found.path, found.step, problems, is_verified)
    files = files_at(found.path)
    return _ListedCheckpoint(
        found.path,
        found.step,
        problems,
        is_verified,
        save_number=manifest.save_number,
        saved=files.saved_at(),
        size=files.size(MANIFEST) + sum(digest.size or 0 for digest in manifest.files.values()),
        metrics=manifest.metrics,
        files=len(manifest.files) + 1,
        is_latest=manifest.save_number == latest and not problems,
        is_best=manifest is best,
    )


def _listed_table(listed: Sequence[_ListedCheckpoint]) -> str:
    rows = [
        [
            str(entry.step),
            "" if entry.save_number is None else str(entry.save_number),
            "" if entry.saved is None else f"{entry.saved:%Y-%m-%d %H:%M}",
            "" if entry.size is None else format_size(entry.size),
            "" if entry.files is None else str(entry.files),
            ", ".join(f"{name} {value:.6g}" for name, value in sorted(entry.metrics.items())),
            entry.state,
        ]
        for entry in listed
    ]
    return table([">step", ">save", "saved (UTC)", ">size", ">files", "metrics", ""], rows)


def _listed_as_json(entry: _ListedCheckpoint) -> dict[str, Any]:
    saved = None if entry.saved is None else entry.saved.isoformat()
    metrics = {name: value if abs(value) < float("inf") else str(value) for name, value in entry.metrics.items()}
    return {**asdict(entry), "saved": saved, "metrics": metrics, "is_damaged": bool(entry.problems)}


def convert(arguments: argparse.Namespace) -> int:
    """Make a checkpoint of a run, where the source has an optimizer; else write its weights as safetensors."""
    source = os.path.expanduser(arguments.source)
    is_weights = arguments.weights or arguments.key is not None or _is_in_place(source, arguments.target)
    if is_weights or not is_foreign_run(source):
        return reshard_commands.convert(arguments)
    if arguments.checksum == "none":
        raise InvalidArgumentError("A checkpoint of a run always has checksums: --checksum xxh3 or sha256.")
    converted = convert_foreign(
        source,
        arguments.target,
        keys=dict(arguments.part),
        in_order=_order_of_model(source),
        step=arguments.step,
        strict=arguments.strict,
        max_shard_size=arguments.max_shard_size,
        checksum=arguments.checksum,
        progress=arguments.progress,
    )
    if arguments.format == "json":
        print_json({"source": source, **asdict(converted)})
    else:
        print_text(_converted_text(source, converted))
    for difference in converted.differences:
        print_message(f"note: {difference}")
    return 0


def _order_of_model(source: str) -> Callable[[ForeignCheckpoint], ForeignCheckpoint]:
    """What puts a checkpoint into the order of its model, where config.json says which that is."""
    if not is_trainer_directory(source):
        return lambda foreign: foreign
    from hfshard.training.integrations.trainer_names import in_order_of_model  # imports transformers: that takes time

    return in_order_of_model


def _is_in_place(source: str, target: str) -> bool:
    return os.path.exists(target) and os.path.exists(source) and os.path.samefile(source, target)


def _converted_text(source: str, converted: ConvertedRun) -> str:
    rows = [
        ["read", source],
        ["written", converted.path],
        ["step", str(converted.step)],
        ["parts", ", ".join(converted.parts)],
        *(["lacking", words] for words in converted.lacking),
    ]
    command = printable(f"To check it at any time, run: {shlex.join(['hfshard', 'verify', converted.path])}")
    return "\n\n".join([table(["", ""], rows).lstrip("\n"), command])
