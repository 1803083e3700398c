"""`hfshard checkpoints`, and `hfshard verify` and `hfshard push` of training checkpoints and runs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import hfshard
from hfshard.cli.main import main
from hfshard.training import CheckpointManager, TrainingState
from tests.cli.conftest import Run
from tests.cli.test_check_commands_verify import flip_bit

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
        code = main([*map(str, arguments)])
        streams = capsys.readouterr()
        return code, streams.out, streams.err

    return call


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def test_table_of_a_run(made: Path, run: Run) -> None:
    done = run("checkpoints", made, "--best", "loss")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [DATE.sub("<date>", line) for line in done.stdout.splitlines()]
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

    several = run("checkpoints", tmp_path)
    one = run("checkpoints", made.parent)

    assert (several.returncode, several.stdout) == (1, "")
    assert several.stderr == (
        f"hfshard: There is no training checkpoint in '{tmp_path}'. Runs are in its folders first, second, as shown "
        f"by: hfshard checkpoints {tmp_path}/first\n"
    )
    assert "A run is in its folder run, as shown by: hfshard checkpoints" in one.stderr


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
    flip_bit(root / "checkpoint-00000030" / "training_state.json", 200)
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


def test_damaged_byte_is_shown_by_verification_and_is_one(damaged: Path, call: Call) -> None:
    code, out, _ = call("checkpoints", damaged, "--verify")
    assert code == 1
    assert out.splitlines()[1].endswith("whole, latest")
    assert f"DAMAGED  {damaged}/checkpoint-00000030/training_state.json\n" in out


def test_directories_without_a_run_are_one(root: Path, tmp_path: Path, call: Call) -> None:
    (tmp_path / "empty").mkdir()
    code, out, err = call("checkpoints", tmp_path / "empty")
    assert (code, out) == (1, "")
    assert err == f"hfshard: There is no training checkpoint in '{tmp_path}/empty'. Check the path.\n"
    code, out, err = call("checkpoints", root / "checkpoint-00000010")
    assert (code, out) == (1, "")
    assert f"is one checkpoint, not a run. To check it, run: hfshard verify {root}/checkpoint-00000010" in err


def test_metric_that_nobody_has_is_noted(made: Path, call: Call) -> None:
    code, _, err = call("checkpoints", made, "--best", "accuracy")
    assert (code, err) == (0, "hfshard: note: no checkpoint has the metric 'accuracy'. They have: loss.\n")


def test_verify_reads_every_file_of_a_training_checkpoint(made: Path, call: Call) -> None:
    one = made / "checkpoint-00000020"
    compared = size_of(one) - (one / "checkpoint.json").stat().st_size
    code, out, err = call("verify", one)
    assert (code, err) == (0, "")
    assert out == f"{one}: whole: 16 files, {compared / 1000:.1f} KB compared with their checksums\n"
    code, out, _ = call("verify", one, "--level", "structure", "--format", "json")
    report = json.loads(out)
    assert (code, report["ok"], report["checked_bytes"]) == (0, True, 0)
    assert report["files"] == sorted(path.name for path in one.iterdir() if path.name != "checkpoint.json") + [
        "checkpoint.json"
    ]


@pytest.mark.parametrize(
    "name",
    [
        "optimizer-00002-of-00006.safetensors",
        "state-00003-of-00003.safetensors",
        "training_state.json",
        "checkpoint.json",
    ],
)
def test_verify_names_any_damaged_file(root: Path, call: Call, name: str) -> None:
    path = root / "checkpoint-00000020" / name
    flip_bit(path, path.stat().st_size // 3)
    code, out, _ = call("verify", path.parent)
    assert code == 1
    assert f"DAMAGED  {path}\n" in out
    assert out.endswith(f"{path.parent}: DAMAGED: 1 problem in 1 file\n")


def test_verify_names_the_damaged_tensor_of_the_model(root: Path, call: Call) -> None:
    path = root / "checkpoint-00000020" / "model-00001-of-00002.safetensors"
    flip_bit(path, path.stat().st_size - 1)
    code, out, _ = call("verify", path.parent)
    assert code == 1
    assert f"DAMAGED  {path}, tensor weight\n" in out
    assert out.endswith("DAMAGED: 1 problem in 1 file\n")


def test_verify_names_a_file_that_other_tools_would_load_instead(root: Path, call: Call) -> None:
    path = root / "checkpoint-00000020" / "model.safetensors"
    shutil.copy(root / "checkpoint-00000010" / "model.safetensors", path)
    code, out, err = call("verify", path.parent)
    assert (code, err) == (1, "")
    assert f"DAMAGED  {path}\n         '{path}' does not belong to the checkpoint, and other tools load it" in out


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
    verdicts = [line for line in out.splitlines() if line.startswith(f"{root}")]
    assert [line.split(": ")[:2] for line in verdicts] == [
        [f"{root}/checkpoint-00000010", "whole"],
        [f"{root}/checkpoint-00000020", "whole"],
        [f"{root}/checkpoint-00000030", "DAMAGED"],
        [f"{root}", "whole"],
    ]
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
    assert (code, out.split(": ")[:2]) == (0, [f"{tmp_path}", "whole"])
