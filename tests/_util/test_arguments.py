"""Paths as users give them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hfshard._util.arguments import absolute_path, checked_path_text
from hfshard.errors import InvalidPathError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("/a/b", "/a/b"),
        ("//a///./b/", "/a/b"),
        ("/a/../b", "/a/../b"),  # `a` may be a link
        ("/", "/"),
        (Path("/a b"), "/a b"),
        ("~", "/home/me"),
        ("~/x", "/home/me/x"),
        ("x", "/WORKING/x"),
        ("./x/", "/WORKING/x"),
        ("../x", "/WORKING/../x"),
        (".", "/WORKING"),
        ("./~", "/WORKING/~"),
        ("x\udcff", "/WORKING/x\udcff"),  # a name that is no UTF-8, as the system hands it over
    ],
)
def test_a_path_becomes_absolute(
    given: str | os.PathLike[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)

    assert absolute_path(given) == expected.replace("/WORKING", str(tmp_path))


@pytest.mark.parametrize("given", ["", b"out", "out\0", None, 3, ["out"], "\ud800"])
def test_what_is_no_path_is_one_clear_error(given: Any) -> None:
    for function in (absolute_path, checked_path_text):
        with pytest.raises(InvalidPathError, match=r"save_directory must be a str or os.PathLike path .*, got "):
            function(given, "save_directory")


def test_a_state_dict_in_the_place_of_a_path_is_shown_shortened() -> None:
    state_dict: Any = {f"layer.{number}.weight": number for number in range(1000)}

    with pytest.raises(InvalidPathError) as raised:
        checked_path_text(state_dict)

    assert len(str(raised.value)) < 400


def test_the_working_directory_may_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    assert absolute_path("/a/b") == "/a/b"
    with pytest.raises(
        InvalidPathError, match="src='x' is a relative path, but the working directory no longer exists"
    ):
        absolute_path("x", "src")
