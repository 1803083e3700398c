"""Runs in directory hubs and elsewhere on the disk; pushes beside the training; what an address means."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from hfshard.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    HfshardError,
    HubNotFoundError,
    InvalidArgumentError,
)
from hfshard.format.index import Checksum
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.hub.repo import PushResult
from hfshard.training import CheckpointManager, TrainingState
from tests.helpers import processes
from tests.hub.models import contents


class Run:
    """A model of 41 numbers in training."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.state = TrainingState(model=self.model, optimizer=self.optimizer)

    def step(self) -> torch.Tensor:
        """One step; gives its loss."""
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(torch.randn(2, 4)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def trained(manager: CheckpointManager, steps: int, *, blocking: bool = True) -> Run:
    """A run that was saved at each step."""
    run = Run(0)
    for step in range(1, steps + 1):
        run.step()
        manager.save(step, run.state, blocking=blocking)
    return run


def resumed(root: Path, place: str | os.PathLike[str], losses: list[torch.Tensor]) -> int:
    """Resume another run from there; gives the step, and sees that it goes on as the first did."""
    run = Run(1)
    step = CheckpointManager(root / "no run").restore(run.state, place)
    assert [run.step() for _ in losses[step:]] == losses[step:]
    return step


@pytest.fixture(scope="module")
def losses() -> list[torch.Tensor]:
    """Of the first steps of a run."""
    run = Run(0)
    return [run.step() for _ in range(5)]


def titles(hub: str | Path, revision: str = "main") -> list[str]:
    """Of the commits that a branch has had, the oldest first."""
    from hfshard.hub.directory.commit_graph import read_commit_manifest

    commit: str | None = DirectoryHub.open(hub).resolve(revision)
    found: list[str] = []
    while commit is not None:
        manifest = read_commit_manifest(str(hub), commit)
        found.insert(0, manifest.message)
        commit = manifest.parents[0] if manifest.parents else None
    return found


@dataclass(frozen=True, slots=True)
class PushedRun:
    """A run of three checkpoints, a directory hub that has them, and what the pushes gave."""

    run: Path
    hub: Path
    first: list[PushResult]
    """Of all checkpoints."""
    again: list[PushResult]
    """Of all of them once more."""
    latest: PushResult
    """Of the latest one, which the hub has."""
    old: PushResult
    """Of the first one to the branch `old`."""


@pytest.fixture(scope="module")
def pushed_run(tmp_path_factory: pytest.TempPathFactory) -> PushedRun:
    """Train, save and push; the tests only read it."""
    root = tmp_path_factory.mktemp("pushed")
    hub = root / "srv" / "a hub@home"
    with CheckpointManager(root / "run") as manager:
        trained(manager, 3)
        return PushedRun(
            root / "run",
            hub,
            first=manager.push(hub, "all"),
            again=manager.push(hub, "all"),
            latest=manager.push(hub),
            old=manager.push(hub, 1, revision="old"),
        )


def test_run_goes_to_a_directory_hub_once(pushed_run: PushedRun) -> None:
    assert [one.is_new for one in pushed_run.first] == [True, True, True]
    assert titles(pushed_run.hub) == ["Checkpoint at step 1", "Checkpoint at step 2", "Checkpoint at step 3"]
    assert pushed_run.again == []
    assert (pushed_run.latest.is_new, pushed_run.old.is_new) == (False, True)


def test_run_resumes_from_any_commit_of_a_directory_hub(
    pushed_run: PushedRun, tmp_path: Path, losses: list[torch.Tensor]
) -> None:
    for step, one in enumerate(pushed_run.first, 1):
        assert contents(Path(one.url)) == contents(pushed_run.run / f"checkpoint-{step:08d}")
        assert resumed(tmp_path, f"{pushed_run.hub}@{one.commit}", losses) == step


def test_run_resumes_from_a_branch_of_a_directory_hub(
    pushed_run: PushedRun, tmp_path: Path, losses: list[torch.Tensor]
) -> None:
    hub = pushed_run.hub
    assert resumed(tmp_path, hub, losses) == 3
    assert resumed(tmp_path, f"{hub}@old", losses) == 1
    assert resumed(tmp_path, f"file://{str(hub).replace(' ', '%20')}@old", losses) == 1
    with pytest.raises(HubNotFoundError, match="nowhere"):
        resumed(tmp_path, f"{hub}@nowhere", losses)


def test_checkpoint_of_another_run_directory_restores(
    tmp_path: Path, losses: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        trained(manager, 2)
    path = tmp_path / "run" / "checkpoint-00000001"
    monkeypatch.chdir(tmp_path / "run")
    for place in (path, str(path), "checkpoint-00000001", "./checkpoint-00000001", path.as_uri()):
        assert resumed(tmp_path, place, losses) == 1
    (path / "optimizer.safetensors").unlink()
    with pytest.raises(HfshardError, match=r"optimizer\.safetensors' is missing"):
        resumed(tmp_path, path, losses)


def test_directories_that_hold_no_checkpoint_are_told(tmp_path: Path, losses: list[torch.Tensor]) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        trained(manager, 1)
    hint = rf"there is no checkpoint\.json\. It is a run\. .* '{tmp_path}/run/checkpoint-00000001'\."
    with pytest.raises(CheckpointNotFoundError, match=hint):
        resumed(tmp_path, tmp_path / "run", losses)
    with pytest.raises(CheckpointNotFoundError, match=r"If it is a model, load it with hfshard\.load_model"):
        resumed(tmp_path, tmp_path, losses)
    with pytest.raises(CheckpointNotFoundError, match="There is no directory"):
        resumed(tmp_path, tmp_path / "gone", losses)
    with pytest.raises(InvalidArgumentError, match=r"Pass a step as a number: 1\."):
        resumed(tmp_path, "1", losses)


def test_what_is_not_a_checkpoint_is_not_pushed(tmp_path: Path, losses: list[torch.Tensor]) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        trained(manager, 1)
    with pytest.raises(CheckpointNotFoundError, match="It has: 1"):
        CheckpointManager(tmp_path / "run").push(tmp_path / "hub", 7)
    with pytest.raises(CheckpointNotFoundError, match="There is no checkpoint in"):
        CheckpointManager(tmp_path / "none").push(tmp_path / "hub")
    with pytest.raises(CheckpointNotFoundError, match=r"manager\.save\(step, state, metric="):
        CheckpointManager(tmp_path / "run", keep_best="loss").push(tmp_path / "hub", "best")
    with pytest.raises(InvalidArgumentError, match="pull request is for one checkpoint"):
        CheckpointManager(tmp_path / "run").push(tmp_path / "hub", "all", create_pr=True)
    with pytest.raises(InvalidArgumentError, match=r"'best', 'all' or None, got 'latest'\."):
        CheckpointManager(tmp_path / "run").push(tmp_path / "hub", "latest")  # type: ignore[call-overload]
    assert not (tmp_path / "hub").exists()


def test_state_without_a_model_leaves_the_model_that_is_there(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    parameter = nn.Parameter(torch.ones(3))
    ema = nn.ParameterList([parameter])
    state = TrainingState(ema=ema, optimizer=torch.optim.SGD([parameter], momentum=0.9))
    from tests.hub.directory.helpers import push

    push(DirectoryHub.create(hub), {"model.safetensors": b"a user's", "pytorch_model.bin": b"another's"})
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, state)
        manager.push(hub)
    files = contents(Path(DirectoryHub.open(hub).snapshot()))
    assert files.pop("model.safetensors") == b"a user's"
    assert files.pop("pytorch_model.bin") == b"another's"
    assert files == contents(tmp_path / "run" / "checkpoint-00000001")


@pytest.mark.parametrize("checksum", ["sha256", "xxh3"])
@pytest.mark.parametrize("limit", [200, "5GB"])
def test_files_are_pushed_with_the_hashes_of_their_bytes(
    tmp_path: Path, losses: list[torch.Tensor], checksum: Checksum, limit: int | str
) -> None:
    hub = tmp_path / "hub"
    with CheckpointManager(tmp_path / "run", max_shard_size=limit, checksum=checksum) as manager:
        run = trained(manager, 1)
        manager.save(2, run.state)  # files whose hashes are known from the one before
        pushed = manager.push(hub, "all")
    for one in pushed:
        DirectoryHub.open(hub).verify(one.commit)
    assert resumed(tmp_path, f"{hub}@{pushed[0].commit}", losses) == 1


@contextmanager
def occupied(hub: Path) -> Iterator[None]:
    """While the block runs, pushes to a directory hub wait."""
    fd = os.open(hub, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


def test_saves_go_on_beside_a_push_and_the_newest_is_pushed_next(tmp_path: Path, losses: list[torch.Tensor]) -> None:
    hub, root = tmp_path / "hub", tmp_path / "run"
    DirectoryHub.create(hub)
    manager = CheckpointManager(root, max_to_keep=1, push_to_hub=f"{hub}@runs")
    with occupied(hub):
        trained(manager, 3, blocking=False)
        assert manager.all_steps() == [1, 2, 3]  # the first is being pushed, and what waits stays too
    manager.wait_until_finished()
    assert titles(hub, "runs") == ["Checkpoint at step 1", "Checkpoint at step 3"]
    assert manager.all_steps() == [3]
    manager.close()
    assert resumed(tmp_path, f"{hub}@runs", losses) == 3


def test_failed_pushes_stop_nothing_and_waiting_raises_the_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "model.safetensors").write_bytes(b"no hub")
    manager = CheckpointManager(tmp_path / "run", push_to_hub=hub)
    with caplog.at_level(logging.WARNING):
        trained(manager, 2, blocking=False)
        with pytest.raises(HfshardError, match="hub"):
            manager.wait_until_finished()
    assert "The checkpoint of step 2 was saved, but not pushed" in caplog.text
    manager.wait_until_finished()  # raised once
    assert manager.all_steps() == [1, 2]
    (hub / "model.safetensors").unlink()
    with manager:
        trained(manager, 1)
    assert titles(hub) == ["Checkpoint at step 1"]


def test_end_of_the_process_waits_for_the_last_push(tmp_path: Path, child_environment: dict[str, str]) -> None:
    code = f"""
import torch
from torch import nn
from hfshard.training import CheckpointManager, TrainingState
model = nn.Linear(2, 2)
manager = CheckpointManager({str(tmp_path / "run")!r}, push_to_hub={str(tmp_path / "hub")!r}, max_shard_size=200)
manager.save(1, TrainingState(model=model, optimizer=torch.optim.Adam(model.parameters())), blocking=False)
"""
    done = processes.run_fresh(["-c", code], env=child_environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert titles(tmp_path / "hub") == ["Checkpoint at step 1"]


def test_address_that_can_be_none_is_refused_at_once(tmp_path: Path) -> None:
    for address in ("a/b/c", "org/name@", "@main", "https://huggingface.co/org/name"):
        with pytest.raises((InvalidArgumentError, HubNotFoundError)):
            CheckpointManager(tmp_path / "run", push_to_hub=address)


def test_a_link_is_pushed_as_what_it_leads_to_if_that_is_what_was_saved(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run")
    trained(manager, 1)
    saved = contents(Path(manager.path_of(1)))
    for name in ("model.safetensors", "training_state.json"):
        path = Path(manager.path_of(1)) / name
        path.rename(tmp_path / name)
        path.symlink_to(tmp_path / name)

    pushed = manager.push(tmp_path / "hub")

    assert contents(Path(pushed.url)) == saved
    assert not any(path.is_symlink() for path in Path(pushed.url).iterdir())
    (tmp_path / "training_state.json").write_bytes(b"a secret")
    with pytest.raises(DamagedCheckpointError, match="is not the file that was saved"):
        manager.push(tmp_path / "hub")
