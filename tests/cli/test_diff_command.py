"""`hfshard diff` on real checkpoints: what it prints, and its exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
from safetensors.torch import save_file

import hfshard
from hfshard.cli.main import main
from tests.cli.conftest import Run
from tests.helpers import forkserver


def state_dict() -> dict[str, torch.Tensor]:
    tensors = {
        f"encoder.layer.{layer}.{part}.{kind}": torch.full((4, 2), float(layer))
        for layer in range(12)
        for part in ("attention.query", "output")
        for kind in ("weight", "bias")
    }
    return {"embed.weight": torch.ones(8, 4), **tensors, "classifier.weight": torch.ones(2, 4)}


def save(directory: Path, changes: dict[str, torch.Tensor] | None = None, **options: object) -> Path:
    hfshard.save_state_dict({**state_dict(), **(changes or {})}, directory, **options)  # type: ignore[arg-type]
    return directory


def test_text_says_what_changed_and_where(tmp_path: Path, run: Run) -> None:
    a = save(tmp_path / "a")
    b = save(tmp_path / "b", {name: torch.zeros(4, 2) - 1 for name in state_dict() if "query.weight" in name})
    done = run("diff", a, b, COLUMNS="80")
    assert (done.returncode, done.stderr) == (1, "")
    assert (
        done.stdout
        == f"""\
Only query.weight of all 12 layers changed: 12 of 50 tensors.

   tensors    size  dtypes  place
A       50  1.7 KB  F32     {a}
B       50  1.7 KB  F32     {b}

Told from names and digests; no tensor was read.

difference  tensors  where
changed          12  encoder.layer.{{0-11}}.attention.query.weight
same             38  the rest
"""
    )


def test_the_same_tensors_in_other_files_exit_with_0(tmp_path: Path, run: Run) -> None:
    done = run("diff", save(tmp_path / "a"), save(tmp_path / "b", max_shard_size="1KB"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("The same 50 tensors, in 50 files instead of 1.\n")
    assert "difference" not in done.stdout


def test_json_has_everything(tmp_path: Path, run: Run) -> None:
    hfshard.save_state_dict({"w": torch.ones(2, 3), "old": torch.zeros(1)}, tmp_path / "a")
    hfshard.save_state_dict({"w": torch.zeros(2, 3), "x": torch.ones(1), "y": torch.ones(2)}, tmp_path / "b")
    done = run("diff", tmp_path / "a", tmp_path / "b", "--format", "json")
    assert (done.returncode, done.stderr) == (1, "")
    file = "model.safetensors"
    w = {"name": "w", "dtype": "F32", "shape": [2, 3], "nbytes": 24, "file": file}
    assert json.loads(done.stdout) == {
        "a": str(tmp_path / "a"),
        "b": str(tmp_path / "b"),
        "is_same": False,
        "headline": "The one tensor in both changed; 1 tensor only in A (old); 2 tensors only in B (x and y).",
        "counts": {
            "same": 0, "changed": 1, "renamed": 0, "cast": 0, "reshaped": 0, "only_in_a": 1, "only_in_b": 2,
        },
        "read_bytes": 0,
        "retied": [],
        "ties_a": {},
        "ties_b": {},
        "tensors": [
            {"kind": "changed", "a": w, "b": w, "values": None},
            {"kind": "only_in_b", "a": None, "values": None,
             "b": {"name": "x", "dtype": "F32", "shape": [1], "nbytes": 4, "file": file}},
            {"kind": "only_in_b", "a": None, "values": None,
             "b": {"name": "y", "dtype": "F32", "shape": [2], "nbytes": 8, "file": file}},
            {"kind": "only_in_a", "b": None, "values": None,
             "a": {"name": "old", "dtype": "F32", "shape": [1], "nbytes": 4, "file": file}},
        ],
    }  # fmt: skip


def test_all_lists_tensors_with_their_whole_names(tmp_path: Path, run: Run) -> None:
    long = f"{'x' * 200}.weight"
    hfshard.save_state_dict({long: torch.ones(2, 3), "h.2.w": torch.ones(1), "h.10.w": torch.ones(1)}, tmp_path / "a")
    hfshard.save_state_dict({long: torch.ones(3, 2), "h.2.w": torch.ones(2), "h.10.w": torch.ones(3)}, tmp_path / "b")
    short, whole = (run("diff", tmp_path / "a", tmp_path / "b", *more, COLUMNS="80") for more in ((), ("--all",)))
    assert max(map(len, short.stdout.split("difference")[1].splitlines())) <= 80
    assert whole.stdout.split("\n\n")[-1].replace(" ", "") == (
        f"differenceshapetensor\nchanged1→2h.2.w\nchanged1→3h.10.w\nreshaped2×3→3×2{long}\n"
    )


def test_what_cannot_be_compared_exits_with_2(tmp_path: Path, run: Run) -> None:
    a = save(tmp_path / "a")
    damaged = save(tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"\x00" * 100)

    for arguments in ((a, tmp_path / "none"), (a, damaged), (a,), (a, a, "--format", "xml")):
        done = run("diff", *arguments)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert done.stderr


def test_what_nobody_expected_exits_with_2_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [str(save(tmp_path / place, {"new": torch.full((9,), n)}, checksum=None)) for n, place in enumerate("ab")]

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(torch, "frombuffer", fail)
    assert main(["diff", *places]) == 2
    assert capsys.readouterr().err.endswith("RuntimeError: no memory left\n")


def test_weights_are_chosen_in_files_of_torch_save(tmp_path: Path, run: Run) -> None:
    a, b = save(tmp_path / "a"), tmp_path / "last.pth"
    torch.save({"model": state_dict(), "model_ema": {**state_dict(), "embed.weight": torch.zeros(8, 4)}}, b)

    def said(*arguments: str | Path) -> tuple[int, str]:
        done = run("diff", *arguments)
        return done.returncode, (done.stdout or done.stderr).splitlines()[0]

    assert said(a, b, "--key", "model") == (0, "The same 50 tensors, in other files.")
    assert said(a, b, "--key", "model_ema") == (1, "Only embed changed: 1 of 50 tensors.")
    assert said(b, b, "--key", "model_ema") == (0, "The same 50 tensors.")
    assert said(b, b, "--key", "model", "--key", "model_ema") == (1, "Only embed changed: 1 of 50 tensors.")
    model = ("--key", "model")
    wrongs: list[list[str | Path]] = [[b, b], [a, b, "--key", "ema"], [a, a, *model], [b, b, *model * 3]]
    assert [said(*wrong)[0] for wrong in wrongs] == [2, 2, 2, 2]


def test_digests_that_lie_are_found_by_verify(tmp_path: Path, run: Run) -> None:
    a = save(tmp_path / "a", {"large": torch.ones(9000)}, checksum="xxh3")
    shutil.copytree(a, tmp_path / "b")
    file = tmp_path / "b" / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[raw.index(torch.ones(9000).numpy().tobytes()) + 18_000] ^= 1
    file.write_bytes(raw)
    believed, read = (run("diff", a, tmp_path / "b", "--verify", level) for level in ("none", "full"))
    assert (believed.returncode, read.returncode, read.stdout) == (0, 2, "")
    assert "is damaged: its xxh3 is" in read.stderr


def test_folders_of_both_are_chosen(tmp_path: Path, run: Run) -> None:
    save(tmp_path / "a" / "x")
    save(tmp_path / "b" / "x")
    save(tmp_path / "b" / "y", {"embed.weight": torch.zeros(8, 4)})
    a, b = tmp_path / "a", tmp_path / "b"
    assert run("diff", a, b, "--subfolder", "x").returncode == 0
    assert run("diff", a, b, "--subfolder", "x", "--subfolder", "y").returncode == 1
    assert run("diff", a, b, "--subfolder", "y").returncode == 2


def test_hostile_names_do_not_move_the_cursor(tmp_path: Path, run: Run) -> None:
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
    names = ["w\x1b[2J\n\x07", "h.0.\x1b]0;t\x07", "h.1.\x1b]0;t\x07", "\u202ereversed"]
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "a" / "model.safetensors")
    save_file({name: torch.ones(1) for name in names[1:]}, tmp_path / "b" / "model.safetensors")
    for more in ((), ("--all",)):
        done = run("diff", tmp_path / "a", tmp_path / "b", *more)
        assert (done.returncode, done.stderr) == (1, "")
        assert done.stdout.replace("\n", "").isprintable()
        assert "w\\x1b[2J\\n\\x07" in done.stdout


def test_reader_that_goes_away_is_no_error(tmp_path: Path, child_environment: dict[str, str]) -> None:
    # Lines of 130 characters: more than a pipe and what reads it hold (72 KiB).
    for place, number in (("a", 0), ("b", 1)):
        (tmp_path / place).mkdir()
        tensors = {f"{'tensor.' * 15}{index:04d}": torch.full((1,), number) for index in range(1000)}
        save_file(tensors, tmp_path / place / "model.safetensors")
    command = ["-m", "hfshard", "diff", tmp_path / "a", tmp_path / "b", "--all"]
    with forkserver.start(command, env=child_environment, stdout=PIPE, stderr=PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == "All 1,000 tensors changed.\n"
        child.stdout.close()
        assert child.wait(110) == 141
        assert child.stderr.read() == ""
