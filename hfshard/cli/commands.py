"""The commands that look at a checkpoint: inspect, verify. Each prints, and returns the exit code."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from typing import Any, Final

from hfshard._util.text import format_size
from hfshard.checkpoint.verifier import Problem, VerifyReport
from hfshard.cli.output import (
    bar,
    checksum_text,
    count_of,
    print_json,
    print_message,
    print_text,
    printable,
    table,
)
from hfshard.errors import readable
from hfshard.signing.signer import SignedBy
from hfshard.verify import verify_checkpoint
from hfshard.viewing.inspection import Inspection, inspect_checkpoint
from hfshard.viewing.tensor_entry import TensorEntry

_LARGEST: Final = 5
"""Tensors that `inspect` shows without `--tensors`."""


def inspect(arguments: argparse.Namespace) -> int:
    """Show what a checkpoint consists of."""
    found = inspect_checkpoint(arguments.directory, variant=arguments.variant, key=arguments.key)
    if arguments.format == "json":
        print_json(found.as_json())
        return 0
    print_text(_headline(found))
    print_text("\n" + _files_table(found))
    print_text("\n" + _dtypes_table(found))
    shown = list(found.tensors) if arguments.tensors else found.largest(_LARGEST)
    print_text("\n" + _tensors_table("tensor" if arguments.tensors else "largest tensors", shown))
    if found.tied_names:
        print_text("\n" + table(["tied name", "stored as"], [list(pair) for pair in sorted(found.tied_names.items())]))
    if found.metadata:
        rows = [[key, _metadata_text(value)] for key, value in sorted(found.metadata.items())]
        print_text("\n" + table(["metadata", ""], rows))
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Check a checkpoint, and name everything that is wrong with it; 0 when it is whole, 1 when not."""
    report = verify_checkpoint(
        arguments.directory,
        variant=arguments.variant,
        level=arguments.level,
        public_key=_signed_by(arguments),
        progress=arguments.progress,
    )
    if arguments.format == "json" and report.checkpoints:
        shown = [_report_as_json(one, arguments) for one in report.checkpoints]
        whole = {"directory": report.directory, "ok": report.ok, "level": arguments.level, "checkpoints": shown}
        print_json(whole)
    elif arguments.format == "json":
        print_json(_report_as_json(report, arguments))
    for one in report.checkpoints or (report,):
        _print_report(one, arguments)
    return 0 if report.ok else 1


def _signed_by(arguments: argparse.Namespace) -> SignedBy | None:
    """Who must have signed, as the arguments say; None: nobody."""
    given = {
        "public_key": arguments.public_key,
        "certificate_chain": arguments.certificate_chain,
        "identity": arguments.identity,
        "oidc_issuer": arguments.oidc_issuer,
        "trust_config": arguments.trust_config,
        "use_staging": arguments.use_staging,
    }
    return SignedBy(**given) if any(given.values()) else None


def _report_as_json(report: VerifyReport, arguments: argparse.Namespace) -> dict[str, Any]:
    shown = asdict(report)
    del shown["checkpoints"]
    return {**shown, "ok": report.ok, "level": arguments.level}


def _print_report(report: VerifyReport, arguments: argparse.Namespace) -> None:
    if arguments.format != "json":
        print_problems(report.problems)
        shown = arguments.directory if os.path.isfile(arguments.directory) else report.directory
        print_text(printable(f"{shown}: {_verdict(report)}"))
    for warning in report.warnings:
        print_message(f"warning: {warning}")


def print_problems(problems: Sequence[Problem], word: str = "DAMAGED") -> None:
    """Print what is wrong, file by file, with the word for it."""
    for problem in problems:
        tensor = "" if problem.tensor is None else f", tensor {readable(problem.tensor)}"
        print_text(f"{word}  {printable(problem.file + tensor)}\n         {printable(problem.message)}")


def _headline(found: Inspection) -> str:
    shards = sum(1 for file in found.files if file.tensors is not None)
    rows = [
        ["checkpoint", found.directory],
        ["entry file", found.entry],
        *([["found under", found.key]] if found.key is not None else []),
        ["weights", f"{format_size(found.nbytes)} in {count_of(shards, 'file')}"],
        ["tensors", f"{count_of(len(found.tensors), 'tensor')}, {found.parameters:,} parameters"],
        ["checksums", "yes" if found.is_verifiable else "none: saved by another tool"],
        *(
            [["signature", f"{found.signature}, not checked: hfshard verify --public-key KEY"]]
            if found.signature
            else []
        ),
    ]
    return table(["", ""], rows).lstrip("\n")


def _files_table(found: Inspection) -> str:
    largest = max((file.nbytes for file in found.files), default=0)
    rows = [
        [
            file.name,
            format_size(file.nbytes),
            bar(file.nbytes, largest),
            "" if file.tensors is None else f"{file.tensors:,}",
            checksum_text(file.digest.sha256, file.digest.xxh3),
        ]
        for file in found.files
    ]
    return table(["file", ">size", "", ">tensors", "checksum"], rows)


def _dtypes_table(found: Inspection) -> str:
    rows = [
        [
            entry.dtype,
            f"{entry.tensors:,}",
            f"{entry.parameters:,}",
            format_size(entry.nbytes),
            bar(entry.nbytes, found.nbytes),
        ]
        for entry in found.dtypes
    ]
    return table(["dtype", ">tensors", ">parameters", ">size", ""], rows)


def _tensors_table(title: str, tensors: list[TensorEntry]) -> str:
    rows = [
        [
            tensor.name,
            tensor.dtype,
            "×".join(map(str, tensor.shape)) or "scalar",
            f"{prod(tensor.shape):,}",
            format_size(tensor.nbytes),
            tensor.file,
        ]
        for tensor in tensors
    ]
    return table([title, "dtype", "shape", ">parameters", ">size", "file"], rows)


def _metadata_text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _verdict(report: VerifyReport) -> str:
    if not report.ok:
        files = len({problem.file for problem in report.problems})
        return f"DAMAGED: {count_of(len(report.problems), 'problem')} in {count_of(files, 'file')}"
    whole = "whole" if report.signed_by is None else f"whole, and signed by {report.signed_by}"
    checked = f"{whole}: {count_of(len(report.files), 'file')}"
    if report.checked_bytes:
        return f"{checked}, {format_size(report.checked_bytes)} compared with their checksums"
    return f"{checked}, in structure; no bytes were compared with checksums"
