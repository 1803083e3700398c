"""The commands that show, check or sign a checkpoint. Each prints, and returns the exit code."""

from __future__ import annotations

import argparse
import getpass
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from hfshard._util.text import count_of, format_size, printable
from hfshard.cli import shared_arguments
from hfshard.cli.output import bar, checksum_text, fitted_table, print_json, print_message, print_text, table
from hfshard.errors import InvalidArgumentError, printable_message
from hfshard.signing.signer import SignedBy

if TYPE_CHECKING:
    from hfshard.checkpoint.reports import Problem, VerifyReport
    from hfshard.viewing.results import Inspection, TensorEntry

_MOST_PROBLEMS: Final = 5
"""Problems of a file that are shown: two swapped shards have one for each of their tensors."""
_LARGEST: Final = 5
"""Tensors that `inspect` shows without `--tensors`."""


def add_inspect(commands: shared_arguments.CommandGroup) -> None:
    """Add `inspect`."""
    parser = commands.add_parser(
        "inspect",
        inspect,
        help="show shards, dtypes, the largest tensors, tied names, metadata",
        description="Show a checkpoint's contents from its index and headers, without reading tensors.",
    )
    shared_arguments.add_checkpoint(parser)
    shared_arguments.add_variant(parser)
    shared_arguments.add_key(parser)
    shared_arguments.add_format(parser)
    parser.add_argument("--tensors", action="store_true", help="list every tensor, not only the largest")


def inspect(arguments: argparse.Namespace) -> int:
    """Show what a checkpoint consists of."""
    from hfshard.viewing.inspection import inspect_checkpoint

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
        rows = [[key, one if isinstance(one, str) else repr(one)] for key, one in sorted(found.metadata.items())]
        print_text("\n" + table(["metadata", ""], rows))
    return 0


def add_verify(commands: shared_arguments.CommandGroup) -> None:
    """Add `verify`."""
    parser = commands.add_parser(
        "verify",
        verify,
        help="check every file of a checkpoint or training run",
        description="Check every file of a checkpoint; of a training checkpoint, also the optimizer's and all others; "
        "of a run, all its checkpoints. Exit 0: intact, 1: damaged, 2: bad usage.",
    )
    shared_arguments.add_checkpoint(parser)
    shared_arguments.add_variant(parser)
    shared_arguments.add_format(parser)
    parser.add_argument(
        "--level",
        choices=("full", "structure"),
        default="full",
        help="full: every byte against its checksum (default); structure: what can be checked without reading tensors",
    )
    signed = parser.add_argument_group(
        "signature", "Require that every file was signed (model.sig, see `hfshard sign`) by one of these."
    )
    signed.add_argument("--public-key", metavar="FILE", help="the signer's public key: elliptic curve, PEM")
    signed.add_argument(
        "--certificate-chain",
        metavar="FILE",
        action="append",
        default=[],
        help="root certificate (PEM) that the signer's certificate must chain to; repeatable",
    )
    signed.add_argument("--identity", help="the signer's Sigstore identity; with --oidc-issuer")
    signed.add_argument("--oidc-issuer", metavar="URL", help="the issuer that vouches for the identity")
    signed.add_argument("--use-staging", action="store_true", help="use Sigstore's staging instance")
    signed.add_argument("--trust-config", metavar="FILE", help="JSON file with the keys of another Sigstore")
    shared_arguments.add_no_progress(parser)


def verify(arguments: argparse.Namespace) -> int:
    """Check a checkpoint, and print everything that is wrong with it; return 0 if it is intact, else 1."""
    from hfshard.verify import verify_checkpoint

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
    """Return the required signer from the arguments; None if no signature is required."""
    names = ("public_key", "certificate_chain", "identity", "oidc_issuer", "trust_config", "use_staging")
    given = {name: getattr(arguments, name) for name in names}
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
    """Print the problems, file by file, each after the word; of many in one file the first ones, and their number."""
    for file, found in groupby(problems, key=lambda problem: problem.file):
        of_file = list(found)
        for problem in of_file[:_MOST_PROBLEMS]:
            tensor = "" if problem.tensor is None else f", tensor {printable_message(problem.tensor)}"
            print_text(f"{word}  {printable(file + tensor)}\n         {printable(problem.message)}")
        if len(of_file) > _MOST_PROBLEMS:
            more = count_of(len(of_file) - _MOST_PROBLEMS, "more problem")
            print_text(f"         {more} in this file. To list all, pass --format json.")


def _headline(found: Inspection) -> str:
    rows = [
        ["checkpoint", found.directory],
        *([["model", ", ".join(found.model.describe())]] if found.model is not None else []),
        ["entry file", found.entry],
        *([["saved by", found.framework]] if found.framework is not None else []),
        *([["found under", found.key]] if found.key is not None else []),
        ["weights", f"{format_size(found.nbytes)} in {count_of(len(found.weights_files), 'file')}"],
        ["tensors", f"{count_of(len(found.tensors), 'tensor')}, {found.parameters:,} parameters"],
        ["checksums", "yes" if found.is_verifiable else "none: saved by another tool"],
    ]
    if found.signature:
        rows.append(["signature", f"{found.signature}, not checked: hfshard verify --public-key KEY"])
    return table(["", ""], rows).lstrip("\n")


def _files_table(found: Inspection) -> str:
    largest = found.largest_file_bytes
    rows = [
        [
            file.name,
            format_size(file.nbytes),
            bar(file.nbytes, largest),
            "" if file.tensors is None else f"{file.tensors:,}",
            checksum_text(file.digest),
        ]
        for file in found.files
    ]
    return fitted_table(["file", ">size", "", ">tensors", "checksum"], rows, [""])


def _dtypes_table(found: Inspection) -> str:
    rows = [
        [one.dtype, f"{one.tensors:,}", f"{one.parameters:,}", format_size(one.nbytes), bar(one.nbytes, found.nbytes)]
        for one in found.dtypes
    ]
    return fitted_table(["dtype", ">tensors", ">parameters", ">size", ""], rows, [""])


def _tensors_table(title: str, tensors: list[TensorEntry]) -> str:
    rows = [
        [one.name, one.dtype, one.shape_text(), f"{one.parameters:,}", format_size(one.nbytes), one.file]
        for one in tensors
    ]
    titles = [title, "dtype", "shape", ">parameters", ">size", "file"]
    return fitted_table(titles, rows, [">parameters", "file"])  # the shape says the first one, too


def _verdict(report: VerifyReport) -> str:
    if not report.ok:
        files = len({problem.file for problem in report.problems})
        return f"DAMAGED: {count_of(len(report.problems), 'problem')} in {count_of(files, 'file')}"
    whole = "intact" if report.signed_by is None else f"intact, and signed by {report.signed_by}"
    checked = f"{whole}: {count_of(len(report.files), 'file')}"
    if report.checked_bytes:
        return f"{checked}, {format_size(report.checked_bytes)} compared with their checksums"
    return f"{checked}, structure only; no bytes were compared with checksums"


# `show`: writes a page or a picture of a checkpoint, prints its path, and returns the exit code.


_NAME_BYTES: Final = 250
"""Maximum for a file's name without ".html"; in a store, names have up to 1,024."""


def add_show(commands: shared_arguments.CommandGroup) -> None:
    """Add `show`."""
    parser = commands.add_parser(
        "show",
        show,
        help="write an HTML page: a map of the modules, files, search",
        description="Write one HTML file that shows a checkpoint's contents: modules by bytes, files, dtypes, ties, "
        "the largest tensors, metadata, search by name. Of a training run, show its checkpoints side by side: bytes, "
        "metrics, what is damaged. The file needs no network and no other files.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help=f"a directory, or one file of weights; {shared_arguments.REPO}{shared_arguments.OR_STORE}",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="the page (default: the checkpoint's name with .html, in this directory; with --png: none)",
    )
    shared_arguments.add_variant(parser)
    shared_arguments.add_key(parser)
    parser.add_argument("--revision", help="revision on a hub: branch, tag, commit or refs/pr/N (default: main)")
    parser.add_argument("--subfolder", default="", help="folder in CHECKPOINT")
    parser.add_argument(
        "--max-shard-size",
        type=shared_arguments.shard_size,
        metavar="SIZE",
        help="measure the files against this size, not the largest file",
    )
    parser.add_argument(
        "--values", action="store_true", help="read the tensors, and show the distribution of their values"
    )
    parser.add_argument(
        "--png",
        metavar="FILE",
        help="write a screenshot of the page, drawn by an installed Chromium; with -o, write both",
    )
    parser.add_argument(
        "--png-size", default="1200x630", metavar="WxH", help="screenshot size in pixels (default: %(default)s)"
    )
    shared_arguments.add_choice(parser, "--png-theme", ("light", "dark"), "light", "screenshot theme")
    parser.add_argument(
        "--paths", action="store_true", help="show absolute paths (default: the names of folders, as pages are shared)"
    )
    parser.add_argument("--against", metavar="BASE", help="show the differences from another checkpoint")
    parser.add_argument(
        "--diff", action="store_true", help="for a run: also what changed from each checkpoint to the next, by digests"
    )
    shared_arguments.add_best(parser, "for a run: mark")
    shared_arguments.add_token(parser)
    shared_arguments.add_format(parser)
    shared_arguments.add_no_progress(parser)


def show(arguments: argparse.Namespace) -> int:
    """Write the page of a checkpoint; if only a picture is requested, write that alone."""
    from hfshard.viewing.screenshot import ScreenshotOptions, parse_still_size
    from hfshard.viewing.show import show_checkpoint

    output = arguments.output
    is_picture = output is None and arguments.png is not None
    if output is None and not is_picture:
        output = default_output(arguments.checkpoint)
    width, height = parse_still_size(arguments.png_size)
    path = show_checkpoint(
        arguments.checkpoint,
        output,
        variant=arguments.variant,
        key=arguments.key,
        subfolder=arguments.subfolder,
        revision=arguments.revision,
        token=arguments.token,
        max_shard_size=arguments.max_shard_size,
        best=arguments.best,
        metric_mode=arguments.metric_mode,
        against=arguments.against,
        values=arguments.values,
        png=arguments.png,
        diff=arguments.diff,
        still=ScreenshotOptions(width=width, height=height, theme=arguments.png_theme),
        paths=arguments.paths,
        progress=arguments.progress,
    )
    nbytes = os.path.getsize(path)
    if arguments.format == "json":
        print_json({"png" if is_picture else "page": path, "size": nbytes})
    else:
        print_text(printable(f"{path}: {format_size(nbytes)}"))
    return 0


def default_output(checkpoint: str) -> str:
    """Name the page after the last part of a path, an address or a name, in the working directory.

    Example:
        >>> default_output("s3://bucket/bert/")
        'bert.html'
    """
    if "://" not in checkpoint:
        checkpoint = os.path.abspath(checkpoint)  # of ".": the directory's own name
    name = checkpoint.rstrip("/").rpartition("/")[2].partition("?")[0]
    name = name.encode(errors="ignore")[:_NAME_BYTES].decode(errors="ignore")
    return f"{name or 'checkpoint'}.html"


# `sign`: writes a signature, prints what was read, and returns the exit code.


PASSWORD_VARIABLE: Final = "HFSHARD_KEY_PASSWORD"
"""Environment variable with the password of a private key: every user of a machine can read its command lines."""

_ENCRYPTED: Final = b"ENCRYPTED"
"""Text in the PEM of a key that has a password."""


def add_sign(commands: shared_arguments.CommandGroup) -> None:
    """Add `sign`."""
    parser = commands.add_parser(
        "sign",
        sign,
        help="sign every file of a checkpoint, as OpenSSF Model Signing does",
        description="Sign every file of a directory: write model.sig next to them, which `hfshard verify` and "
        "`model_signing verify` check. Shards that hfshard saved are not read again. The password of a key is read "
        "from HFSHARD_KEY_PASSWORD, or asked for.",
    )
    shared_arguments.add_directory(parser, "the checkpoint's directory", takes_address=False)
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--private-key", metavar="FILE", help="an elliptic curve key (P-256, P-384, P-521), PEM")
    who.add_argument("--sigstore", action="store_true", help="sign with a Sigstore identity; asks in the browser")
    parser.add_argument("--signing-certificate", metavar="FILE", help="the key's certificate, PEM")
    parser.add_argument(
        "--certificate-chain",
        metavar="FILE",
        action="append",
        default=[],
        help="an intermediate certificate between that one and the root, PEM; repeatable",
    )
    parser.add_argument(
        "--use-ambient-credentials", action="store_true", help="with --sigstore: use this workflow's identity, as in CI"
    )
    parser.add_argument("--use-staging", action="store_true", help="with --sigstore: use Sigstore's staging instance")
    parser.add_argument(
        "--trust-config", metavar="FILE", help="with --sigstore: JSON file with the keys of another Sigstore"
    )
    text = "full: also read the shards, and compare every byte before signing"
    shared_arguments.add_choice(parser, "--verify", ("structure", "full"), "structure", text)
    parser.add_argument(
        "--card-picture", action="store_true", help="first show the checkpoint in README.md, as `hfshard push` does"
    )
    shared_arguments.add_format(parser)
    shared_arguments.add_no_progress(parser)


def sign(arguments: argparse.Namespace) -> int:
    """Sign a checkpoint, and print how much was read for it."""
    from hfshard.signing.sign import sign_checkpoint

    result = sign_checkpoint(
        arguments.directory,
        private_key=arguments.private_key,
        password=_password(arguments.private_key),
        signing_certificate=arguments.signing_certificate,
        certificate_chain=arguments.certificate_chain,
        sigstore=_sigstore(arguments),
        verify=arguments.verify,
        card_picture=arguments.card_picture,
        progress=arguments.progress,
    )
    if arguments.format == "json":
        print_json(asdict(result))
        return 0
    recorded = f"; {format_size(result.recorded_bytes)} covered by the save's sha256" if result.recorded_bytes else ""
    files = count_of(len(result.files), "file")
    print_text(printable(f"{result.signature}: {files} signed; {format_size(result.read_bytes)} read{recorded}"))
    return 0


def _sigstore(arguments: argparse.Namespace) -> dict[str, Any] | None:
    given = {name: getattr(arguments, name) for name in ("use_ambient_credentials", "use_staging", "trust_config")}
    if arguments.sigstore:
        return given
    for name, value in given.items():
        if value:
            raise InvalidArgumentError(f"--{name.replace('_', '-')} requires --sigstore.")
    return None


def _password(private_key: str | None) -> str | None:
    """Return the password of a key that has one, from the environment or a question on the terminal."""
    if private_key is None or not os.path.isfile(private_key):
        return None
    with open(private_key, "rb") as file:
        if _ENCRYPTED not in file.read():
            return None
    password = os.environ.get(PASSWORD_VARIABLE)
    if password is None and sys.stdin.isatty():
        password = getpass.getpass(f"Password for {printable(private_key)}: ")
    if password is None:
        raise InvalidArgumentError(
            f"'{private_key}' has a password. Set the environment variable {PASSWORD_VARIABLE}, or run this on a "
            "terminal.",
            path=private_key,
        )
    return password
