"""The commands that rewrite or remove: reshard, convert, checkpoints, remove."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from hfshard._util.text import count_of, format_size, printable
from hfshard.cli import shared_arguments
from hfshard.cli.check_commands import print_problems
from hfshard.cli.output import checksum_text, is_confirmed, print_json, print_message, print_text, table
from hfshard.constants import DEFAULT_MAX_SHARD_SIZE
from hfshard.errors import CheckpointNotFoundError, InvalidArgumentError

if TYPE_CHECKING:
    from hfshard.checkpoint.reports import Problem, RemovalReport
    from hfshard.format.index import FileDigest
    from hfshard.saving.resharding import ReshardResult
    from hfshard.training.interop.convert_run import ConvertedRun
    from hfshard.training.interop.foreign_checkpoint import ForeignCheckpoint
    from hfshard.training.run.manifest import RunCheckpoint
    from hfshard.viewing.run_listing import ListedCheckpoint


def add_reshard(commands: shared_arguments.CommandGroup) -> None:
    """Add `reshard`."""
    parser = commands.add_parser(
        "reshard",
        reshard,
        help="write a checkpoint in files of another size",
        description="Copy the tensors of a checkpoint into files of another size, bit for bit, and compare them with "
        "their checksums. The target's old checkpoint stays loadable until the new files are complete.",
    )
    _add_source_and_target(parser)
    parser.set_defaults(config=None)
    parser.add_argument(
        "--low-disk", action="store_true", help="in place only: keep at most one shard on disk twice at any time"
    )


def _add_source_and_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SRC",
        help=f"a directory, or one file of weights; {shared_arguments.REPO}; or {shared_arguments.STORE}",
    )
    parser.add_argument(
        "target", metavar="DST", help=f"the directory to write; if it is SRC: in place{shared_arguments.OR_STORE}"
    )
    parser.add_argument(
        "--max-shard-size",
        type=shared_arguments.shard_size,
        default=DEFAULT_MAX_SHARD_SIZE,
        metavar="SIZE",
        help="maximum size of a file, such as 5GB or 500MiB (default: %(default)s)",
    )
    parser.add_argument(
        "--packing",
        choices=("greedy", "balanced"),
        default="greedy",
        help="greedy: in the order of the tensors (default); balanced: files of similar size, and fewer if possible",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32", "float64"), help="cast floating tensors")
    shared_arguments.add_checksum(parser, "checksum of the written files")
    shared_arguments.add_variant(parser)
    shared_arguments.add_key(parser)
    parser.add_argument("--revision", help="revision of SRC on a hub: branch, tag, commit or refs/pr/N (default: main)")
    parser.add_argument("--subfolder", default="", help="folder in SRC")
    parser.add_argument(
        "--local-files-only", action="store_true", help="read SRC on the Hub only from the cache, not from the network"
    )
    parser.add_argument(
        "--follow-links",
        action="store_true",
        help="also copy files outside the checkpoint that links next to the weights lead to; otherwise they are "
        "rejected",
    )
    parser.add_argument(
        "--drop-signature",
        action="store_true",
        help="remove DST's model.sig, which becomes stale; otherwise a signed checkpoint is rejected in place",
    )
    shared_arguments.add_token(parser)
    shared_arguments.add_format(parser)
    shared_arguments.add_no_progress(parser)


def reshard(arguments: argparse.Namespace) -> int:
    """Write a checkpoint in files of another size, and print them."""
    return _print_result(_rewrite(arguments, use_safetensors=None), arguments)


def _convert_weights(arguments: argparse.Namespace) -> int:
    """Write pickled weights as safetensors, and print the files."""
    try:
        result = _rewrite(arguments, use_safetensors=False)
    except CheckpointNotFoundError as error:
        if _has_safetensors(arguments):
            raise InvalidArgumentError(
                f"'{arguments.source}' has no pickles to convert: its weights are safetensors. To write files of "
                f"another size, run: hfshard reshard {arguments.source} {arguments.target}",
                path=arguments.source,
            ) from error
        raise
    return _print_result(result, arguments)


def _rewrite(arguments: argparse.Namespace, *, use_safetensors: bool | None) -> ReshardResult:
    from hfshard.checkpoint.locate import CheckpointQuery
    from hfshard.places.place import place_to_save
    from hfshard.places.source import CheckpointSource
    from hfshard.saving.resharding import reshard_source
    from hfshard.saving.save_request import SaveOptions

    query = CheckpointQuery(
        subfolder=arguments.subfolder,
        variant=arguments.variant,
        use_safetensors=use_safetensors,
        revision=arguments.revision,
        token=arguments.token,
        local_files_only=arguments.local_files_only,
    )
    options = SaveOptions(
        max_shard_size=arguments.max_shard_size,
        variant=arguments.variant,
        packing=arguments.packing,
        checksum=None if arguments.checksum == "none" else arguments.checksum,
        drop_signature=arguments.drop_signature,
        progress=arguments.progress,
    )
    return reshard_source(
        CheckpointSource(arguments.source, query, takes_files=True),
        place_to_save(arguments.target, "dst"),
        options,
        dtype=arguments.dtype,
        low_disk=arguments.low_disk,
        key=arguments.key,
        follow_links=arguments.follow_links,
        config=arguments.config,
    )


def _has_safetensors(arguments: argparse.Namespace) -> bool:
    """Return whether a directory or a store has weights that need no conversion; False for a repo of the Hub."""
    from hfshard.checkpoint.locate import CheckpointQuery, locate_checkpoint
    from hfshard.format.file_names import WeightNames
    from hfshard.places.source import CheckpointSource

    try:
        local = CheckpointSource(arguments.source, CheckpointQuery(subfolder=arguments.subfolder)).find_local()
        if local is None:
            return False
        local.folder.refresh()
        locate_checkpoint(local.folder, WeightNames(arguments.variant), use_safetensors=True)
    except (CheckpointNotFoundError, InvalidArgumentError):
        return False
    return True


def _print_result(result: ReshardResult, arguments: argparse.Namespace) -> int:
    if arguments.format == "json":
        print_json(_result_as_json(result))
    else:
        print_text(_result_as_text(result, arguments.variant))
    if not result.is_compared:
        print_message(
            f"note: '{result.source}' has no checksums of its tensors: its structure was checked, but not its bytes."
        )
    return 0


def _written_weights(result: ReshardResult) -> dict[str, FileDigest]:
    """Return the written weight files, including those without tensors, with their records."""
    found = {name: digest for name, digest in result.index.files.items() if not name.endswith(".json")}
    return dict(sorted(found.items()))


def _result_as_json(result: ReshardResult) -> dict[str, Any]:
    counts = Counter(result.index.weight_map.values())
    weights = _written_weights(result)
    return {
        "directory": result.directory,
        "source": result.source,
        "is_compared": result.is_compared,
        "total_size": result.index.total_size,
        "files_before": [{"name": name, "size": size} for name, size in sorted(result.files_before.items())],
        "files": [{"name": name, **asdict(digest), "tensors": counts[name]} for name, digest in weights.items()],
        "tied_names": result.index.tied_names,
        "copied": list(result.companion_files),
    }


def _result_as_text(result: ReshardResult, variant: str | None) -> str:
    counts = Counter(result.index.weight_map.values())
    weights = _written_weights(result)
    before = sum(result.files_before.values())
    after = sum(digest.size or 0 for digest in weights.values())
    compared = ", every copied byte compared with its checksum" if result.is_compared else ""
    rows = [
        ["read", f"{result.source}: {format_size(before)} in {count_of(len(result.files_before), 'file')}{compared}"],
        ["written", f"{result.directory}: {format_size(after)} in {count_of(len(weights), 'file')}"],
    ]
    if result.companion_files:
        rows.append(["copied", ", ".join(result.companion_files)])
    files = [
        [name, format_size(digest.size or 0), f"{counts[name]:,}", checksum_text(digest)]
        for name, digest in weights.items()
    ]
    parts = [table(["", ""], rows).lstrip("\n"), table(["file", ">size", ">tensors", "checksum"], files)]
    command = shlex.join(["hfshard", "verify", result.directory, *(["--variant", variant] if variant else [])])
    return "\n\n".join([*parts, printable(f"To check it at any time, run: {command}")])


# The commands for checkpoints of training runs: checkpoints, and convert if it creates one.


def add_checkpoints(commands: shared_arguments.CommandGroup) -> None:
    """Add `checkpoints`."""
    parser = commands.add_parser(
        "checkpoints",
        checkpoints,
        help="list a training run's checkpoints, and what is wrong with them",
        description="List a training run's checkpoints in the order in which they were saved, and what is wrong with "
        "them. Exit 0: none is damaged or unfinished, 1: one is, or the run has none, 2: bad usage.",
    )
    shared_arguments.add_directory(parser, "the run's directory")
    parser.add_argument("--verify", action="store_true", help="compare every byte with its checksum")
    shared_arguments.add_best(parser, "mark")
    shared_arguments.add_format(parser)
    shared_arguments.add_no_progress(parser)


def checkpoints(arguments: argparse.Namespace) -> int:
    """Show the checkpoints of a run; exit 0 if none is damaged or unfinished, 1 if one is, or there is none."""
    listed = _list_checkpoints(arguments)
    if arguments.format == "json":
        print_json({"directory": arguments.directory, "checkpoints": [entry.as_json() for entry in listed]})
    else:
        print_text(_listed_table(listed))
        if any(entry.problems for entry in listed):
            print_text()
        for entry in listed:
            print_problems(entry.problems, "UNFINISHED" if entry.is_unfinished else "DAMAGED")
    known = sorted({name for entry in listed for name in entry.metrics})
    if arguments.best is not None and arguments.best not in known:
        print_message(
            f"note: no checkpoint has the metric '{arguments.best}'. Available: {', '.join(known) or 'none'}."
        )
    return 1 if any(entry.problems for entry in listed) else 0


def _list_checkpoints(arguments: argparse.Namespace) -> list[ListedCheckpoint]:
    from hfshard.places.place import place_to_save
    from hfshard.training.run.find_checkpoint import report_of
    from hfshard.viewing.run_listing import checkpoints_of, list_checkpoints

    def check(found: RunCheckpoint) -> Sequence[Problem]:
        return report_of(found.path, "full", progress=arguments.progress).problems

    return list_checkpoints(
        checkpoints_of(place_to_save(arguments.directory, "path").address),
        check if arguments.verify else None,
        best=arguments.best,
        metric_mode=arguments.metric_mode,
    )


def _listed_table(listed: Sequence[ListedCheckpoint]) -> str:
    from hfshard.viewing.run_listing import metrics_text

    rows = [
        [
            str(entry.step),
            "" if entry.save_number is None else str(entry.save_number),
            entry.saved_text,
            "" if entry.size is None else format_size(entry.size),
            "" if entry.files is None else str(entry.files),
            metrics_text(entry.metrics),
            _state_text(entry),
        ]
        for entry in listed
    ]
    return table([">step", ">save", "saved (UTC)", ">size", ">files", "metrics", ""], rows)


def _state_text(entry: ListedCheckpoint) -> str:
    """Describe the state of a checkpoint, what is wrong with it in capitals."""
    is_intact = entry.is_verified and not entry.problems
    words = [word.upper() if word in ("damaged", "unfinished") else word for word in entry.states]
    return ", ".join(["intact", *words] if is_intact else words)


def add_convert(commands: shared_arguments.CommandGroup) -> None:
    """Add `convert`."""
    parser = commands.add_parser(
        "convert",
        convert,
        help="convert .bin, .pt, DeepSpeed's and FSDP's parts to safetensors",
        description="Write the pickled weights of a directory or one file as safetensors, also those that DeepSpeed or "
        "torch.distributed.checkpoint (FSDP) saved in parts for each rank: float32 where there are masters. If another "
        "program saved SRC with an optimizer, create a checkpoint of the run DST (of SRC in a store, convert the "
        "weights alone). A pickle that asks for more than plain data is rejected. In place, the pickles are removed "
        "when the safetensors are complete.",
    )
    _add_source_and_target(parser)
    parser.set_defaults(low_disk=False)
    parser.add_argument(
        "--config",
        metavar="DIR",
        help="directory with config.json and tokenizer to copy along (default: that of the weights; for weights in "
        "parts, also the one above)",
    )
    parser.add_argument("--weights", action="store_true", help="write only the weights, even if SRC has an optimizer")
    parser.add_argument("--step", type=int, metavar="N", help="for a run: the checkpoint's step (default: SRC's own)")
    parser.add_argument(
        "--part",
        action="append",
        type=_part,
        default=[],
        metavar="NAME=KEY",
        help='for a run: where SRC has a part, such as model=ema.state_dict or optimizer="optim.0"; repeatable',
    )
    parser.add_argument(
        "--not-strict",
        dest="strict",
        action="store_false",
        help="for a run: leave out what cannot be read, and report it",
    )


def _part(text: str) -> tuple[str, str]:
    """Split the name of a part from its key in a file."""
    name, equals, key = text.partition("=")
    if not name or not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=KEY")
    return name, key


def convert(arguments: argparse.Namespace) -> int:
    """Create a checkpoint of a run if the source has an optimizer; else write its weights as safetensors."""
    from hfshard.training.interop.convert_run import convert_foreign, is_foreign_run

    source = arguments.source
    is_weights = arguments.weights or arguments.key is not None or _is_in_place(source, arguments.target)
    if is_weights or not is_foreign_run(source):
        return _convert_weights(arguments)
    if arguments.dtype is not None or arguments.config is not None:
        raise InvalidArgumentError(
            "A checkpoint of a run keeps its dtypes and its config. Pass --weights to write the weights alone."
        )
    if arguments.checksum == "none":
        raise InvalidArgumentError("A checkpoint of a run always has checksums. Pass --checksum xxh3 or sha256.")
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
    """Return a function that puts a Trainer's checkpoint into the order of its model; it leaves others unchanged."""
    from hfshard.training.interop.foreign_readers import is_trainer_directory

    if not is_trainer_directory(source):
        return lambda foreign: foreign
    from hfshard.training.integrations.trainer_names import reorder_by_model  # imports transformers: that takes time

    return reorder_by_model


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


# `remove`: lists what goes and what stays, and asks before it removes anything.


_SHOWN: Final = 30
"""Files in a list; JSON has all of them."""


def add_remove(commands: shared_arguments.CommandGroup) -> None:
    """Add `remove`."""
    parser = commands.add_parser(
        "remove",
        remove,
        help="remove a checkpoint, also of a run, or leftovers of killed saves",
        description="Remove a checkpoint: its weights, indexes and configs, and nothing else. What goes, with sizes, "
        "and what stays is listed before it asks. In a store, no save may run at the same time. Exit 0: removed, or "
        "no leftovers, 1: not removed, 2: bad usage.",
    )
    parser.add_argument(
        "directory",
        metavar="PLACE",
        help=f"the directory of a checkpoint, a run or a run's checkpoint{shared_arguments.OR_STORE}",
    )
    parser.add_argument("--step", type=int, metavar="N", help="for a run: the checkpoint of this step")
    shared_arguments.add_variant(parser)
    parser.add_argument(
        "--leftovers", action="store_true", help="remove not a checkpoint, but what killed saves have left in PLACE"
    )
    parser.add_argument(
        "--unfinished",
        action="store_true",
        help="in a store: also objects of a newer save, which is running or was killed",
    )
    parser.add_argument("--dry-run", action="store_true", help="list what goes and what stays, and remove nothing")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    shared_arguments.add_format(parser)


def remove(arguments: argparse.Namespace) -> int:
    """List what goes and what stays, ask, and remove it; return 0 if it is done, 1 if the user declined."""
    from hfshard.remove import plan_removal

    is_asked = not (arguments.yes or arguments.dry_run)
    if is_asked and (arguments.format == "json" or not sys.stdin.isatty()):
        raise InvalidArgumentError(
            "hfshard remove asks on a terminal before it removes anything. Pass --yes to remove it without asking, "
            "or --dry-run to see what would go."
        )
    removal = plan_removal(
        arguments.directory,
        variant=arguments.variant,
        step=arguments.step,
        leftovers=arguments.leftovers,
        unfinished=arguments.unfinished,
    )
    report = removal.report
    if arguments.format == "text":
        _print_report(report)
    if is_asked and not report.is_empty and not _ask(report):
        print_message("Nothing was removed.")
        return 1
    if not arguments.dry_run:
        removal.carry_out()
        report = replace(report, is_done=True)
    if arguments.format == "json":
        print_json({**asdict(report), "size": report.size})
    elif report.is_done and not report.is_empty:
        print_text("\n" + printable(f"{report.place}: {_describe(report)} removed"))
    return 0


def _print_report(report: RemovalReport) -> None:
    if report.is_empty:
        print_text(printable(f"{report.place}: nothing to remove"))
    else:
        print_text(_list(">size", "goes", {name: format_size(size) for name, size in report.removed.items()}))
        for name in report.unfinished_uploads:
            print_text(printable(f"{name}  (an unfinished upload)"))
    if report.kept:
        print_text("\n" + _list("why", "stays", report.kept))


def _list(title: str, what: str, files: Mapping[str, str]) -> str:
    rows = [[name, text] for name, text in list(files.items())[:_SHOWN]]
    more = f"\n... and {len(files) - _SHOWN:,} more: --format json lists all" if len(files) > _SHOWN else ""
    return table([what, title], rows) + more


def _ask(report: RemovalReport) -> bool:
    from hfshard.places.place import place_to_save

    has_lock = place_to_save(report.place).is_read_from_disk
    care = "" if has_lock else " No save may run there at the same time."
    question = "\n" + printable(f"Remove {_describe(report)} from '{report.place}'?{care} [y/N] ")
    return is_confirmed(question)


def _describe(report: RemovalReport) -> str:
    return f"{count_of(len(report.removed), 'file')} ({format_size(report.size)})"
