"""Shards that did not change since the checkpoint before are linked, not written again; and only whole ones."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from hfshard.training import CheckpointManager, TrainingState
from tests.training.run import storage_contract

LIMIT = 4096 + 64 * 64 * 4
"""Bytes of a shard that holds one layer's weight."""


class Three(nn.Module):
    """Two frozen layers and one that is trained, a shard each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(64, 64, bias=False) for _ in range(3))
        for number, layer in enumerate((self.a, self.b, self.c)):
            nn.init.constant_(layer.weight, float(number + 1))

    def train_a_step(self) -> None:
        with torch.no_grad():
            self.c.weight += 1


def save(manager: CheckpointManager, step: int, model: nn.Module, *, blocking: bool = True) -> Path:
    path = Path(manager.save(step, TrainingState(model=model), blocking=blocking))
    manager.wait_until_finished()
    return path


def inodes(checkpoint: Path) -> dict[str, tuple[int, int]]:
    """File -> inode and number of names."""
    found = {path.name: path.stat() for path in checkpoint.iterdir()}
    return {name: (status.st_ino, status.st_nlink) for name, status in found.items() if name.startswith("model-")}


A, B, C = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("checksum", ["xxh3", "sha256"])
def test_frozen_shards_are_linked_and_changed_ones_are_not(tmp_path: Path, checksum: str, blocking: bool) -> None:
    model, manager = Three(), CheckpointManager(tmp_path, max_shard_size=LIMIT, checksum=checksum)  # type: ignore[arg-type]
    before = save(manager, 1, model, blocking=blocking)
    model.train_a_step()
    after = save(manager, 2, model, blocking=blocking)
    old, new = inodes(before), inodes(after)
    assert {name: count for name, (_, count) in new.items()} == {A: 2, B: 2, C: 1}
    assert (old[A], old[B]) == (new[A], new[B])
    assert old[C] != new[C]
    third = save(manager, 3, model, blocking=blocking)
    assert {name: count for name, (_, count) in inodes(third).items()} == {A: 3, B: 3, C: 2}
    assert manager.verify() == {1: [], 2: [], 3: []}
    fresh = Three()
    manager.restore(TrainingState(model=fresh), 2)
    assert [layer.weight[0, 0].item() for layer in (fresh.a, fresh.b, fresh.c)] == [1, 2, 4]


def test_only_what_changed_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, manager = Three(), CheckpointManager(tmp_path, max_shard_size=LIMIT)
    before = save(manager, 1, model)
    model.train_a_step()
    after = save(manager, 2, model)
    written = [path.stat().st_blocks * 512 for path in after.iterdir() if path.stat().st_nlink == 1]
    everything = sum(path.stat().st_blocks * 512 for path in before.iterdir())
    assert sum(written) <= everything - 2 * 64 * 64 * 4


def test_a_linked_checkpoint_outlives_the_one_before(tmp_path: Path) -> None:
    model, manager = Three(), CheckpointManager(tmp_path, max_shard_size=LIMIT, max_to_keep=1)
    for step in range(1, 5):
        model.train_a_step()
        checkpoint = save(manager, step, model)
        assert {name: count for name, (_, count) in inodes(checkpoint).items()} == {A: 1, B: 1, C: 1}
    assert manager.verify() == {4: []}
    fresh = Three()
    assert manager.restore_latest(TrainingState(model=fresh)) == 4
    assert [layer.weight[0, 0].item() for layer in (fresh.a, fresh.b, fresh.c)] == [1, 2, 7]


def test_a_checkpoint_that_is_replaced_gives_its_shards_to_the_new_one(tmp_path: Path) -> None:
    model, manager = Three(), CheckpointManager(tmp_path, max_shard_size=LIMIT)
    old = inodes(save(manager, 1, model))
    model.train_a_step()
    new = inodes(save(manager, 1, model))
    assert (old[A], old[B]) == (new[A], new[B])
    assert old[C][0] != new[C][0] or new[C][1] == 1
    assert manager.verify() == {1: []}


@pytest.mark.parametrize("position", [100, 4096, 4096 + 8000])
def test_a_shard_that_has_rotted_is_written_anew(tmp_path: Path, position: int) -> None:
    model, manager = Three(), CheckpointManager(tmp_path, max_shard_size=LIMIT)
    before = save(manager, 1, model)
    raw = bytearray((before / A).read_bytes())
    raw[position] ^= 4
    (before / A).write_bytes(raw)
    after = save(manager, 2, model)
    assert {name: count for name, (_, count) in inodes(after).items()} == {A: 1, B: 2, C: 2}
    assert manager.verify(2) == {2: []}
    assert manager.verify(1)[1] != []


@pytest.mark.parametrize("damage", ["gone", "short", "empty", "a directory", "a link"])
def test_a_shard_that_is_not_there_any_more_is_written_anew(tmp_path: Path, damage: str) -> None:
    model, manager = Three(), CheckpointManager(tmp_path / "run", max_shard_size=LIMIT)
    path = save(manager, 1, model) / A
    if damage in ("short", "empty"):
        os.truncate(path, 5000 if damage == "short" else 0)
    else:
        path.rename(tmp_path / "aside")
    if damage == "a directory":
        path.mkdir()
    elif damage == "a link":
        path.symlink_to(tmp_path / "aside")
    after = save(manager, 2, model)
    assert {name: count for name, (_, count) in inodes(after).items()} == {A: 1, B: 2, C: 2}
    assert manager.verify(2) == {2: []}
    assert not (after / A).is_symlink()


@pytest.mark.parametrize("error", [errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EXDEV])
def test_where_there_are_no_hard_links_all_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def refuse(source: str, target: str, **_: object) -> None:
        raise OSError(error, os.strerror(error), source, None, target)

    monkeypatch.setattr(os, "link", refuse)
    model, manager = Three(), CheckpointManager(tmp_path, max_shard_size=LIMIT)
    for step in (1, 2):
        checkpoint = save(manager, step, model)
        assert {name: count for name, (_, count) in inodes(checkpoint).items()} == {A: 1, B: 1, C: 1}
    assert manager.verify() == {1: [], 2: []}


def test_weights_that_differ_behind_the_sample_are_not_linked(tmp_path: Path) -> None:
    """A sample is of the first 4 KiB of each tensor; the whole checksum decides."""
    model, manager = Three(), CheckpointManager(tmp_path, max_shard_size=LIMIT)
    save(manager, 1, model)
    with torch.no_grad():
        model.a.weight[63, 63] = 9
    after = save(manager, 2, model)
    assert {name: count for name, (_, count) in inodes(after).items()} == {A: 1, B: 2, C: 2}
    fresh = Three()
    manager.restore(TrainingState(model=fresh), 2)
    assert fresh.a.weight[63, 63] == 9


def test_other_shards_and_another_checksum_are_not_linked(tmp_path: Path) -> None:
    model = Three()
    with CheckpointManager(tmp_path, max_shard_size=LIMIT) as manager:
        save(manager, 1, model)
        one = Path(manager.save(2, TrainingState(model=model), max_shard_size="1MB"))
        assert (one / "model.safetensors").stat().st_nlink == 1
    with CheckpointManager(tmp_path, max_shard_size="1MB", checksum="sha256") as manager:
        other = save(manager, 3, model)
        assert (other / "model.safetensors").stat().st_nlink == 1
        assert manager.verify() == {1: [], 2: [], 3: []}


def test_a_small_file_may_be_binary(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainingState(model=nn.Linear(2, 2)), files={"spiece.model": b"\x0a\x00\xff\x00"})
        assert manager.restore_latest(TrainingState(model=nn.Linear(2, 2))) == 1
        (tmp_path / "checkpoint-00000001" / "spiece.model").write_bytes(b"\x0a\x00\xff\x01")
        [problem] = manager.verify(1)[1]
    assert "spiece.model' is not the file that was saved: its sha256 is " in str(problem)


# A run in a directory does what every storage of a run does.


def test_saves_and_removals_are_listed(tmp_path: Path) -> None:
    storage_contract.check_listings_and_removals(str(tmp_path / "run"))


def test_a_checkpoint_opens_its_folder_and_notices_that_it_is_replaced(tmp_path: Path) -> None:
    storage_contract.check_folders(str(tmp_path / "run"))


def test_a_refused_save_leaves_all_as_it_was(tmp_path: Path) -> None:
    storage_contract.check_refused_save(str(tmp_path / "run"))


def test_a_save_keeps_no_metrics_of_other_weights(tmp_path: Path) -> None:
    storage_contract.check_metrics_of_other_weights(str(tmp_path / "run"))


def test_a_save_keeps_no_metrics_of_a_copy(tmp_path: Path) -> None:
    root = tmp_path / "run"
    storage_contract.check_metrics_of_a_copy(str(root), lambda old, new: os.rename(root / old, root / new))
