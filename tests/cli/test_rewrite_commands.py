"""`hfshard reshard`, `convert`, `remove` and `checkpoints`, and `verify` and `push` of runs."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import hfshard
from hfshard.cli.main import main, make_parser
from hfshard.training import CheckpointManager, TrainingState
from tests.cli.conftest import Run, Terminal, rejected, save_example
from tests.helpers.evil import Evil
from tests.saving.helpers import files_in, flip, weights_in, write_bins


def test_reshard_shows_what_it_read_and_wrote(example: Path, tmp_path: Path, run: Run) -> None:
    (example / "tokenizer.json").write_text("{}")
    lines = run.ok("reshard", example, tmp_path / "new", "--max-shard-size", "1MB").splitlines()
    assert lines[:3] == [
        f"read     {example}: 468.3 KB in 2 files, every copied byte compared with its checksum",
        f"written  {tmp_path / 'new'}: 464.2 KB in 1 file",
        "copied   tokenizer.json",
    ]
    heads, row = (line.split() for line in lines[4:6])
    assert (heads, row[:4]) == (["file", "size", "tensors", "checksum"], ["model.safetensors", "464.2", "KB", "4"])
    assert lines[-1] == f"To check it at any time, run: hfshard verify {tmp_path / 'new'}"
    assert hfshard.verify_checkpoint(tmp_path / "new").ok


def test_json_says_all_of_it(example: Path, tmp_path: Path, run: Run) -> None:
    found = json.loads(run("reshard", example, tmp_path / "new", "--format", "json", "--checksum", "xxh3").stdout)
    assert [file["name"] for file in found["files_before"]] == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    ]  # fmt: skip
    [file] = found["files"]
    size = os.path.getsize(tmp_path / "new" / "model.safetensors")
    expected = {"name": "model.safetensors", "tensors": 4, "sha256": None, "size": size}
    assert {key: file[key] for key in expected} == expected
    assert len(file["xxh3"]) == 32
    whole = {"total_size": 460_108, "tied_names": {"unembed": "embed"}, "copied": []}
    assert {key: found[key] for key in whole} == whole
    assert found["is_compared"] is True


def test_options_are_those_of_the_function(tmp_path: Path, run: Run) -> None:
    old, new, want = save_example(tmp_path / "old", variant="fp16"), tmp_path / "new", tmp_path / "want"
    options = ["--variant", "fp16", "--packing", "balanced", "--dtype", "bfloat16", "--max-shard-size", "50000"]
    assert run("reshard", old, new, *options, "--checksum", "none").returncode == 0
    hfshard.reshard_checkpoint(old, want, 50000, variant="fp16", packing="balanced", dtype="bfloat16", checksum=None)
    assert files_in(new) == files_in(want)


def test_low_disk_in_place(example: Path, run: Run) -> None:
    assert run("reshard", example, example, "--max-shard-size", "40KB", "--low-disk").returncode == 0
    assert len(weights_in(example)) > 2
    assert hfshard.verify_checkpoint(example).ok


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["reshard", "{old}"], 2, "DST"),
        (["reshard", "{old}", "{new}", "--max-shard-size", "0"], 2, "Invalid size 0: it must be at least one byte."),
        (["reshard", "{old}", "{new}", "--max-shard-size", "5XB"], 2, "Invalid size '5XB'."),
        (["reshard", "{old}", "{new}", "--packing", "tight"], 2, "invalid choice: 'tight'"),
        (["convert", "{old}", "{new}", "--low-disk"], 2, "unrecognized arguments: --low-disk"),
        (["reshard", "{old}", "{new}", "--low-disk"], 2, "Pass the same directory twice"),
        (["reshard", "{old}", "{new}", "--dtype", "int8"], 2, "invalid choice: 'int8'"),
        (["reshard", "{old}", "{old}/sub"], 2, "Pass a directory outside, or the source itself to re-shard in place."),
        (["reshard", "{new}/nowhere", "{new}"], 1, "There is no directory"),
        (["convert", "{old}", "{new}"], 2, "To write files of another size, run: hfshard reshard {old} {new}"),
    ],
)
def test_errors_say_what_to_do(
    arguments: list[str], code: int, words: str, example: Path, tmp_path: Path, run: Run
) -> None:
    places = {"old": example, "new": tmp_path / "new"}
    done = run(*[argument.format(**places) for argument in arguments])
    assert (done.returncode, done.stdout) == (code, "")
    assert words.format(**places) in done.stderr
    assert not (tmp_path / "new").exists()
    assert hfshard.verify_checkpoint(example).ok


def test_damage_is_named(example: Path, tmp_path: Path, run: Run) -> None:
    file = example / "model-00001-of-00002.safetensors"
    flip(file, -1)
    err = run.fails(1, "reshard", example, tmp_path / "new")
    assert f"hfshard: Tensor 'embed' of shard '{file}' is damaged" in err
    assert err.endswith(f"run 'hfshard verify {example}'.\n")
    assert not (tmp_path / "new").exists()


def test_convert_in_place_removes_the_pickle_and_compares_its_checksums(tmp_path: Path, run: Run) -> None:
    old = write_bins(tmp_path / "old", {"a": torch.ones(3), "b": torch.zeros(2, 2)})
    out = run.ok("convert", old, old)
    assert "in 1 file, every copied byte compared with its checksum" in out.splitlines()[0]
    assert out.splitlines()[1].startswith(f"written  {old}: ")
    assert weights_in(old) == ["model.safetensors"]
    assert hfshard.load_state_dict(old)["a"].tolist() == [1.0, 1.0, 1.0]


def test_convert_says_that_a_pickle_without_checksums_was_not_compared(tmp_path: Path, run: Run) -> None:
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        old = write_bins(tmp_path / "old", {"a": torch.ones(3)})
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)
    done = run("convert", old, old)
    assert done.returncode == 0
    assert "in 1 file" in done.stdout.splitlines()[0] and "compared" not in done.stdout.splitlines()[0]
    assert "has no checksums of its tensors: its structure was checked, but not its bytes." in done.stderr
    assert hfshard.load_state_dict(old)["a"].tolist() == [1.0, 1.0, 1.0]


def test_convert_refuses_an_unsafe_pickle_by_name(tmp_path: Path, run: Run) -> None:
    old = write_bins(tmp_path / "old", {"w": Evil()})
    err = run.fails(1, "convert", old, old)
    assert f"hfshard: '{old / 'pytorch_model.bin'}' was not loaded: its pickle asks for 'posix.system'" in err
    assert weights_in(old) == ["pytorch_model.bin"]


def test_convert_of_what_is_safetensors_too_is_refused_in_place(tmp_path: Path, run: Run) -> None:
    old = write_bins(tmp_path / "old", {"w": torch.ones(2)})
    hfshard.save_state_dict({"w": torch.zeros(2)}, tmp_path / "safe")
    os.rename(tmp_path / "safe" / "model.safetensors", old / "model.safetensors")
    assert "also has 'model.safetensors', which is loaded instead" in run.fails(2, "convert", old, old)
    assert weights_in(old) == ["model.safetensors", "pytorch_model.bin"]


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
    refused = run.fails(2, "remove", example)
    report = json.loads(run("remove", example, "--dry-run", "--format", "json").stdout)
    kept = len(os.listdir(example))
    done = run.ok("remove", example, "--yes")

    assert "Pass --yes to remove it without asking" in refused
    assert (report["is_done"], report["size"], len(report["removed"]), kept) == (False, 469_349, 3, 3)
    assert os.listdir(example) == []
    assert done.splitlines()[-1] == f"{example}: 3 files (469.3 KB) removed"


def test_leftovers_where_there_are_none_are_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hfshard.save_state_dict({"a": torch.ones(1)}, tmp_path)

    assert main(["remove", "--leftovers", "--yes", str(tmp_path)]) == 0

    assert capsys.readouterr().out.splitlines()[0] == f"{tmp_path}: nothing to remove"
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_what_is_no_checkpoint_is_one_message(tmp_path: Path, run: Run) -> None:
    (tmp_path / "config.json").write_text("{}")

    nothing = run.fails(1, "remove", tmp_path, "--yes")
    nowhere = run("remove", tmp_path / "nowhere", "--yes")

    assert nothing.startswith(f"hfshard: There is no checkpoint in '{tmp_path}'")
    assert nowhere.stderr == f"hfshard: There is no directory '{tmp_path / 'nowhere'}'. Check the path.\n"
    assert os.listdir(tmp_path) == ["config.json"]


Call = Callable[..., tuple[int, str, str]]
DATE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three checkpoints; that of step 20 has shards."""
    root = tmp_path_factory.mktemp("made") / "run"
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    optimizer = torch.optim.Adam(model.parameters())
    with CheckpointManager(root) as manager:
        for step, loss in ((10, 0.5), (20, 0.25), (30, float("nan"))):
            model(torch.ones(1, 16)).sum().backward()
            optimizer.step()
            state = TrainingState(model=model, optimizer=optimizer)
            manager.save(step, state, metric={"loss": loss}, max_shard_size=300 if step == 20 else "5GB")
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(made, tmp_path / "run"))


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """`hfshard ARGUMENTS`, in this process: exit code, stdout, stderr."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        return main([*map(str, arguments)]), *capsys.readouterr()

    return call


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def test_table_of_a_run(made: Path, run: Run) -> None:
    lines = [DATE.sub("<date>", line) for line in run.ok("checkpoints", made, "--best", "loss").splitlines()]
    sizes = [f"{size_of(made / f'checkpoint-000000{step}') / 1000:.1f} KB" for step in (10, 20, 30)]
    width = max(map(len, sizes))
    assert lines == [
        f"step  save  saved (UTC)       {'size':>{width}}  files  metrics",
        f"  10     1  <date>  {sizes[0]:>{width}}      5  loss 0.5",
        f"  20     2  <date>  {sizes[1]:>{width}}     16  loss 0.25  best",
        f"  30     3  <date>  {sizes[2]:>{width}}      5  loss nan   latest",
    ]


def test_place_above_runs_names_them(made: Path, tmp_path: Path, run: Run) -> None:
    for name in ("first", "second"):
        shutil.copytree(made, tmp_path / name)
    (tmp_path / "trainer" / "checkpoint-500").mkdir(parents=True)

    several = run.fails(1, "checkpoints", tmp_path)
    one = run("checkpoints", made.parent)

    assert several == (
        f"hfshard: There is no training checkpoint in '{tmp_path}'. Its folders first, second contain runs. "
        f"To list its checkpoints, run: hfshard checkpoints {tmp_path}/first\n"
    )
    assert "Its folder run contains a run. To list its checkpoints, run: hfshard checkpoints" in one.stderr


def test_verified_run_in_json(made: Path, call: Call) -> None:
    code, out, _ = call("checkpoints", made, "--verify", "--best", "loss", "--metric-mode", "max", "--format", "json")
    shown = json.loads(out)
    assert (code, shown["directory"]) == (0, str(made))
    sizes = [size_of(Path(one["path"])) for one in shown["checkpoints"]]
    expected = [
        {"step": 10, "save_number": 1, "files": 5, "metrics": {"loss": 0.5}, "is_best": True, "is_latest": False},
        {"step": 20, "save_number": 2, "files": 16, "metrics": {"loss": 0.25}, "is_best": False, "is_latest": False},
        {"step": 30, "save_number": 3, "files": 5, "metrics": {"loss": "nan"}, "is_best": False, "is_latest": True},
    ]
    verified = {"is_verified": True, "is_damaged": False, "problems": []}
    assert [{key: one[key] for key in (*expected[0], *verified, "size")} for one in shown["checkpoints"]] == [
        {**one, **verified, "size": size} for one, size in zip(expected, sizes, strict=True)
    ]


@pytest.fixture
def damaged(root: Path) -> Path:
    """The run without the manifest of step 20, and with a flipped bit in step 30."""
    (root / "checkpoint-00000020" / "checkpoint.json").unlink()
    flip(root / "checkpoint-00000030" / "training_state.json", 200)
    return root


def test_lost_manifest_is_shown_and_is_one(damaged: Path, call: Call) -> None:
    code, out, _ = call("checkpoints", damaged)  # a manifest that is gone costs nothing to see
    assert code == 1
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["10", "30", "20"]
    assert lines[2].endswith("latest")
    assert lines[3].endswith("  UNFINISHED")
    assert f"\n\nUNFINISHED  {damaged}/checkpoint-00000020/checkpoint.json\n" in out
    assert "DAMAGED" not in out
    _, out, _ = call("checkpoints", damaged, "--verify", "--format", "json")
    shown = [(one["step"], one["is_damaged"], one["is_unfinished"]) for one in json.loads(out)["checkpoints"]]
    assert shown == [(10, False, False), (30, True, False), (20, False, True)]


def test_relative_path_of_a_run_is_shown_as_an_absolute_one(
    damaged: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(damaged.parent)
    assert call("checkpoints", damaged.name, "--verify")[:2] == call("checkpoints", damaged, "--verify")[:2]


def test_damaged_byte_is_shown_by_verification_and_is_one(damaged: Path, call: Call) -> None:
    code, out, _ = call("checkpoints", damaged, "--verify")
    assert code == 1
    assert out.splitlines()[1].endswith("intact, latest")
    assert f"DAMAGED  {damaged}/checkpoint-00000030/training_state.json\n" in out


def test_directories_without_a_run_are_one(root: Path, tmp_path: Path, call: Call) -> None:
    (tmp_path / "empty").mkdir()
    said = f"hfshard: There is no training checkpoint in '{tmp_path}/empty'. Check the path.\n"
    assert call("checkpoints", tmp_path / "empty") == (1, "", said)
    code, out, err = call("checkpoints", root / "checkpoint-00000010")
    assert (code, out) == (1, "")
    assert f"is one checkpoint, not a run. To check it, run: hfshard verify {root}/checkpoint-00000010" in err


def test_metric_that_nobody_has_is_noted(made: Path, call: Call) -> None:
    code, _, err = call("checkpoints", made, "--best", "accuracy")
    assert (code, err) == (0, "hfshard: note: no checkpoint has the metric 'accuracy'. Available: loss.\n")


def test_verify_reads_every_file_of_a_training_checkpoint(made: Path, call: Call) -> None:
    one = made / "checkpoint-00000020"
    compared = size_of(one) - (one / "checkpoint.json").stat().st_size
    said = f"{one}: intact: 16 files, {compared / 1000:.1f} KB compared with their checksums\n"
    assert call("verify", one) == (0, said, "")
    code, out, _ = call("verify", one, "--level", "structure", "--format", "json")
    report = json.loads(out)
    assert (code, report["ok"], report["checked_bytes"]) == (0, True, 0)
    assert report["files"] == [*sorted({path.name for path in one.iterdir()} - {"checkpoint.json"}), "checkpoint.json"]


@pytest.mark.parametrize(
    ("name", "offset", "tensor"),
    [
        ("optimizer-00002-of-00006.safetensors", None, ""),
        ("state-00003-of-00003.safetensors", None, ""),
        ("training_state.json", None, ""),
        ("checkpoint.json", None, ""),
        ("model-00001-of-00002.safetensors", -1, ", tensor weight"),
    ],
)
def test_verify_names_any_damaged_file(root: Path, call: Call, name: str, offset: int | None, tensor: str) -> None:
    path = root / "checkpoint-00000020" / name
    flip(path, offset or path.stat().st_size // 3)
    code, out, _ = call("verify", path.parent)
    assert code == 1
    assert f"DAMAGED  {path}{tensor}\n" in out
    assert out.endswith(f"{path.parent}: DAMAGED: 1 problem in 1 file\n")


def test_verify_names_a_file_that_other_tools_would_load_instead(root: Path, call: Call) -> None:
    path = root / "checkpoint-00000020" / "model.safetensors"
    shutil.copy(root / "checkpoint-00000010" / "model.safetensors", path)
    code, out, err = call("verify", path.parent)
    assert (code, err) == (1, "")
    assert f"DAMAGED  {path}\n         '{path}' does not belong to the checkpoint, but other tools load it" in out


def test_verify_of_a_lost_manifest_is_no_whole_model(root: Path, call: Call) -> None:
    path = root / "checkpoint-00000010" / "checkpoint.json"
    path.unlink()
    code, out, _ = call("verify", path.parent)
    assert code == 1
    assert f"DAMAGED  {path}\n" in out


def test_verify_of_a_run_reports_each_checkpoint_and_the_model_beside(root: Path, call: Call) -> None:
    hfshard.save_state_dict({"w": torch.ones(3)}, root)
    (root / "checkpoint-00000010" / "more.bin").write_bytes(b"mine")
    (root / "checkpoint-00000030" / "state.safetensors").unlink()
    code, out, err = call("verify", root)
    assert code == 1
    verdicts = [line.split(": ")[:2] for line in out.splitlines() if line.startswith(f"{root}")]
    steps = {10: "intact", 20: "intact", 30: "DAMAGED"}
    expected = [[f"{root}/checkpoint-000000{step}", verdict] for step, verdict in steps.items()]
    assert verdicts == [*expected, [f"{root}", "intact"]]
    assert f"DAMAGED  {root}/checkpoint-00000030/state.safetensors\n" in out
    assert err == (
        f"hfshard: warning: 'more.bin' in '{root}/checkpoint-00000010' belongs to no checkpoint: its manifest does not "
        "name it.\n"
    )
    code, out, _ = call("verify", root, "--format", "json")
    shown = json.loads(out)
    assert (code, shown["ok"], shown["level"]) == (1, False, "full")
    assert [one["ok"] for one in shown["checkpoints"]] == [True, True, False, True]


def test_checkpoint_of_another_steps_name_is_damage(root: Path, call: Call) -> None:
    (root / "checkpoint-00000010").rename(root / "checkpoint-00000040")
    for command in ("verify", "checkpoints"):
        code, out, _ = call(command, root)
        assert code == 1
        assert f"'{root}/checkpoint-00000040' is the checkpoint of step 10." in out


def test_verify_leaves_runs_of_other_tools_alone(tmp_path: Path, call: Call) -> None:
    hfshard.save_state_dict({"w": torch.ones(3)}, tmp_path)
    (tmp_path / "checkpoint-500").mkdir()
    (tmp_path / "checkpoint-500" / "optimizer.pt").write_bytes(b"")
    code, out, _ = call("verify", tmp_path)
    assert (code, out.split(": ")[:2]) == (0, [f"{tmp_path}", "intact"])


def test_a_part_is_split_at_the_first_equals_sign(capsys: pytest.CaptureFixture[str]) -> None:
    parsed = make_parser().parse_args(["convert", "a", "b", "--part", "model=ema=x", "--part", "optimizer=optim.0"])
    assert parsed.part == [("model", "ema=x"), ("optimizer", "optim.0")]

    for text in ("model", "=ema", "model="):
        shown = rejected(capsys, "convert", "a", "b", "--part", text)
        assert shown == f"hfshard convert: error: argument --part: '{text}' is not NAME=KEY"
