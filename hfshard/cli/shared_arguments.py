"""Arguments that several commands have, and the groups in which the help lists the commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Final

from hfshard._util.arguments import parse_size

# The commands of `hfshard` in groups, and the help that lists them.


_GAP: Final = 2
"""Spaces before a command, and between the longest one and its line."""


class Commands:
    """The commands of a parser, in groups that its help shows in the order of their creation."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        # argparse would list all commands together below "positional arguments": the groups replace that list.
        self._parsers: Any = parser.add_subparsers(
            dest="command", metavar="COMMAND", required=True, prog=parser.prog, help=argparse.SUPPRESS
        )
        self._groups: list[CommandGroup] = []

    def group(self, title: str) -> CommandGroup:
        """Begin a group; commands are added to it."""
        group = CommandGroup(title, self._parsers)
        self._groups.append(group)
        return group

    def show(self) -> str:
        """List every command with its line, group by group."""
        width = max(len(name) for group in self._groups for name in group.lines)
        return "\n\n".join(group.show(width) for group in self._groups)


class CommandGroup:
    """Commands that the help lists together."""

    def __init__(self, title: str, parsers: Any) -> None:
        self._title = title
        self._parsers = parsers
        self.lines: dict[str, str] = {}
        """Command -> its line in the help, in the order in which they were added."""

    def add_parser(
        self, name: str, run: Callable[[argparse.Namespace], int], *, help: str, **options: Any
    ) -> argparse.ArgumentParser:
        """Add a command.

        Args:
            name: The command.
            run: Runs it with the parsed arguments, and returns the exit code. It imports what it needs by itself, so
                that parsing and help load no torch.
            help: Its line in the help of `hfshard`.
            options: For its own parser.
        """
        self.lines[name] = help
        parser: argparse.ArgumentParser = self._parsers.add_parser(name, **options)
        parser.set_defaults(run=run, parser=parser)
        return parser

    def show(self, width: int) -> str:
        """Return the title, and a line for each command, with its name in `width` columns."""
        gap = " " * _GAP
        lines = [f"{gap}{name:{width}}{gap}{line}" for name, line in self.lines.items()]
        return "\n".join([f"{self._title}:", *lines])


# Arguments that several commands have.


REPO = "org/name on the Hub, or a path or file:// URL of a directory that serves as a hub"
STORE = "s3://bucket/prefix, gs://..., az://... or hf://buckets/org/name/prefix"
OR_STORE = f"; or in a store: {STORE}"


def add_directory(parser: argparse.ArgumentParser, text: str, *, takes_address: bool = True) -> None:
    """Add a directory as an argument."""
    parser.set_defaults(needs_directory=True, takes_file=False, takes_address=takes_address)
    parser.add_argument("directory", metavar="DIR", help=f"{text}{OR_STORE if takes_address else ''}")


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add a directory or one file of weights as an argument."""
    parser.set_defaults(needs_directory=True, takes_file=True, takes_address=True)
    parser.add_argument(
        "directory", metavar="PATH", help=f"the checkpoint's directory, or one file of weights{OR_STORE}"
    )


def add_key(parser: argparse.ArgumentParser) -> None:
    """Add `--key`, the place of the weights in a file of torch.save."""
    parser.add_argument(
        "--key", help="key of the weights in a torch.save file that contains several, such as model_ema"
    )


def add_variant(parser: argparse.ArgumentParser) -> None:
    """Add `--variant`."""
    parser.add_argument("--variant", help='the variant of the weights, for example "fp16"')


def add_verify_level(parser: argparse.ArgumentParser, text: str) -> None:
    """Add `--verify`, the level of checks of a load."""
    add_choice(parser, "--verify", ("none", "structure", "full"), "structure", text)


def add_checksum(parser: argparse.ArgumentParser, text: str) -> None:
    """Add `--checksum` of the files that a save writes."""
    add_choice(parser, "--checksum", ("sha256", "xxh3", "none"), "sha256", text)


def add_choice(parser: argparse.ArgumentParser, option: str, choices: tuple[str, ...], default: str, text: str) -> None:
    """Add an option that has one of several values, and say which it has if it is not given."""
    parser.add_argument(option, choices=choices, default=default, help=f"{text} (default: %(default)s)")


def add_format(parser: argparse.ArgumentParser) -> None:
    """Add `--format`, text or JSON."""
    parser.add_argument("--format", choices=("text", "json"), default="text", help="json: one document on stdout")


def add_token(parser: argparse.ArgumentParser) -> None:
    """Add `--token` for the Hub."""
    parser.add_argument("--token", help="token for the Hub (default: HF_TOKEN, or the saved one)")


def add_no_progress(parser: argparse.ArgumentParser) -> None:
    """Add `--no-progress`."""
    parser.add_argument(
        "--no-progress",
        dest="progress",
        action="store_const",
        const=False,
        help="show no progress bar on the terminal",
    )


def shard_size(text: str) -> int | str:
    """Check a size like `max_shard_size`; digits alone are bytes."""
    try:
        size = int(text) if text.isascii() and text.isdigit() else text
        parse_size(size)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return size


def add_best(parser: argparse.ArgumentParser, mark: str) -> None:
    """Add `--best` and `--metric-mode`, which choose a checkpoint of a run."""
    parser.add_argument("--best", metavar="METRIC", help=f"{mark} the checkpoint with the best value of this metric")
    add_choice(parser, "--metric-mode", ("min", "max"), "min", "which value is best")
