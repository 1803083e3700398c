"""A Trainer that resumes from where its checkpoints are: the Hub and directory hubs, on a machine without a run."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from hfshard.errors import CheckpointNotFoundError, HubNotFoundError, IntegrityError
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.training import CheckpointCallback, CheckpointManager
from tests.hub.on_ranks import talking_to
from tests.hubserver.hub_server import HubServer
from tests.training.integrations.trainer_child import Case, everything, trainer

pytestmark = pytest.mark.compat

CASE = Case(0, (), {"max_steps": 9, "save_steps": 3, "logging_steps": 2})


@dataclass(frozen=True, slots=True)
class Pushed:
    """A training that ran straight, and has pushed its checkpoints."""

    hub: Path
    middle: str
    """The commit of its second checkpoint, which lies amid an epoch."""
    everything: dict[str, str]


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Pushed:
    place = tmp_path_factory.mktemp("pushed")
    hub = place / "hub"
    trained = trainer(CASE, place)
    CheckpointCallback(push_to_hub=hub).attach(trained)
    trained.train()
    [middle] = [one.commit for one in DirectoryHub.open(hub).revisions() if one.message == "Checkpoint at step 6"]
    return Pushed(hub, middle, everything(trained))


class Steps(TrainerCallback):
    """Notes which steps begin."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun.append(state.global_step)


def resumed(directory: Path, place: Any, callback: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """Resume a training in a directory that has no checkpoint."""
    trained = trainer(CASE, directory, **arguments)
    CheckpointCallback(**callback or {}).attach(trained)
    trained.train(resume_from_checkpoint=place)
    return trained


def weights(trained: Any) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in trained.model.state_dict().items()}


def test_a_commit_of_a_directory_hub_is_resumed_exactly(
    pushed: Pushed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pushed.hub.parent)
    DirectoryHub.open(pushed.hub).branch("middle", pushed.middle)
    for number, place in enumerate(
        (f"./hub@{pushed.middle}", "hub@middle", f"file://{pushed.hub}@{pushed.middle}", Path(f"{pushed.hub}@middle"))
    ):
        trained = resumed(tmp_path / str(number), place)
        assert everything(trained) == pushed.everything, place
        [saved] = (tmp_path / str(number) / "run").iterdir()
        assert saved.name == "checkpoint-00000009", place


def test_true_is_what_was_pushed_where_the_run_has_nothing(
    pushed: Pushed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pushed.hub.parent)
    trained = trainer(CASE, tmp_path, save_strategy="no")
    CheckpointCallback(push_to_hub=f"./hub@{pushed.middle}").attach(trained)
    monkeypatch.chdir(tmp_path)
    trained.train(resume_from_checkpoint=True)
    assert everything(trained) == pushed.everything

    hub = DirectoryHub.open(pushed.hub)
    shutil.copytree(hub.snapshot(), tmp_path / "run" / "checkpoint-00000009")
    steps = Steps()
    trained = trainer(CASE, tmp_path, max_steps=11, save_strategy="no")
    trained.add_callback(steps)
    CheckpointCallback(push_to_hub=f"{pushed.hub}@{pushed.middle}").attach(trained)
    trained.train(resume_from_checkpoint=True)
    assert steps.begun == [9, 10]


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's own, of httpx
def test_the_hub_is_resumed_exactly_and_each_file_comes_once(
    hub_server: HubServer, pushed: Pushed, tmp_path: Path
) -> None:
    with talking_to(hub_server.endpoint, tmp_path / "home"):
        manager = CheckpointManager(pushed.hub.parent / "run")
        manager.push("org/run", "all")
        middle = manager.push("org/run", 6, revision="middle").commit
        hub_server.clear_log()

        for number, (place, address) in enumerate(((f"org/run@{middle}", None), (True, "org/run@middle"))):
            callback = {"push_to_hub": address}
            trained = resumed(tmp_path / str(number), place, callback, save_strategy="no")
            assert everything(trained) == pushed.everything, place
    downloads = [request.path for request in hub_server.log if request.kind == "storage_get"]
    assert len(downloads) == len(set(downloads)) == 3  # of the model, the optimizer, the rest


def test_what_trainer_alone_has_pushed_is_resumed_as_ever(hub_server: HubServer, tmp_path: Path) -> None:
    alone = trainer(CASE, tmp_path / "alone")
    alone.train()
    run = tmp_path / "alone" / "run"
    repo = hub_server.create_repo("org/stock")
    for name, numbers in (("checkpoint-3 checkpoint-6", "all"), ("last-checkpoint", "newest")):
        files = {
            f"{folder}/{path.name}": path.read_bytes()
            for folder in name.split()
            for path in (run / folder.replace("last-checkpoint", "checkpoint-6")).iterdir()
        }
        repo.commit({"config.json": b"{}", **files}, numbers)

        with talking_to(hub_server.endpoint, tmp_path / numbers):
            trained = resumed(tmp_path / f"resumed {numbers}", "org/stock", save_strategy="no")
            assert everything(trained) == everything(alone)
            with pytest.raises(CheckpointNotFoundError, match="holds no training checkpoint"):
                resumed(tmp_path / "none", f"org/stock@{repo.commits()[-1].oid}", save_strategy="no")


def test_a_best_model_that_was_downloaded_is_loaded_in_the_end(tmp_path: Path) -> None:
    best = {
        "eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "loss", "load_best_model_at_end": True,
        "greater_is_better": True, "learning_rate": 0.3,
    }  # fmt: skip
    first = trainer(CASE, tmp_path / "first", max_steps=3, **best)
    CheckpointCallback(push_to_hub=tmp_path / "hub").attach(first)
    first.train()

    again = trainer(CASE, tmp_path / "second", **best)
    CheckpointCallback().attach(again)
    again.train(resume_from_checkpoint=f"{tmp_path}/hub")

    assert again.state.best_global_step == 3, "its loss is the highest"
    assert weights(again) == weights(first)


def test_what_is_damaged_or_not_there_is_refused_by_name(pushed: Pushed, tmp_path: Path) -> None:
    trained = trainer(CASE, tmp_path, save_strategy="no")
    CheckpointCallback(push_to_hub=tmp_path / "none").attach(trained)
    before = weights(trained)
    with pytest.raises(CheckpointNotFoundError, match=r"There is no directory '.*/none'"):
        trained.train(resume_from_checkpoint=True)
    assert not (tmp_path / "none").exists()
    with pytest.raises(HubNotFoundError, match="has no revision 'v2'"):
        trained.train(resume_from_checkpoint=f"{pushed.hub}@v2")
    with pytest.raises(CheckpointNotFoundError, match=r"There is no file or directory 'run/checkpoint-3' either"):
        trained.train(resume_from_checkpoint="run/checkpoint-3")

    hub = DirectoryHub.open(pushed.hub)
    snapshot = Path(hub.snapshot())
    file = snapshot / "optimizer.safetensors"
    raw = file.read_bytes()
    file.chmod(0o644)
    file.write_bytes(raw[:-2] + bytes([raw[-2] ^ 4]) + raw[-1:])
    try:
        with pytest.raises(IntegrityError, match=r"optimizer\.safetensors"):
            trained.train(resume_from_checkpoint=str(pushed.hub))
    finally:
        file.write_bytes(raw)
    assert weights(trained) == before
