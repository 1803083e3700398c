"""A run in a new kind of place costs one file more, and one row of the table next to `open_run`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import hfshard
from hfshard.errors import CheckpointNotFoundError, DirectoryLockedError, HfshardError, InvalidArgumentError
from hfshard.places import place
from hfshard.training import CheckpointManager, TrainingState
from hfshard.training.interop.convert_run import convert_foreign
from hfshard.training.run import find_checkpoint
from hfshard.training.run.run_directory import RunDirectory
from hfshard.training.run.run_store import RunStore
from hfshard.viewing.diff_checkpoints import diff_checkpoints
from hfshard.viewing.inspection import inspect_checkpoint
from hfshard.viewing.run_listing import checkpoints_of, list_checkpoints, unchanged_bytes
from hfshard.viewing.show import page_of_run
from tests.places import memory_run
from tests.places.memory_place import CLASS, FILES, MEMORY
from tests.places.memory_run import WRITERS, MemoryRun
from tests.training.run import storage_contract

ROOT = "mem://runs/one"


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(place, "KINDS", [MEMORY, *place.KINDS])
    monkeypatch.setitem(find_checkpoint.STORAGES, CLASS, MemoryRun)
    yield
    FILES.clear()
    WRITERS.clear()


class Training:
    """A small model with dropout, and all that its next step depends on."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def state(self) -> TrainingState:
        return TrainingState(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 3)).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def trained(*steps: int, keep: int | None = None) -> Training:
    """Train and save at these steps, with the step as the loss."""
    training = Training()
    with CheckpointManager(ROOT, max_to_keep=keep, keep_best="loss") as manager:
        for before, step in pairwise((0, *steps)):
            training.train(step - before)
            manager.save(step, training.state(), metric=float(step))
    return training


def folders() -> list[str]:
    return sorted({path.removeprefix(f"{ROOT}/").partition("/")[0] for path in FILES})


def test_it_is_one_file_of_at_most_150_lines_and_derives_from_no_other_run() -> None:
    assert len(Path(memory_run.__file__).read_text().splitlines()) <= 150
    assert not issubclass(MemoryRun, RunDirectory | RunStore)


def test_every_storage_of_a_run_does_this() -> None:
    def rename(old: str, new: str) -> None:
        for path in [path for path in FILES if f"/{old}/" in path]:
            FILES[path.replace(f"/{old}/", f"/{new}/")] = FILES.pop(path)

    storage_contract.check_listings_and_removals("mem://runs/listed")
    storage_contract.check_folders("mem://runs/folders")
    storage_contract.check_refused_save("mem://runs/refused")
    storage_contract.check_metrics_of_other_weights("mem://runs/replaced")
    storage_contract.check_metrics_of_a_copy("mem://runs/copied", rename)


def test_a_training_resumes_exactly() -> None:
    expected = trained(3, 7)
    expected.train(2)
    resumed = Training()
    manager = CheckpointManager(f"{ROOT}/")

    assert manager.root == ROOT
    assert manager.latest_step() == 7
    assert manager.restore_latest(resumed.state()) == 7

    resumed.train(2)

    assert equal(resumed.weights(), expected.weights())

    again = Training()
    restored = manager.restore(again.state(), 3)
    again.train(6)

    assert (restored, restored.metrics, restored.path) == (3, {"loss": 3.0}, f"{ROOT}/checkpoint-00000003")
    assert equal(again.weights(), expected.weights())

    from_elsewhere = Training()

    assert CheckpointManager("mem://runs/two").restore(from_elsewhere.state(), restored.path) == 3


def test_rotation_keeps_the_newest_and_the_best_one() -> None:
    trained(1, 2, 3, 4, keep=2)
    manager = CheckpointManager(ROOT, keep_best="loss")

    assert manager.all_steps() == [1, 3, 4]
    assert (manager.best_step(), manager.latest_step()) == (1, 4)
    assert folders() == ["checkpoint-00000001", "checkpoint-00000003", "checkpoint-00000004"]


def test_other_weights_are_saved_as_the_same_step_in_the_background() -> None:
    training = trained(1, 2)
    training.train(1)
    with CheckpointManager(ROOT, max_shard_size="100B") as manager:
        manager.save(1, training.state(), extra={"epoch": 3}, blocking=False)

        assert manager.latest_step() == 1  # the one that was saved last
        assert manager.all_steps() == [1, 2]

        restored = manager.restore(Training().state())

        assert (restored.metrics, restored.extra) == ({}, {"epoch": 3})
        assert f"{ROOT}/checkpoint-00000001/model.safetensors" not in FILES


def test_a_refused_save_leaves_the_old_one() -> None:
    training = trained(1)
    before = dict(FILES)
    manager = CheckpointManager(ROOT)

    with pytest.raises(InvalidArgumentError, match=r"A checkpoint file cannot be named '../notes'"):
        manager.save(1, training.state(), files={"../notes": b""})
    with CheckpointManager(ROOT) as other:
        other.save(2, training.state())
        with pytest.raises(DirectoryLockedError, match=f"Another manager saves into '{ROOT}'"):
            manager.save(1, training.state())

    assert {path: raw for path, raw in FILES.items() if "/checkpoint-00000002/" not in path} == before
    assert manager.all_steps() == [1, 2]


def test_its_checkpoints_are_verified_and_loaded() -> None:
    training = trained(1, 2)
    path = CheckpointManager(ROOT).path_of("latest")
    report = hfshard.verify_checkpoint(path)

    assert report.ok
    assert {"checkpoint.json", "training_state.json", "model.safetensors"} <= {*report.files}
    assert equal(hfshard.load_state_dict(path, verify="full"), training.weights())
    assert equal(hfshard.load_model(Training().model, path).state_dict(), training.weights())

    whole = hfshard.verify_checkpoint(ROOT)

    assert whole.ok
    assert [one.directory for one in whole.checkpoints] == [f"{ROOT}/checkpoint-00000001", path]


def test_a_damaged_checkpoint_is_skipped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    trained(1, 2)
    path = f"{ROOT}/checkpoint-00000002/optimizer.safetensors"
    FILES[path] = FILES[path][:-1] + bytes([FILES[path][-1] ^ 1])

    assert [problem.file for problem in hfshard.verify_checkpoint(ROOT).problems] == [path]

    with caplog.at_level(logging.WARNING):
        assert CheckpointManager(ROOT).restore_latest(Training().state()) == 1

    assert f"Skipped the checkpoint '{ROOT}/checkpoint-00000002': " in caplog.text
    with pytest.raises(HfshardError, match=path):
        CheckpointManager(ROOT).restore(Training().state(), 2)


def test_it_is_pushed_and_pulled(tmp_path: Path) -> None:
    training = trained(1, 2)
    manager = CheckpointManager(ROOT)
    results = manager.push(tmp_path / "hub", "all")

    assert [one.is_new for one in results] == [True, True]
    assert equal(hfshard.load_state_dict(tmp_path / "hub"), training.weights())

    hfshard.pull_checkpoint(manager.path_of(2), tmp_path / "pulled")
    copied = Training()

    assert CheckpointManager(tmp_path / "run").restore(copied.state(), tmp_path / "hub") == 2
    assert equal(copied.weights(), training.weights())
    assert equal(hfshard.load_state_dict(tmp_path / "pulled"), training.weights())


def test_it_is_listed_and_looked_at() -> None:
    training = trained(1, 2)
    found = checkpoints_of(ROOT)
    listed = list_checkpoints(found, best="loss")

    assert [(one.step, one.is_latest, one.is_best) for one in listed] == [(1, False, True), (2, True, False)]
    assert unchanged_bytes(found)[found[0].path] == 0
    assert inspect_checkpoint(ROOT).directory == f"{ROOT}/checkpoint-00000002"
    assert {one.name for one in inspect_checkpoint(f"{ROOT}/checkpoint-1").tensors} == training.weights().keys()
    assert not diff_checkpoints(found[0].path, found[1].path).is_same
    assert page_of_run(ROOT, "loss", "min", paths=True).place == ROOT
    with pytest.raises(CheckpointNotFoundError, match=r"Its folder one contains a run"):
        checkpoints_of("mem://runs")


def test_a_file_of_another_program_becomes_a_checkpoint_of_it(tmp_path: Path) -> None:
    training = Training()
    torch.save({"model": training.model.state_dict(), "step": 5}, tmp_path / "old.pt")
    convert_foreign(str(tmp_path / "old.pt"), f"{ROOT}/")

    assert CheckpointManager(ROOT).latest_step() == 5
    assert equal(hfshard.load_state_dict(f"{ROOT}/checkpoint-00000005"), training.weights())


def test_a_kind_without_a_row_holds_checkpoints_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(find_checkpoint.STORAGES, CLASS)

    with pytest.raises(InvalidArgumentError, match=f"'{ROOT}' is a place for checkpoints, not for runs"):
        CheckpointManager(ROOT)
