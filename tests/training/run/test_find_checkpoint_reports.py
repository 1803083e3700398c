"""A report of a training checkpoint is of every file that its manifest names; one of a run, of each checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from hfshard.checkpoint.reports import Problem, VerifyReport
from hfshard.errors import CheckpointNotFoundError, DamagedCheckpointError
from hfshard.training import CheckpointManager, TrainingState
from hfshard.training.run.find_checkpoint import as_problems, is_checkpoint, is_run, report_of, reports_of_run
from hfshard.training.run.manifest import folder_at


def save(root: Path, *steps: int, max_shard_size: int | str = "1GB") -> Path:
    """A run with some checkpoints; its path, or that of the only one."""
    with CheckpointManager(root, max_shard_size=max_shard_size) as manager:
        places = [Path(manager.save(step, TrainingState(torch.nn.Linear(16, 4)))) for step in steps]
    return places[0] if len(places) == 1 else root


def structure(place: str) -> VerifyReport:
    return report_of(place, "structure", progress=False)


def test_every_named_file_is_checked_and_counted(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 4)
    files = ["model.safetensors", "state.safetensors", "training_state.json"]
    sizes = [(checkpoint / name).stat().st_size for name in files]

    whole = report_of(str(checkpoint), "full", progress=False)
    with (checkpoint / "training_state.json").open("ab") as file:
        file.write(b" ")
    damaged = report_of(str(checkpoint), "full", progress=False)

    assert whole == VerifyReport(str(checkpoint), (*files, "checkpoint.json"), (), (), sum(sizes))
    assert structure(str(checkpoint)).checked_bytes == 0
    (problem,) = damaged.problems
    assert (problem.file, damaged.checked_bytes) == (f"{checkpoint}/training_state.json", sum(sizes[:2]))


def test_the_damaged_tensor_of_a_shard_is_named_once(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "run", 4, max_shard_size=256)  # the weight's bytes, so that the bias is in another
    shards = sorted(checkpoint.glob("model-*"))
    damaged = next(path for path in shards if b'"weight"' in path.read_bytes())
    raw = damaged.read_bytes()
    damaged.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))

    report = report_of(str(checkpoint), "full", progress=False)

    assert len(shards) == 2
    assert [(problem.file, problem.tensor) for problem in report.problems] == [(str(damaged), "weight")]


def test_weights_that_the_manifest_does_not_name_are_a_warning(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 4)
    names = ["model.safetensors.index.json", "old-00001-of-00002.safetensors", "pytorch_model.bin", "notes.txt"]
    for name in names:
        (checkpoint / name).touch()

    report = structure(str(checkpoint))

    assert [warning.split("'")[1] for warning in report.warnings] == names[:3]
    assert report.ok and report.warnings[2].endswith("' belongs to no checkpoint: its manifest does not name it.")


def test_without_a_manifest_only_that_is_reported(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 4)
    (checkpoint / "checkpoint.json").unlink()

    report = structure(str(checkpoint))

    path = f"{checkpoint}/checkpoint.json"
    problem = Problem(path, None, f"File '{path}' is missing. Download or save the checkpoint again.")
    assert (report.files, report.problems) == (("checkpoint.json",), (problem,))


def test_a_problem_is_at_the_directory_unless_its_error_knows_better() -> None:
    advised = DamagedCheckpointError("Broken. Load another, or run 'hfshard verify /run'.")
    other = DamagedCheckpointError("Broken, or run 'hfshard verify /other'.", path="/run/a", fqn="w")

    unadvised = Problem("/run", None, "Broken. Load another.")
    assert as_problems([advised, other], "/run") == [unadvised, Problem("/run/a", "w", other.message)]


def test_a_run_is_told_from_its_checkpoints_and_from_other_folders(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "run", 4)
    (tmp_path / "empty" / "checkpoint-00000003").mkdir(parents=True)
    (checkpoint / "checkpoint.json").unlink()  # its training_state.json says enough

    places = [tmp_path / "run", checkpoint, tmp_path / "empty", tmp_path / "missing"]
    assert [is_run(folder_at(str(one))) for one in places] == [True, False, False, False]
    assert [is_checkpoint(folder_at(str(one))) for one in places] == [False, True, False, False]


def test_checkpoints_are_reported_as_they_were_saved_and_the_unknown_last(tmp_path: Path) -> None:
    root = save(tmp_path / "run", 30, 10, 20)
    (root / "checkpoint-00000030" / "checkpoint.json").unlink()

    reports = list(reports_of_run(str(root), structure))

    assert [(one.directory[-2:], one.ok) for one in reports] == [("10", True), ("20", True), ("30", False)]


def test_only_a_checkpoint_that_went_while_it_was_checked_is_left_out(tmp_path: Path) -> None:
    root = save(tmp_path / "run", 1, 2, 3)

    def check(place: str) -> VerifyReport:
        if not place.endswith("3"):
            shutil.rmtree(place)
        if not place.endswith("2"):
            raise CheckpointNotFoundError(f"no {place}")
        return structure(place)

    with pytest.raises(CheckpointNotFoundError, match=r"checkpoint-00000003$"):
        list(reports_of_run(str(root), check))
    shutil.rmtree(root / "checkpoint-00000003")
    assert list(reports_of_run(str(root), check)) == []
