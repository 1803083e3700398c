"""Arguments of the commands that show what is there."""

from __future__ import annotations

import argparse

from hfshard.cli.arguments.groups import CommandGroup
from hfshard.cli.arguments.shared import (
    OR_STORE,
    REPO,
    STORE,
    add_checkpoint,
    add_directory,
    add_format,
    add_key,
    add_no_progress,
    add_token,
    add_variant,
    shard_size,
)


def add_inspect(commands: CommandGroup) -> None:
    """Add `inspect`."""
    inspect = commands.add_parser(
        "inspect",
        help="shards, dtypes, the largest tensors, tied names, metadata",
        description="Show what a checkpoint consists of, from its index and headers; no tensor is read.",
    )
    add_checkpoint(inspect)
    add_variant(inspect)
    add_key(inspect)
    add_format(inspect)
    inspect.add_argument("--tensors", action="store_true", help="list every tensor, not only the largest")


def add_show(commands: CommandGroup) -> None:
    """Add `show`."""
    show = commands.add_parser(
        "show",
        help="a page to look at: a map of the modules, files, search",
        description="Write one HTML file that shows what a checkpoint consists of: modules by bytes, files, dtypes, "
        "ties, the largest tensors, metadata, search by name. Of a training run, show its checkpoints beside each "
        "other: bytes, metrics, what is damaged. It needs no network and nothing beside it.",
    )
    show.set_defaults(needs_directory=False)
    show.add_argument("checkpoint", metavar="CHECKPOINT", help=f"a directory, or one file of weights; {REPO}{OR_STORE}")
    show.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="the page (default: the checkpoint's name with .html, in this directory; with --png: none)",
    )
    add_variant(show)
    add_key(show)
    show.add_argument("--revision", help="revision on a hub: branch, tag, commit or refs/pr/N (default: main)")
    show.add_argument("--subfolder", default="", help="folder of CHECKPOINT")
    show.add_argument(
        "--max-shard-size", type=shard_size, metavar="SIZE", help="measure the files by this size, not by the largest"
    )
    show.add_argument("--values", action="store_true", help="read the tensors, and show what their numbers are like")
    show.add_argument("--png", metavar="FILE", help="draw a picture of the page by an installed Chromium; with -o both")
    show.add_argument("--png-size", default="1280x800", metavar="WxH", help="its pixels (default: %(default)s)")
    show.add_argument(
        "--png-theme", choices=("light", "dark"), default="light", help="its theme (default: %(default)s)"
    )
    show.add_argument("--against", metavar="BASE", help="show what differs from another checkpoint")
    _add_best(show, "of a run: mark")
    add_token(show)
    add_format(show)
    add_no_progress(show)


def add_diff(commands: CommandGroup) -> None:
    """Add `diff`."""
    diff = commands.add_parser(
        "diff",
        help="what differs between two checkpoints, and where",
        description="Show which tensors of two checkpoints are the same, changed, cast, reshaped, renamed or in one "
        "only, however they are sharded. What has digests in both is not read. Exit 0: nothing differs, 1: something "
        "does, 2: bad usage, or one of them is damaged or can't be read.",
    )
    diff.set_defaults(needs_directory=False, exit_failed=2)
    place = f"a directory, one file of weights, a run or a checkpoint of it; {REPO}, also with @revision; or {STORE}"
    diff.add_argument("a", metavar="A", help=place)
    diff.add_argument("b", metavar="B", help="the same")
    diff.add_argument(
        "--values", action="store_true", help="also by how much: what changed is read, block by block, and measured"
    )
    diff.add_argument("--all", action="store_true", help="list every tensor that differs, with its whole name")
    diff.add_argument(
        "--verify",
        choices=("none", "structure", "full"),
        default="structure",
        help="full: believe no digest, and read and compare every byte of both (default: %(default)s)",
    )
    add_variant(diff)
    diff.add_argument(
        "--key",
        action="append",
        help="where the weights lie in files of torch.save that hold several, as model_ema; twice: in A, in B",
    )
    diff.add_argument("--subfolder", action="append", help="folder of both; twice: of A, of B")
    add_token(diff)
    add_format(diff)
    add_no_progress(diff)


def add_checkpoints(commands: CommandGroup) -> None:
    """Add `checkpoints`."""
    checkpoints = commands.add_parser(
        "checkpoints",
        help="the checkpoints of a training run, and what is wrong with them",
        description="Show the checkpoints of a training run in the order in which they were saved, and what is wrong "
        "with them. Exit 0: none is damaged or unfinished, 1: one is, or there is none, 2: bad usage.",
    )
    add_directory(checkpoints, "the run's directory")
    checkpoints.add_argument("--verify", action="store_true", help="compare every byte with its checksum")
    _add_best(checkpoints, "mark")
    add_format(checkpoints)
    add_no_progress(checkpoints)


def _add_best(parser: argparse.ArgumentParser, mark: str) -> None:
    parser.add_argument("--best", metavar="METRIC", help=f"{mark} the one with the best value of this metric")
    parser.add_argument(
        "--metric-mode", choices=("min", "max"), default="min", help="which value is best (default: %(default)s)"
    )
