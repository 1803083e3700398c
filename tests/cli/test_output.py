"""Tables, bars and escapes, character by character."""

from __future__ import annotations

import io

import pytest

from hfshard.cli.output import bar, elide_middle, has_colors, table
from tests.cli.conftest import Terminal


def test_table_aligns_columns_and_leaves_no_trailing_blanks() -> None:
    rows = [["model-00001-of-00002.safetensors", "46.9 MB", "1"], ["b", "1 B", ""]]
    assert table(["file", ">size", ">tensors"], rows) == (
        "file                                 size  tensors\n"
        "model-00001-of-00002.safetensors  46.9 MB        1\n"
        "b                                     1 B"
    )


def test_table_without_rows_is_its_titles() -> None:
    assert table(["file", ">size"], []) == "file  size"


def test_table_escapes_what_would_move_the_cursor() -> None:
    assert table(["name"], [["a\x1b[2Jb\nc"]]) == "name\na\\x1b[2Jb\\nc"


@pytest.mark.parametrize(
    ("text", "most", "shown"),
    [("abcdef", 6, "abcdef"), ("abcdef", 5, "ab…ef"), ("abcdef", 4, "a…ef"), ("abcdef", 1, "…")],
)
def test_long_text_loses_its_middle(text: str, most: int, shown: str) -> None:
    assert elide_middle(text, most) == shown


def test_colors_are_for_terminals_whose_users_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert has_colors(Terminal())
    assert not has_colors(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colors(Terminal())
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "dumb")
    assert not has_colors(Terminal())


@pytest.mark.parametrize(
    ("part", "whole", "shown"),
    [
        (0, 100, ""),
        (1, 10**9, "▏"),
        (25, 100, "█████"),
        (50, 100, "██████████"),
        (53, 100, "██████████▋"),
        (100, 100, "████████████████████"),
        (200, 100, "████████████████████"),
        (5, 0, ""),
    ],
)
def test_bar_is_in_proportion_and_never_nothing_for_something(part: int, whole: int, shown: str) -> None:
    assert bar(part, whole) == shown
