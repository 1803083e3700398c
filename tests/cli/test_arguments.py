"""How the command line is parsed: groups in the help, checked values, rejected arguments without their secrets."""

from __future__ import annotations

import argparse

import pytest

from hfshard.cli.arguments import Commands, make_parser, shard_size


def rejected(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Parse arguments that are bad usage, and return the last line of stderr."""
    with pytest.raises(SystemExit) as raised:
        make_parser().parse_args(arguments)
    assert raised.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_commands_are_listed_by_group_in_columns_of_the_longest() -> None:
    commands = Commands(argparse.ArgumentParser(prog="program"))
    first = commands.group("look")
    commands.group("check").add_parser("b", help="third")
    first.add_parser("z", help="first")
    first.add_parser("longer", help="second")

    assert commands.show() == "look:\n  z       first\n  longer  second\n\ncheck:\n  b       third"


@pytest.mark.parametrize(("text", "expected"), [("1000", 1000), ("007", 7), ("5GB", "5GB"), ("1.5 gib", "1.5 gib")])
def test_a_size_of_digits_alone_is_bytes(text: str, expected: int | str) -> None:
    assert shard_size(text) == expected


@pytest.mark.parametrize("text", ["0", "-1", "5 apples", "", "\u0665"])
def test_a_size_that_no_file_can_have_is_bad_usage(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"^Invalid size "):
        shard_size(text)


def test_a_part_is_split_at_the_first_equals_sign(capsys: pytest.CaptureFixture[str]) -> None:
    parsed = make_parser().parse_args(["convert", "a", "b", "--part", "model=ema=x", "--part", "optimizer=optim.0"])
    assert parsed.part == [("model", "ema=x"), ("optimizer", "optim.0")]

    for text in ("model", "=ema", "model="):
        shown = rejected(capsys, "convert", "a", "b", "--part", text)
        assert shown == f"hfshard convert: error: argument --part: '{text}' is not NAME=KEY"


def test_a_rejected_argument_is_shown_without_its_password_and_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = rejected(capsys, "inspect", "here", "https://me:hunter2@host/x?sig=abc", "\x1b[2J")

    assert shown == r"hfshard: error: unrecognized arguments: https://host/x?… \x1b[2J"


def test_what_is_signed_with_is_exactly_one_of_key_and_sigstore(capsys: pytest.CaptureFixture[str]) -> None:
    assert make_parser().parse_args(["sign", "here", "--private-key", "k.pem"]).private_key == "k.pem"

    assert "one of the arguments --private-key --sigstore is required" in rejected(capsys, "sign", "here")
    both = rejected(capsys, "sign", "here", "--private-key", "k.pem", "--sigstore")
    assert "argument --sigstore: not allowed with argument --private-key" in both


def test_a_bar_and_private_are_left_open_unless_they_are_asked_for() -> None:
    parser = make_parser()

    plain = parser.parse_args(["push", "here", "org/name"])
    asked = parser.parse_args(["push", "here", "org/name", "--no-progress", "--private"])

    assert (plain.progress, plain.private) == (None, None)
    assert (asked.progress, asked.private) == (False, True)


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
