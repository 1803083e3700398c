"""Which checkpoints stay: by the order of saving, the best by any metric, every so many; and never none."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hfshard.errors import InvalidArgumentError
from hfshard.format.stored_save import SaveId
from hfshard.training import CheckpointManager, TrainingState
from hfshard.training.manager import Rotation
from hfshard.training.run.manifest import CheckpointManifest, RunCheckpoint
from tests.sweeps.run_states import Counter, litter

NAN, INF = math.nan, math.inf


def state() -> TrainingState:
    return TrainingState(counter=Counter())


def kept(rotation: Rotation, saves: Sequence[tuple[int, float | None]]) -> list[int]:
    """The steps that are there after some saves, each a step and a loss, in the order of saving."""
    there: list[RunCheckpoint] = []
    for number, (step, loss) in enumerate(saves):
        manifest = CheckpointManifest(step, number + 1, {} if loss is None else {"loss": loss})
        there = [one for one in there if one.step != step] + [RunCheckpoint.of(f"checkpoint-{step:08d}", manifest)]
        gone = rotation.to_remove(there[::-1])
        there = [one for one in there if one not in gone]
    return [one.step for one in there]


def steps(*losses: float | None) -> list[tuple[int, float | None]]:
    """Saves of steps 1, 2, 3 ... with these losses."""
    return list(enumerate(losses, 1))


@pytest.mark.parametrize(
    ("rotation", "saves", "expected"),
    [
        (Rotation(), steps(1, 2, 3), [1, 2, 3]),
        (Rotation(1), steps(1, 2, 3), [3]),
        (Rotation(2), steps(1, 2, 3, 4), [3, 4]),
        (Rotation(5), steps(1, 2, 3), [1, 2, 3]),
        (Rotation(1, "loss"), steps(0.1, 0.5, 0.3), [1, 3]),
        (Rotation(1, "loss"), steps(0.5, 0.1, 0.3), [2, 3]),
        (Rotation(1, "loss"), steps(0.5, 0.3, 0.1), [3]),
        (Rotation(1, "loss", "max"), steps(0.1, 0.5, 0.3), [2, 3]),
        (Rotation(1, "loss", "max"), steps(0.1, 0.3, 0.5), [3]),
        (Rotation(2, "loss"), steps(0.1, 0.5, 0.3, 0.4), [1, 3, 4]),
        (Rotation(1, "loss"), steps(0.2, 0.2, 0.2), [1, 3]),  # the earliest of equals
        (Rotation(1, "loss"), steps(NAN, 0.5, NAN), [2, 3]),
        (Rotation(1, "loss", "max"), steps(0.5, NAN, NAN), [1, 3]),
        (Rotation(1, "loss"), steps(NAN, NAN, NAN), [3]),
        (Rotation(1, "loss"), steps(None, 0.5, None), [2, 3]),
        (Rotation(1, "loss"), steps(None, None), [2]),
        (Rotation(1, "other"), steps(0.1, 0.5), [2]),
        (Rotation(1, "loss"), steps(INF, -INF, INF), [2, 3]),
        (Rotation(1, "loss", "max"), steps(INF, -INF, 1), [1, 3]),
        (Rotation(1, keep_every=2), steps(1, 2, 3, 4, 5), [2, 4, 5]),
        (Rotation(1, keep_every=2), steps(1, 2, 3, 4), [2, 3, 4]),
        (Rotation(2, "loss", keep_every=3), steps(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7), [1, 3, 5, 6, 7]),
        (Rotation(1, keep_every=5), [(0, None), (1, None), (2, None)], [0, 2]),
        (Rotation(2), [(100, None), (200, None), (150, None)], [200, 150]),  # by saving, not by number
        (Rotation(1), [(100, None), (200, None), (150, None)], [150]),
        (Rotation(2), [(100, None), (200, None), (100, None), (300, None)], [100, 300]),
        (Rotation(1, "loss"), [(1, 0.1), (1, 0.9), (2, 0.5)], [2]),  # the best was replaced by a worse one
    ],
)
def test_what_stays_of_some_saves(
    rotation: Rotation, saves: list[tuple[int, float | None]], expected: list[int]
) -> None:
    assert kept(rotation, saves) == expected


def test_manifests_are_read_only_where_a_metric_decides() -> None:
    read = []

    def found(step: int) -> RunCheckpoint:
        def read_manifest() -> CheckpointManifest:
            read.append(step)
            return CheckpointManifest(step, step, {"loss": step / 10})

        return RunCheckpoint(f"checkpoint-{step:08d}", step, read_manifest, save_id=SaveId(step, "0" * 16))

    checkpoints = [found(step) for step in (3, 1, 2)]
    assert [one.step for one in Rotation(1).to_remove(checkpoints)] == [1, 2]
    assert Rotation(3, "loss").to_remove(checkpoints) == []
    assert read == []
    assert [one.step for one in Rotation(1, "loss").to_remove(checkpoints)] == [2]
    assert sorted(read) == [1, 2, 3]


losses = st.one_of(st.none(), st.floats(allow_nan=True))


@given(
    saves=st.lists(st.tuples(st.integers(0, 12), losses), min_size=1, max_size=20),
    count=st.integers(1, 5),
    best=st.booleans(),
    mode=st.sampled_from(["min", "max"]),
    every=st.one_of(st.none(), st.integers(1, 5)),
)
def test_whatever_is_saved_the_last_ones_and_the_best_stay(
    saves: list[tuple[int, float | None]], count: int, best: bool, mode: Any, every: int | None
) -> None:
    found = kept(Rotation(count, "loss" if best else None, mode, every), saves)
    assert found[-1] == saves[-1][0]
    marked = {step for step, _ in saves if every is not None and step % every == 0}
    assert marked <= set(found)
    in_order = list(dict.fromkeys(step for step, _ in reversed(saves)))
    last = [step for step in in_order if step not in marked][:count]
    assert set(last) <= set(found)
    assert len(set(found) - marked - set(last)) <= best


@pytest.mark.parametrize(
    "arguments",
    [{"max_to_keep": 0}, {"max_to_keep": -1}, {"max_to_keep": True}, {"max_to_keep": "3"}, {"keep_every": 0},
     {"keep_every": 1.5}, {"keep_best": ""}, {"keep_best": True}, {"metric_mode": "low"}, {"max_shard_size": "x"},
     {"checksum": "crc"}],
)  # fmt: skip
def test_arguments_that_keep_nothing_are_refused_before_anything_is_made(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgumentError if "max_shard_size" not in arguments else ValueError):
        CheckpointManager(tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()


def test_a_run_keeps_its_last_ones_and_its_best(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, max_to_keep=1, keep_best="acc", metric_mode="max") as manager:
        given: list[Any] = [None, 0.5, {"acc": 0.75, "loss": 3}, torch.tensor(0.25), {"loss": 1.0}, NAN]
        for step, metric in enumerate(given):
            manager.save(step, state(), metric=metric)
        assert manager.all_steps() == [2, 5]
        assert manager.best_step() == 2
        assert manager.latest_step() == 5
        assert manager.restore(state(), 2).metrics == {"acc": 0.75, "loss": 3.0}
        assert math.isnan(manager.restore(state()).metrics["acc"])
    assert litter(tmp_path) == []


@pytest.mark.parametrize("metric", ["low", [1], {"loss": None}, torch.zeros(2), 10**400])
def test_a_metric_that_is_no_number_is_refused_before_anything_is_written(tmp_path: Path, metric: Any) -> None:
    with CheckpointManager(tmp_path / "run") as manager, pytest.raises(InvalidArgumentError, match="must be a number"):
        manager.save(1, state(), metric=metric)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step", [-1, 1.0, "1", True, None, 10**18])
def test_a_step_that_is_no_number_is_refused_before_anything_is_written(tmp_path: Path, step: Any) -> None:
    with CheckpointManager(tmp_path / "run") as manager, pytest.raises(InvalidArgumentError, match="step must be"):
        manager.save(step, state())
    assert not (tmp_path / "run").exists()


def test_a_replaced_step_keeps_its_metrics_unless_others_are_given(tmp_path: Path) -> None:
    """As where the best step is saved once more at the end of an epoch, and nothing was measured meanwhile."""
    state = TrainingState(model=torch.nn.Linear(2, 2))
    with CheckpointManager(tmp_path, max_to_keep=1, keep_best="loss") as manager:
        manager.save(1, state, metric={"loss": 1.0, "accuracy": 0.5})
        manager.save(2, state, metric=3.0)
        manager.save(1, state)
        manager.save(3, state, metric=2.0)
        assert (manager.best_step(), manager.all_steps()) == (1, [1, 3])
        assert manager.restore(state, 1).metrics == {"loss": 1.0, "accuracy": 0.5}
        manager.save(1, state, metric={})
        assert (manager.best_step(), manager.restore(state, 1).metrics) == (3, {})
        assert manager.all_steps() == [1, 3]
        manager.save(4, state)
        assert (manager.best_step(), manager.restore(state, 4).metrics) == (3, {})


def test_other_weights_of_a_replaced_step_do_not_keep_its_metrics(tmp_path: Path) -> None:
    """As after going back to an earlier step; the rotation would keep them, and remove what was measured as best."""
    model = torch.nn.Linear(1, 1)
    state = TrainingState(model=model)
    with CheckpointManager(tmp_path, max_to_keep=1, keep_best="loss") as manager:
        for step, loss in ((1, 0.5), (2, 0.1)):
            torch.nn.init.constant_(model.weight, step)
            manager.save(step, state, metric=loss)
        torch.nn.init.constant_(model.weight, 99.0)
        manager.save(2, state)
        manager.save(3, state, metric=0.9)
        assert (manager.best_step(), manager.restore(state, 3).metrics) == (3, {"loss": 0.9})
        assert manager.all_steps() == [3]


def test_what_is_saved_after_a_restore_of_an_earlier_step_is_the_latest(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, max_to_keep=3) as manager:
        for step in (100, 200):
            manager.save(step, state())
        start = manager.restore(state(), 100)
        assert manager.latest_step() == 200
        manager.save(start + 50, state())
        assert (manager.latest_step(), manager.all_steps()) == (150, [100, 150, 200])
        assert manager.restore_latest(state()) == 150
    with CheckpointManager(tmp_path, max_to_keep=3) as manager:  # and in the next process
        assert manager.restore_latest(state()) == 150
        manager.save(160, state())
        assert manager.all_steps() == [150, 160, 200]  # 100 was the first
        manager.save(start, state())  # a restored step is one
        assert (manager.latest_step(), manager.all_steps()) == (100, [100, 150, 160])


def test_a_damaged_checkpoint_is_no_whole_one_for_rotation(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, max_to_keep=2) as manager:
        for step in (1, 2):
            manager.save(step, state())
        os.unlink(tmp_path / "checkpoint-00000002/checkpoint.json")
        manager.save(3, state())
        assert manager.all_steps() == [1, 3]
        assert manager.verify(1) == {1: []}
        manager.save(2, state())  # in the place of the damaged one
        assert manager.all_steps() == [2, 3]
        assert manager.verify() == {2: [], 3: []}


def test_the_last_whole_one_goes_only_when_the_next_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, rename = [], os.rename

    def watch(source: str, target: str) -> None:
        rename(source, target)
        made.append([name[:10] for name in sorted(os.listdir(tmp_path)) if not name.startswith(".tmp")])

    with CheckpointManager(tmp_path, max_to_keep=1) as manager:
        manager.save(1, state())
        monkeypatch.setattr(os, "rename", watch)
        manager.save(2, state())
    assert made == [["checkpoint", "checkpoint"], [".removed-1", "checkpoint"]]


def test_what_cannot_be_removed_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: str, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", path)

    with CheckpointManager(tmp_path, max_to_keep=1) as manager:
        manager.save(1, state())
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", refuse)
            manager.save(2, state())
            manager.save(2, state())
            manager.save(2, state())
        assert manager.all_steps() == [2]
        assert "Cannot remove" in caplog.text
        assert len(litter(tmp_path)) == 3
    with CheckpointManager(tmp_path, max_to_keep=1) as manager:
        manager.save(3, state())
        assert manager.all_steps() == [3]
    assert litter(tmp_path) == []


def test_files_in_the_place_of_wrecks_and_checkpoints_do_not_stop_a_run(tmp_path: Path) -> None:
    (tmp_path / ".tmp-1-5").write_text("a file")
    (tmp_path / ".removed-1-5").symlink_to(tmp_path)
    (tmp_path / "checkpoint-00000001").write_text("a file")
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state())
        assert manager.verify() == {1: []}
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-00000001", "checkpoint-x", "notes.txt"]


def test_what_another_tool_or_the_user_put_there_is_neither_a_checkpoint_nor_removed(tmp_path: Path) -> None:
    stock = tmp_path / "checkpoint-500"
    stock.mkdir()
    (stock / "trainer_state.json").write_text("{}")
    manager = CheckpointManager(tmp_path, max_to_keep=1)
    assert manager.restore_latest(state()) is None  # a fresh run
    assert (manager.all_steps(), manager.verify()) == ([], {})
    manager.save(4, state())
    shutil.copytree(tmp_path / "checkpoint-00000004", tmp_path / "checkpoint-4")
    assert manager.all_steps() == [4]
    manager.save(5, state())
    manager.save(500, state())

    assert sorted(os.listdir(tmp_path)) == ["checkpoint-00000500", "checkpoint-4", "checkpoint-500"]
    assert manager.verify() == {4: [], 500: []}
    assert (manager.latest_step(), manager.restore(state(), 4)) == (500, 4)
    manager.save(6, state())
    manager.close()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-00000006", "checkpoint-4", "checkpoint-500"]


def test_a_checkpoint_that_was_exchanged_is_not_rotated_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, rename = tmp_path / "checkpoint-00000001", os.rename

    def exchange(source: str, target: str) -> None:
        rename(source, target)
        if target.endswith("2"):
            shutil.rmtree(mine)
            mine.mkdir()
            (mine / "notes.txt").write_text("mine")

    with CheckpointManager(tmp_path, max_to_keep=1) as manager:
        manager.save(1, state())
        monkeypatch.setattr(os, "rename", exchange)
        manager.save(2, state())
    assert (mine / "notes.txt").read_text() == "mine"
