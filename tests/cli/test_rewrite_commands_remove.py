"""`hfshard remove`: it lists, asks, and removes; without a terminal it needs --yes."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.cli.main import main
from tests.cli.conftest import Run


class Terminal(io.StringIO):
    """A terminal on which something is typed."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("typed", "code"), [("y\n", 0), ("YES\n", 0), ("n\n", 1), ("\n", 1), ("", 1)])
def test_it_lists_what_goes_and_what_stays_and_asks(
    typed: str, code: int, example: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example / "notes.txt").write_text("keep")
    before = sorted(os.listdir(example))
    monkeypatch.setattr("sys.stdin", Terminal(typed))

    assert main(["remove", str(example)]) == code

    streams = capsys.readouterr()
    lines = [line.split("  ") for line in streams.out.splitlines()]
    assert [line[0] for line in lines][:4] == ["goes", *before[:3]]
    assert lines[1][-1] == "404.1 KB"
    assert "notes.txt  not part of the checkpoint" in streams.out
    assert f"Remove 3 files (469.3 KB) from '{example}'? [y/N] " in streams.err
    assert sorted(os.listdir(example)) == (["notes.txt"] if code == 0 else before)
    assert ("Nothing was removed." in streams.err) == (code == 1)


def test_without_a_terminal_it_needs_yes(example: Path, run: Run) -> None:
    refused = run("remove", example)
    shown = run("remove", example, "--dry-run", "--format", "json")
    kept = len(os.listdir(example))
    done = run("remove", example, "--yes")

    assert (refused.returncode, refused.stdout) == (2, "")
    assert "Pass --yes to remove it without a question" in refused.stderr
    report = json.loads(shown.stdout)
    assert (report["is_done"], report["size"], len(report["removed"]), kept) == (False, 469_349, 3, 3)
    assert (done.returncode, done.stderr, os.listdir(example)) == (0, "", [])
    assert done.stdout.splitlines()[-1] == f"{example}: 3 files (469.3 KB) removed"


def test_leftovers_where_there_are_none_are_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hfshard.save_state_dict({"a": torch.ones(1)}, tmp_path)

    assert main(["remove", "--leftovers", "--yes", str(tmp_path)]) == 0

    assert capsys.readouterr().out.splitlines()[0] == f"{tmp_path}: nothing to remove"
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_what_is_no_checkpoint_is_one_message(tmp_path: Path, run: Run) -> None:
    (tmp_path / "config.json").write_text("{}")

    nothing = run("remove", tmp_path, "--yes")
    nowhere = run("remove", tmp_path / "nowhere", "--yes")

    assert (nothing.returncode, nothing.stdout) == (1, "")
    assert nothing.stderr.startswith(f"hfshard: There is no checkpoint in '{tmp_path}'")
    assert nowhere.stderr == f"hfshard: There is no directory '{tmp_path / 'nowhere'}'. Check the path.\n"
    assert os.listdir(tmp_path) == ["config.json"]
