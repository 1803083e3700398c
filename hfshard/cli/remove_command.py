"""The command that removes checkpoints: it lists what goes and what stays, and asks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Final

from hfshard._util.addresses import is_address
from hfshard._util.text import format_size
from hfshard.cli.output import count_of, is_confirmed, print_json, print_message, print_text, printable, table
from hfshard.errors import InvalidArgumentError
from hfshard.removal.removal_plan import RemovalReport
from hfshard.remove import plan_removal

_SHOWN: Final = 30
"""Files in a list; JSON has all of them."""


def remove(arguments: argparse.Namespace) -> int:
    """List what goes and what stays, ask, and remove it; 0 when it is done, 1 when the user said no."""
    is_asked = not (arguments.yes or arguments.dry_run)
    if is_asked and (arguments.format == "json" or not sys.stdin.isatty()):
        raise InvalidArgumentError(
            "hfshard remove asks on a terminal before it removes anything. Pass --yes to remove it without a question, "
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
    care = " Nothing may save there meanwhile." if is_address(report.place) else ""
    question = "\n" + printable(f"Remove {_describe(report)} from '{report.place}'?{care} [y/N] ")
    return is_confirmed(question)


def _describe(report: RemovalReport) -> str:
    return f"{count_of(len(report.removed), 'file')} ({format_size(report.size)})"
