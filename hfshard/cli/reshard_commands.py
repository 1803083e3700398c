"""The commands that write a checkpoint anew: reshard, convert."""

from __future__ import annotations

import argparse
import os
import shlex
from collections import Counter
from dataclasses import asdict
from typing import Any

from hfshard.cli.output import print_json, print_message, print_text, printable, table
from hfshard.errors import CheckpointNotFoundError, InvalidArgumentError
from hfshard.hub.resolve import CheckpointQuery
from hfshard.loading.source import CheckpointSource
from hfshard.planning.size import format_size
from hfshard.resharding.reshard import ReshardResult, reshard_source
from hfshard.saving.options import SaveOptions
from hfshard.storage.checkpoint.locate import locate_checkpoint
from hfshard.storage.format.index import FileDigest
from hfshard.storage.format.names import WeightNames

_HASH_DIGITS = 12
"""Hex digits of a hash in a table: enough to tell files apart; JSON has all of them."""


def reshard(arguments: argparse.Namespace) -> int:
    """Write a checkpoint in files of another size, and show them."""
    return _show(_run(arguments, use_safetensors=None, low_disk=arguments.low_disk), arguments)


def convert(arguments: argparse.Namespace) -> int:
    """Write pickled weights as safetensors, and show the files."""
    try:
        result = _run(arguments, use_safetensors=False, low_disk=False)
    except CheckpointNotFoundError as error:
        if _has_safetensors(arguments):
            raise InvalidArgumentError(
                f"'{arguments.source}' has no pickles to convert: its weights are safetensors. For files of another "
                f"size, run: hfshard reshard {arguments.source} {arguments.target}",
                path=arguments.source,
            ) from error
        raise
    return _show(result, arguments)


def _run(arguments: argparse.Namespace, *, use_safetensors: bool | None, low_disk: bool) -> ReshardResult:
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
        progress=False if arguments.no_progress else None,
    )
    return reshard_source(
        CheckpointSource(arguments.source, query), arguments.target, options, dtype=arguments.dtype, low_disk=low_disk
    )


def _has_safetensors(arguments: argparse.Namespace) -> bool:
    directory = os.path.join(arguments.source, arguments.subfolder)
    if not os.path.isdir(directory):
        return False
    try:
        locate_checkpoint(directory, WeightNames(arguments.variant), use_safetensors=True)
    except CheckpointNotFoundError:
        return False
    return True


def _show(result: ReshardResult, arguments: argparse.Namespace) -> int:
    if arguments.format == "json":
        print_json(_as_json(result))
    else:
        print_text(_as_text(result, arguments.variant))
    if not result.is_compared:
        print_message(
            f"note: '{result.source}' has no checksums of its tensors: its structure was checked, its bytes can't be."
        )
    return 0


def _weights(result: ReshardResult) -> dict[str, FileDigest]:
    """The files of weights that were written, and their records; also those that hold no tensor."""
    found = {name: record for name, record in result.index.files.items() if not name.endswith(".json")}
    return dict(sorted(found.items()))


def _as_json(result: ReshardResult) -> dict[str, Any]:
    counts = Counter(result.index.weight_map.values())
    return {
        "directory": result.directory,
        "source": result.source,
        "is_compared": result.is_compared,
        "total_size": result.index.total_size,
        "files_before": [{"name": name, "size": size} for name, size in sorted(result.files_before.items())],
        "files": [
            {"name": name, **asdict(record), "tensors": counts[name]} for name, record in _weights(result).items()
        ],
        "tied_names": result.index.tied_names,
        "copied": list(result.companion_files),
    }


def _as_text(result: ReshardResult, variant: str | None) -> str:
    counts, weights = Counter(result.index.weight_map.values()), _weights(result)
    before = sum(result.files_before.values())
    after = sum(record.size or 0 for record in weights.values())
    compared = ", every copied byte compared with its checksum" if result.is_compared else ""
    rows = [
        ["read", f"{result.source}: {format_size(before)} in {_count(len(result.files_before))}{compared}"],
        ["written", f"{result.directory}: {format_size(after)} in {_count(len(weights))}"],
    ]
    if result.companion_files:
        rows.append(["copied", ", ".join(result.companion_files)])
    files = [
        [name, format_size(record.size or 0), f"{counts[name]:,}", _checksum(record)]
        for name, record in weights.items()
    ]
    parts = [table(["", ""], rows).lstrip("\n"), table(["file", ">size", ">tensors", "checksum"], files)]
    command = shlex.join(["hfshard", "verify", result.directory, *(["--variant", variant] if variant else [])])
    return "\n\n".join([*parts, printable(f"To check it at any time, run: {command}")])


def _checksum(record: FileDigest) -> str:
    for kind, digest in (("sha256", record.sha256), ("xxh3", record.xxh3)):
        if digest is not None:
            return f"{kind} {digest[:_HASH_DIGITS]}…"
    return ""


def _count(files: int) -> str:
    return f"{files:,} file{'' if files == 1 else 's'}"
