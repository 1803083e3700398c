"""The commands that rewrite a checkpoint: reshard, convert."""

from __future__ import annotations

import argparse
import shlex
from collections import Counter
from dataclasses import asdict
from typing import Any

from hfshard._util.text import format_size
from hfshard.checkpoint.locate import locate_checkpoint
from hfshard.cli.output import checksum_text, count_of, print_json, print_message, print_text, printable, table
from hfshard.errors import CheckpointNotFoundError, InvalidArgumentError
from hfshard.format.file_names import WeightNames
from hfshard.format.index import FileDigest
from hfshard.hub.resolve import CheckpointQuery
from hfshard.places.source import CheckpointSource
from hfshard.saving.resharding import ReshardResult, reshard_source
from hfshard.saving.save_request import SaveOptions


def reshard(arguments: argparse.Namespace) -> int:
    """Write a checkpoint in files of another size, and show them."""
    result = _rewrite(arguments, use_safetensors=None, low_disk=arguments.low_disk)
    return _print_result(result, arguments)


def convert(arguments: argparse.Namespace) -> int:
    """Write pickled weights as safetensors, and show the files."""
    try:
        result = _rewrite(arguments, use_safetensors=False, low_disk=False)
    except CheckpointNotFoundError as error:
        if _has_safetensors(arguments):
            raise InvalidArgumentError(
                f"'{arguments.source}' has no pickles to convert: its weights are safetensors. For files of another "
                f"size, run: hfshard reshard {arguments.source} {arguments.target}",
                path=arguments.source,
            ) from error
        raise
    return _print_result(result, arguments)


def _rewrite(arguments: argparse.Namespace, *, use_safetensors: bool | None, low_disk: bool) -> ReshardResult:
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
        arguments.target,
        options,
        dtype=arguments.dtype,
        low_disk=low_disk,
        key=arguments.key,
        follow_links=arguments.follow_links,
    )


def _has_safetensors(arguments: argparse.Namespace) -> bool:
    """Whether a directory or a store has weights that need no conversion; of a hub it is not known."""
    try:
        local = CheckpointSource(arguments.source, CheckpointQuery(subfolder=arguments.subfolder)).find_local()
        if local is None:
            return False
        if local.folder is not None:
            local.folder.look()
        place = local.directory if local.folder is None else local.folder
        locate_checkpoint(place, WeightNames(arguments.variant), use_safetensors=True)
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
            f"note: '{result.source}' has no checksums of its tensors: "
            "its structure was checked, its bytes could not be."
        )
    return 0


def _written_weights(result: ReshardResult) -> dict[str, FileDigest]:
    """The files of weights that were written, those that hold no tensor too, with what is recorded of them."""
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
        [name, format_size(digest.size or 0), f"{counts[name]:,}", checksum_text(digest.sha256, digest.xxh3)]
        for name, digest in weights.items()
    ]
    parts = [table(["", ""], rows).lstrip("\n"), table(["file", ">size", ">tensors", "checksum"], files)]
    command = shlex.join(["hfshard", "verify", result.directory, *(["--variant", variant] if variant else [])])
    return "\n\n".join([*parts, printable(f"To check it at any time, run: {command}")])
