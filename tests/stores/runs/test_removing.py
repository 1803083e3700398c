"""Removals from runs in stores: one checkpoint, and what killed saves have left in any folder."""

from __future__ import annotations

from pathlib import Path

import pytest

import hfshard
from hfshard.errors import CheckpointNotFoundError, InvalidArgumentError, StoreError
from hfshard.stores.open_store import open_store
from hfshard.training import CheckpointManager, TrainingState
from tests.stores.runs.bucket_run import BucketRun, Net, save_steps

pytestmark = pytest.mark.parametrize("scheme", ["s3", "hf"])

FIRST = "checkpoint-00000001"
ID = "00112233445566ff"


@pytest.fixture
def saved(run: BucketRun) -> BucketRun:
    """A run of three checkpoints."""
    with CheckpointManager(run.root) as manager:
        save_steps(manager, 1, 2, 3)
    return run


def restored(run: BucketRun) -> tuple[int | None, float]:
    net = Net()
    step = CheckpointManager(run.root).restore_latest(TrainingState(model=net))
    return step, net.value()


@pytest.mark.parametrize("by_step", [True, False])
def test_one_checkpoint_of_a_run_goes(saved: BucketRun, by_step: bool) -> None:
    saved.put("checkpoint-00000003/notes.txt", b"keep")
    dry = hfshard.remove_checkpoint(saved.root, step=3, dry_run=True)
    assert {f"checkpoint-00000003/{name}" for name in dry.removed} == {
        *saved.names("checkpoint-00000003/"),
    } - {"checkpoint-00000003/notes.txt"}

    if by_step:
        report = hfshard.remove_checkpoint(saved.root, step=3)
    else:
        report = hfshard.remove_checkpoint(f"{saved.root}/checkpoint-00000003")

    assert report.kept == {"notes.txt": "not part of the checkpoint"}
    assert saved.names("checkpoint-00000003/") == ["checkpoint-00000003/notes.txt"]
    assert restored(saved) == (2, 2.0)
    with pytest.raises(CheckpointNotFoundError, match="There is no checkpoint of step 3"):
        hfshard.remove_checkpoint(saved.root, step=3)
    with CheckpointManager(saved.root) as manager:
        save_steps(manager, 4)
    assert restored(saved) == (4, 4.0)


def test_a_whole_run_is_refused(saved: BucketRun) -> None:
    before = saved.names()

    with pytest.raises(InvalidArgumentError, match=r"is a run. Choose one of its checkpoints by step \(3, 2, 1\)"):
        hfshard.remove_checkpoint(saved.root)

    assert saved.names() == before


def test_a_checkpoint_that_another_tool_uploaded_goes(saved: BucketRun, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        save_steps(manager, 1, 2, 9)
    for path in (tmp_path / "run" / "checkpoint-00000009").iterdir():
        saved.put(f"checkpoint-00000009/{path.name}", path.read_bytes())
    saved.put("checkpoint-00000009/notes.txt", b"keep")

    report = hfshard.remove_checkpoint(saved.root, step=9)

    assert sorted(report.removed) == [
        "checkpoint.json",
        "model.safetensors",
        "state.safetensors",
        "training_state.json",
    ]
    assert saved.names("checkpoint-00000009") == ["checkpoint-00000009/notes.txt"]
    assert restored(saved) == (3, 3.0)


def test_leftovers_are_what_is_lower_than_the_highest_manifest(saved: BucketRun) -> None:
    whole = saved.names()
    stray, higher = (
        f"{FIRST}/model-00001-of-00001-00000002-{ID}.safetensors",
        f"{FIRST}/state-00000009-{ID}.safetensors",
    )
    mark, higher_mark = f".saves/{FIRST}-00000002-{ID}", f".saves/{FIRST}-00000009-{ID}"
    for name in (stray, higher, mark, higher_mark):
        saved.put(name, b"12345678")

    dry = hfshard.remove_checkpoint(saved.root, leftovers=True, dry_run=True)
    hfshard.remove_checkpoint(saved.root, leftovers=True)

    assert dry.removed.keys() == {stray, mark}
    assert dry.removed[stray] == 8
    assert dry.kept.keys() >= {higher, higher_mark}
    assert saved.names() == sorted([*whole, higher, higher_mark])
    hfshard.remove_checkpoint(saved.root, leftovers=True, unfinished=True)
    assert saved.names() == whole
    assert restored(saved) == (3, 3.0)


def test_plain_copies_that_outlived_their_save_are_leftovers(saved: BucketRun) -> None:
    store = open_store(f"{saved.root}/{FIRST}")
    names = sorted(store.list_objects())
    (manifest,) = (name for name in names if name.startswith("checkpoint-"))
    saved.put(f"{FIRST}/notes.txt", b"keep")
    saved.delete(f"{FIRST}/{manifest}")

    report = hfshard.remove_checkpoint(saved.root, leftovers=True)

    assert report.removed.keys() == {f"{FIRST}/{name}" for name in names if name != manifest}
    assert saved.names(FIRST) == [f"{FIRST}/notes.txt"]
    assert restored(saved) == (3, 3.0)


def test_a_removal_that_is_killed_leaves_the_checkpoint_or_none(
    saved: BucketRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(saved.root)
    kind = type(store)
    delete = kind.delete
    calls = [0]

    def fail(self: object, names: object) -> None:
        calls[0] += 1
        if calls[0] > 2:
            raise StoreError("killed")
        delete(self, names)  # type: ignore[arg-type]

    monkeypatch.setattr(kind, "delete", fail)
    with pytest.raises(StoreError, match="killed"):
        hfshard.remove_checkpoint(saved.root, step=3)
    monkeypatch.setattr(kind, "delete", delete)

    assert restored(saved) in ((3, 3.0), (2, 2.0))
    assert saved.names("checkpoint-00000003/") != []
    hfshard.remove_checkpoint(saved.root, leftovers=True, unfinished=True)
    if restored(saved) == (3, 3.0):
        hfshard.remove_checkpoint(saved.root, step=3)
    assert saved.names("checkpoint-00000003/") == []
