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
from hfshard.training import CheckpointManager
from tests.flows.resume_trainings import everything, trainer
from tests.hub.on_ranks import talking_to
from tests.servers.hub.hub_server import HubServer
from tests.training.integrations.test_trainer import CASE, EVALUATED, attached, flipped, resumed, same, weights

pytestmark = pytest.mark.compat

NINE: dict[str, Any] = {"max_steps": 9, "save_steps": 3, "logging_steps": 2}


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
    trained, _ = attached(place, {"push_to_hub": hub}, **NINE)
    trained.train()
    [middle] = [one.commit for one in DirectoryHub.open(hub).revisions() if one.message == "Checkpoint at step 6"]
    return Pushed(hub, middle, everything(trained))


def test_a_commit_of_a_directory_hub_is_resumed_exactly(
    pushed: Pushed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pushed.hub.parent)
    DirectoryHub.open(pushed.hub).branch("middle", pushed.middle)
    for number, place in enumerate(
        (f"./hub@{pushed.middle}", "hub@middle", f"file://{pushed.hub}@{pushed.middle}", Path(f"{pushed.hub}@middle"))
    ):
        trained = resumed(tmp_path / str(number), place, **NINE, save_strategy="steps")
        assert everything(trained) == pushed.everything, place
        [saved] = (tmp_path / str(number) / "run").iterdir()
        assert saved.name == "checkpoint-00000009", place


def test_true_is_what_was_pushed_where_the_run_has_nothing(
    pushed: Pushed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pushed.hub.parent)
    trained, _ = attached(tmp_path, {"push_to_hub": f"./hub@{pushed.middle}"}, **NINE, save_strategy="no")
    monkeypatch.chdir(tmp_path)
    trained.train(resume_from_checkpoint=True)
    assert everything(trained) == pushed.everything

    shutil.copytree(DirectoryHub.open(pushed.hub).snapshot(), tmp_path / "run" / "checkpoint-00000009")
    begun: list[int] = []

    class Noting(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            begun.append(state.global_step)

    arguments = {**NINE, "max_steps": 11, "save_strategy": "no"}
    trained, _ = attached(tmp_path, {"push_to_hub": f"{pushed.hub}@{pushed.middle}"}, **arguments)
    trained.add_callback(Noting())
    trained.train(resume_from_checkpoint=True)
    assert begun == [9, 10]


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
            trained = resumed(tmp_path / str(number), place, {"push_to_hub": address}, **NINE)
            assert everything(trained) == pushed.everything, place
    downloads = [request.path for request in hub_server.log if request.kind == "storage_get"]
    assert len(downloads) == len(set(downloads)) == 3  # of the model, the optimizer, the rest


def test_what_trainer_alone_has_pushed_is_resumed_as_ever(
    hub_server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    alone = trainer(CASE, tmp_path / "alone", **NINE)
    alone.train()
    run = tmp_path / "alone" / "run"
    repo = hub_server.create_repo("org/stock")
    for name, numbers, address in (
        ("checkpoint-3 checkpoint-6", "all", "org/stock"),
        ("last-checkpoint", "newest", "org/stock@main"),
    ):
        files = {
            f"{folder}/{path.name}": path.read_bytes()
            for folder in name.split()
            for path in (run / folder.replace("last-checkpoint", "checkpoint-6")).iterdir()
        }
        repo.commit({"config.json": b"{}", **files}, numbers)

        with talking_to(hub_server.endpoint, tmp_path / numbers):
            trained = resumed(tmp_path / f"resumed {numbers}", address, **NINE)
            assert everything(trained) == everything(alone)
            with pytest.raises(CheckpointNotFoundError, match="holds no training checkpoint"):
                resumed(tmp_path / "none", f"org/stock@{repo.commits()[-1].oid}", **NINE)
        (tmp_path / "org" / "stock").mkdir(parents=True, exist_ok=True)  # as an output_dir of the repo's name


def test_a_best_model_that_was_downloaded_is_loaded_in_the_end(tmp_path: Path) -> None:
    best: dict[str, Any] = {
        **NINE,
        **EVALUATED,
        "eval_steps": 3,
        "load_best_model_at_end": True,
        "greater_is_better": True,
    }
    best["learning_rate"] = 0.3
    first, _ = attached(tmp_path / "first", {"push_to_hub": tmp_path / "hub"}, **{**best, "max_steps": 3})
    first.train()

    again = resumed(tmp_path / "second", f"{tmp_path}/hub", **best, save_strategy="steps")

    assert again.state.best_global_step == 3, "its loss is the highest"
    assert same(weights(again.model), weights(first.model))


def test_what_is_damaged_or_not_there_is_refused_by_name(pushed: Pushed, tmp_path: Path) -> None:
    trained, _ = attached(tmp_path, {"push_to_hub": tmp_path / "none"}, **NINE, save_strategy="no")
    before = weights(trained.model)
    with pytest.raises(CheckpointNotFoundError, match=r"There is no directory '.*/none'"):
        trained.train(resume_from_checkpoint=True)
    assert not (tmp_path / "none").exists()
    with pytest.raises(HubNotFoundError, match="has no revision 'v2'"):
        trained.train(resume_from_checkpoint=f"{pushed.hub}@v2")
    with pytest.raises(CheckpointNotFoundError, match=r"There is no file or directory 'run/checkpoint-3' either"):
        trained.train(resume_from_checkpoint="run/checkpoint-3")

    with (
        flipped(Path(DirectoryHub.open(pushed.hub).snapshot()) / "optimizer.safetensors"),
        pytest.raises(IntegrityError, match=r"optimizer\.safetensors"),
    ):
        trained.train(resume_from_checkpoint=str(pushed.hub))
    assert same(weights(trained.model), before)
