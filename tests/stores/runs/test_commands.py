"""The command line on runs in stores."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.cli.main import main
from hfshard.training import CheckpointManager, TrainingState
from tests.signing.conftest import write_pair
from tests.stores.runs.bucket_run import BucketRun, Net, save_steps

pytestmark = pytest.mark.parametrize("scheme", ["s3"])


@pytest.fixture
def saved(run: BucketRun) -> BucketRun:
    """A run of two checkpoints."""
    with CheckpointManager(run.root) as manager:
        save_steps(manager, 1, 2)
    return run


def test_checkpoints_of_a_run_are_listed(saved: BucketRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", saved.root, "--best", "loss", "--format", "json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    shown = [(one["step"], one["metrics"], one["is_latest"], one["is_best"]) for one in listed]
    assert shown == [(1, {"loss": 0.5}, False, False), (2, {"loss": 1 / 3}, True, True)]
    times = [datetime.fromisoformat(one["saved"]) for one in listed]
    assert [abs((datetime.now(UTC) - time).total_seconds()) < 600 for time in times] == [True, True]

    saved.delete("checkpoint-00000002/training_state.json")  # a plain copy, which hfshard does not read
    assert main(["checkpoints", saved.root, "--verify"]) == 0
    capsys.readouterr()
    shard = saved.objects("checkpoint-00000002")[-1]
    saved.delete(shard)
    assert main(["checkpoints", saved.root, "--verify"]) == 1
    assert f"{shard}' is missing" in " ".join(capsys.readouterr().out.split())


def test_a_run_is_verified(saved: BucketRun, capsys: pytest.CaptureFixture[str]) -> None:
    addresses = [f"{saved.root}/checkpoint-0000000{step}" for step in (1, 2)]
    assert main(["verify", saved.root]) == 0
    assert [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines()] == addresses
    assert main(["verify", addresses[1], "--level", "structure"]) == 0


def test_a_run_is_verified_from_python(saved: BucketRun) -> None:
    addresses = [f"{saved.root}/checkpoint-0000000{step}" for step in (1, 2)]
    whole = hfshard.verify_checkpoint(saved.root)
    one = hfshard.verify_checkpoint(addresses[1])
    shard = saved.objects("checkpoint-00000002")[-1]
    saved.delete(shard)
    damaged = hfshard.verify_checkpoint(saved.root, level="structure")

    assert whole.ok
    assert [one.directory for one in whole.checkpoints] == addresses
    assert {name.partition("/")[0] for name in whole.files} == {"checkpoint-00000001", "checkpoint-00000002"}
    assert "training_state.json" in one.files
    assert [problem.file for problem in damaged.problems] == [f"{saved.root}/{shard}"]
    assert [one.ok for one in damaged.checkpoints] == [True, False]


def test_signed_checkpoints_of_a_run_are_compared_in_the_store(run: BucketRun, tmp_path: Path) -> None:
    private, public = write_pair(tmp_path, "mine")
    with CheckpointManager(tmp_path / "run") as manager:
        save_steps(manager, 1, 2)
        for step in (1, 2):
            hfshard.sign_checkpoint(manager.path_of(step), private_key=private)
    for path in (tmp_path / "run").rglob("checkpoint-*/*"):
        run.put(str(path.relative_to(tmp_path / "run")), path.read_bytes())

    whole = hfshard.verify_checkpoint(run.root, public_key=public)
    lightly = hfshard.verify_checkpoint(run.root, public_key=public, level="structure")

    assert (whole.ok, whole.signed_by) == (True, f"the key of '{public}'")
    assert (lightly.ok, lightly.signed_by) == (True, None)
    # Other weights, and a manifest that says that they were saved.
    with CheckpointManager(tmp_path / "other") as manager:
        manager.save(1, TrainingState(model=Net(7.0)), metric={"loss": 0.5})
    for file in ("model.safetensors", "checkpoint.json"):
        run.put(f"checkpoint-00000001/{file}", (tmp_path / "other" / "checkpoint-00000001" / file).read_bytes())
    forged = hfshard.verify_checkpoint(run.root, public_key=public)
    assert [one.signed_by for one in forged.checkpoints] == [None, whole.signed_by]
    named = {problem.file.rpartition("/")[2] for problem in forged.problems}
    assert named >= {"model.safetensors", "checkpoint.json"}


def test_an_old_file_becomes_a_checkpoint_of_a_run(run: BucketRun, tmp_path: Path) -> None:
    net = Net(3.0)
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    for weight in net.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    torch.save({"step": 7, "model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "old.pth.tar")

    assert main(["convert", str(tmp_path / "old.pth.tar"), run.root]) == 0
    net.fill(0.0)
    assert CheckpointManager(run.root).restore_latest(TrainingState(model=net, optimizer=optimizer)) == 7
    assert net.value() == 3.0
    assert main(["convert", str(tmp_path / "old.pth.tar"), run.root]) == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "old.pth.tar"]
