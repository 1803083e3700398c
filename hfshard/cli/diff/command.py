"""The command that compares two checkpoints: it prints, and returns the exit code."""

from __future__ import annotations

import argparse
import shutil
import sys
from typing import Any

from hfshard._util.arguments import absolute_path
from hfshard._util.text import format_size
from hfshard.cli.diff.as_json import diff_as_json
from hfshard.cli.diff.heat_map import HeatMapStyle, heat_maps
from hfshard.cli.diff.tables import (
    modules_table,
    not_finite_lines,
    places_table,
    renames_table,
    tensors_table,
    zero_before_lines,
)
from hfshard.cli.output import has_colors, print_json, print_text, printable
from hfshard.viewing.diff.checkpoints import diff_checkpoints
from hfshard.viewing.diff.headline import headline
from hfshard.viewing.diff.report import CheckpointDiff

_EXIT_SAME = 0
_EXIT_DIFFERENT = 1


def diff(arguments: argparse.Namespace) -> int:
    """Show what differs between two checkpoints; 0 when nothing does, 1 when something does."""
    found = diff_checkpoints(
        arguments.a,
        arguments.b,
        values=arguments.values,
        variant=arguments.variant,
        key=_one_or_each(arguments.key),
        subfolder=_one_or_each(arguments.subfolder) or "",
        verify=arguments.verify,
        token=arguments.token,
        progress=arguments.progress,
    )
    if arguments.format == "json":
        print_json(diff_as_json(found))
    else:
        places = (_shown_place(arguments.a, found.a), _shown_place(arguments.b, found.b))
        print_diff(found, places, lists_all=arguments.all)
    return _EXIT_SAME if found.is_same else _EXIT_DIFFERENT


def print_diff(found: CheckpointDiff, places: tuple[str, str], *, lists_all: bool) -> None:
    """Print a report as text: one sentence first, then more and more of it.

    Args:
        found: The report.
        places: Both checkpoints, as they are shown.
        lists_all: Whether to list every tensor that differs.
    """
    columns = shutil.get_terminal_size().columns
    print_text(printable(headline(found)))
    print_text("\n" + places_table(found, *places))
    print_text(f"\n{_how_it_was_told(found)}")
    for line in (*not_finite_lines(found), *zero_before_lines(found)):
        print_text(line)
    if all(tensor.kind == "same" for tensor in found.tensors):
        return
    renames = renames_table(found)
    if renames:
        print_text("\n" + renames)
    print_text("\n" + (tensors_table(found) if lists_all else modules_table(found, columns)))
    has_shades = sys.stdout.isatty() and sys.stdout.encoding.lower().startswith("utf")
    for drawn in heat_maps(found, HeatMapStyle(columns, has_shades, has_colors(sys.stdout))):
        print_text("\n" + drawn)


def _one_or_each(values: list[str] | None) -> Any:
    """What an option was given: once for both checkpoints, or for each."""
    return None if not values else values[0] if len(values) == 1 else tuple(values)


def _shown_place(given: str, found: str) -> str:
    """A place as it was typed, unless it led to another one, as a run does to its latest checkpoint."""
    return given if absolute_path(given) == found else found


def _how_it_was_told(found: CheckpointDiff) -> str:
    if found.read_bytes == 0:
        return "Told from names and digests; no tensor was read."
    return f"{format_size(found.read_bytes)} of tensors were read."
