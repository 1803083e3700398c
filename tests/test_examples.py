"""The examples in the docstrings of the public face: every function has one, and they run."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import hfshard
import hfshard.distributed
import hfshard.hub
import hfshard.signing
import hfshard.training
from tests.helpers.examples import example_of, public_members, with_local_hub
from tests.helpers.tiny_bert import Bert, bert
from tests.signing.certificates import Authority
from tests.signing.conftest import write_pair

PACKAGES = (hfshard, hfshard.distributed, hfshard.hub, hfshard.signing, hfshard.training)
PUBLIC = dict(member for package in PACKAGES for member in public_members(package))
EXAMPLES = {name: example for name, member in PUBLIC.items() if (example := example_of(member.__doc__))}

TRANSFORMERS_METHODS = {
    f"hfshard.ShardedModelMixin.{name}" for name in ("save_pretrained", "from_pretrained", "push_to_hub")
}
CLASSES_TO_USE = {
    "hfshard.CheckpointManager",
    "hfshard.ShardedModelMixin",
    "hfshard.distributed.StorageReader",
    "hfshard.distributed.StorageWriter",
    "hfshard.training.CheckpointCallback",
    "hfshard.training.Gradients",
    "hfshard.training.ResumableDataLoader",
    "hfshard.training.TrainingState",
}
"""Those that users create; they receive the others as results."""

NEEDS_TRAINER = {
    "hfshard.training.CheckpointCallback",
    "hfshard.training.lightning_callback",
    "hfshard.training.prepare_loader",
    "hfshard.training.prepared_state",
}
"""Examples around an object of another library: tests/training/integrations and tests/programs make the same calls."""


def is_in_need_of_an_example(name: str) -> bool:
    """Whether it is a function of a package, a method of the mixin that replaces transformers', or a class to use."""
    package = name.rpartition(".")[0]
    is_member_of_a_package = package in {one.__name__ for one in PACKAGES}
    if inspect.isfunction(PUBLIC[name]):
        return is_member_of_a_package or name in TRANSFORMERS_METHODS
    return name in CLASSES_TO_USE


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that were saved and pushed, and a run; each example has a copy."""
    place = tmp_path_factory.mktemp("files")
    model = nn.Linear(4, 4)
    for name in ("out", "base", "fine-tuned"):
        hfshard.save_model(model, place / name)
    bert(1.0).save_pretrained(place / "bert")
    hfshard.push_checkpoint(place / "bert", place / "hub" / "model")
    torch.save({"state_dict": model.state_dict(), "model_ema": model.state_dict()}, place / "checkpoint.pth.tar")
    hfshard.hub.DirectoryHub.open(place / "hub" / "model").tag("v1")
    write_pair(place, "key")
    Authority("root").write(place)
    with hfshard.CheckpointManager(place / "run", keep_best="eval_loss") as manager:
        manager.save(1200, training_parts(model)["state"], metric=0.5)
    return place


def training_parts(model: nn.Module) -> dict[str, Any]:
    """What a run trains with, by the names that the examples give it."""
    training = hfshard.training
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    dataset = TensorDataset(torch.zeros(16, 4))
    loader = training.ResumableDataLoader(dataset, batch_size=8)
    state = training.TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    return {"optimizer": optimizer, "scheduler": scheduler, "dataset": dataset, "loader": loader, "state": state}


@pytest.fixture
def namespace(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the examples take for granted, in a directory with the files."""
    shutil.copytree(files, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(4, 4)
    return {
        "hfshard": hfshard,
        "nn": nn,
        "model": model,
        "state_dict": model.state_dict(),
        **transformers_names(),
        **run_names(model),
    }


def transformers_names() -> dict[str, Any]:
    """A model class with the mixin, and stock ones."""
    import transformers

    names = {"transformers": transformers, "Bert": Bert, "bert": bert(2.0), "LlamaForCausalLM": transformers.BertModel}
    return {**names, "ShardedModelMixin": hfshard.ShardedModelMixin}


def run_names(model: nn.Module) -> dict[str, Any]:
    """A training state, and the manager of a run that has the checkpoint of step 1200."""
    training = hfshard.training
    names: dict[str, Any] = {name: getattr(training, name) for name in training.__all__}
    names |= training_parts(model)
    names |= {"manager": hfshard.CheckpointManager("run", keep_best="eval_loss"), "step": 1201, "loss": 0.4}
    return {**names, "DirectoryHub": hfshard.hub.DirectoryHub, "epochs": 1, "ema": nn.Linear(4, 4)}


@pytest.mark.parametrize("name", [name for name, member in PUBLIC.items() if inspect.isfunction(member)])
def test_public_function_has_a_docstring(name: str) -> None:
    assert PUBLIC[name].__doc__


@pytest.mark.parametrize("name", [name for name in PUBLIC if is_in_need_of_an_example(name)])
def test_public_function_has_an_example(name: str) -> None:
    assert name in EXAMPLES


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - NEEDS_TRAINER))
def test_example_runs(name: str, namespace: dict[str, Any]) -> None:
    exec(compile(with_local_hub(EXAMPLES[name]), name, "exec"), namespace)
    namespace["manager"].close()


def test_examples_of_the_package_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(example_of(hfshard.__doc__), "hfshard", "exec"), {"__name__": "example"})
    assert hfshard.verify_checkpoint("out").ok
    assert hfshard.hub.DirectoryHub.is_hub("hub/bert")
    assert hfshard.CheckpointManager("run").latest_step() == 1
