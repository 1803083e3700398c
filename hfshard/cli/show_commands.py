"""The command that makes a page or a picture of one: show. It prints where that is, and returns the exit code."""

from __future__ import annotations

import argparse
import os
from typing import Final

from hfshard._util.text import format_size
from hfshard.cli.output import print_json, print_text, printable
from hfshard.viewing.show import show_checkpoint
from hfshard.viewing.stills import Still, parse_still_size

_NAME_BYTES: Final = 250
"""Of a file's name without ".html"; in a store, names have up to 1,024."""


def show(arguments: argparse.Namespace) -> int:
    """Write the page of a checkpoint, or, where only a picture is asked for, that alone."""
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
        still=Still(width=width, height=height, theme=arguments.png_theme),
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
        checkpoint = os.path.abspath(os.path.expanduser(checkpoint))  # of ".": the directory's own name
    name = checkpoint.rstrip("/").rpartition("/")[2].partition("?")[0]
    name = name.encode(errors="ignore")[:_NAME_BYTES].decode(errors="ignore")
    return f"{name or 'checkpoint'}.html"
