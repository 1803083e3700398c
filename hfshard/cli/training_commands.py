"""The commands for checkpoints of training runs: checkpoints, and convert where it makes one."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from hfshard._util.text import format_size
from hfshard.checkpoint.verifier import Problem
from hfshard.cli import reshard_commands
from hfshard.cli.commands import print_problems
from hfshard.cli.output import print_json, print_message, print_text, printable, table
from hfshard.errors import InvalidArgumentError
from hfshard.training.interop.convert_run import ConvertedRun, convert_foreign, is_foreign_run
from hfshard.training.interop.foreign_checkpoint import ForeignCheckpoint
from hfshard.training.interop.foreign_readers import is_trainer_directory
from hfshard.training.run.manifest import RunCheckpoint
from hfshard.training.run.reports import report_of
from hfshard.viewing.runs.listing import ListedCheckpoint, checkpoints_of, list_checkpoints


def checkpoints(arguments: argparse.Namespace) -> int:
    """Show the checkpoints of a run; 0 when none is damaged or unfinished, 1 when one is, or there is none."""
    listed = _list_checkpoints(arguments)
    if arguments.format == "json":
        print_json({"directory": arguments.directory, "checkpoints": [_listed_as_json(entry) for entry in listed]})
    else:
        print_text(_listed_table(listed))
        if any(entry.problems for entry in listed):
            print_text()
        for entry in listed:
            print_problems(entry.problems, "UNFINISHED" if entry.is_unfinished else "DAMAGED")
    known = sorted({name for entry in listed for name in entry.metrics})
    if arguments.best is not None and arguments.best not in known:
        print_message(
            f"note: no checkpoint has the metric '{arguments.best}'. They have: {', '.join(known) or 'none'}."
        )
    return 1 if any(entry.problems for entry in listed) else 0


def _list_checkpoints(arguments: argparse.Namespace) -> list[ListedCheckpoint]:
    def check(found: RunCheckpoint) -> Sequence[Problem]:
        return report_of(found.path, "full", progress=arguments.progress).problems

    return list_checkpoints(
        checkpoints_of(arguments.directory),
        check if arguments.verify else None,
        best=arguments.best,
        metric_mode=arguments.metric_mode,
    )


def _listed_table(listed: Sequence[ListedCheckpoint]) -> str:
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


def _listed_as_json(entry: ListedCheckpoint) -> dict[str, Any]:
    saved = None if entry.saved is None else entry.saved.isoformat()
    metrics = {name: value if abs(value) < float("inf") else str(value) for name, value in entry.metrics.items()}
    return {**asdict(entry), "saved": saved, "metrics": metrics, "is_damaged": entry.is_damaged}


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
