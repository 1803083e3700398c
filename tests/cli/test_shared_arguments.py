"""Arguments of several commands: checked sizes, the places a command takes, and the groups of the help."""

from __future__ import annotations

import argparse

import pytest

from hfshard.cli.main import make_parser
from hfshard.cli.shared_arguments import Commands, shard_size


def no_command(arguments: argparse.Namespace) -> int:
    raise AssertionError(arguments)


def test_commands_are_listed_by_group_in_columns_of_the_longest() -> None:
    commands = Commands(argparse.ArgumentParser(prog="program"))
    first = commands.group("look")
    commands.group("check").add_parser("b", no_command, help="third")
    first.add_parser("z", no_command, help="first")
    first.add_parser("longer", no_command, help="second")

    assert commands.show() == "look:\n  z       first\n  longer  second\n\ncheck:\n  b       third"


@pytest.mark.parametrize(("text", "expected"), [("1000", 1000), ("007", 7), ("5GB", "5GB"), ("1.5 gib", "1.5 gib")])
def test_a_size_of_digits_alone_is_bytes(text: str, expected: int | str) -> None:
    assert shard_size(text) == expected


@pytest.mark.parametrize("text", ["0", "-1", "5 apples", "", "\u0665"])
def test_a_size_that_no_file_can_have_is_bad_usage(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"^Invalid size "):
        shard_size(text)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["inspect", "x"], (True, True, True)),
        (["push", "x", "org/name"], (True, False, True)),
        (["sign", "x", "--sigstore"], (True, False, False)),
        (["revisions", "x"], (True, False, False)),
    ],
)
def test_each_command_says_which_places_it_takes(arguments: list[str], expected: tuple[bool, bool, bool]) -> None:
    parsed = make_parser().parse_args(arguments)

    assert (parsed.needs_directory, parsed.takes_file, parsed.takes_address) == expected
