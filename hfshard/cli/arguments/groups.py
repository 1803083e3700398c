"""The commands of `hfshard` in groups, and the help that lists them."""

from __future__ import annotations

import argparse
from typing import Any, Final

_GAP: Final = 2
"""Spaces before a command, and between the longest one and its line."""


class Commands:
    """The commands of a parser, in groups that its help shows in the order in which they were made."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        # Its own list of commands would stand below "positional arguments", in one piece: the groups take its place.
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
    """Commands that stand together in the help."""

    def __init__(self, title: str, parsers: Any) -> None:
        self._title = title
        self._parsers = parsers
        self.lines: dict[str, str] = {}
        """Command -> what the help says of it, in the order in which they were added."""

    def add_parser(self, name: str, *, help: str, **options: Any) -> argparse.ArgumentParser:
        """Add a command.

        Args:
            name: The command.
            help: Its line in the help of `hfshard`.
            options: For its own parser.
        """
        self.lines[name] = help
        parser: argparse.ArgumentParser = self._parsers.add_parser(name, **options)
        return parser

    def show(self, width: int) -> str:
        """Write the title, and a line for each command, its name in so many columns."""
        gap = " " * _GAP
        lines = [f"{gap}{name:{width}}{gap}{line}" for name, line in self.lines.items()]
        return "\n".join([f"{self._title}:", *lines])
