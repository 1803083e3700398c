"""Which checkpoint is restored, and what of it; and what is said of arguments that can't be right."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import hfshard
from hfshard.errors import (
    CheckpointNotFoundError,
    InvalidArgumentError,
    StateDictMismatchError,
    UnstorableTensorError,
)
from hfshard.training import CheckpointManager, Gradients, ResumableDataLoader, TrainingState


def model_of(value: float) -> nn.Linear:
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


@pytest.fixture
def run(tmp_path: Path) -> CheckpointManager:
    """Steps 1, 2 and 3, of which the second is the best."""
    manager = CheckpointManager(tmp_path / "run", keep_best="loss")
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        manager.save(step, TrainingState(model=model_of(step)), metric=loss)
    return manager


def test_the_best_and_the_latest_are_restored_and_found_by_these_words(run: CheckpointManager) -> None:
    model = model_of(0)
    state = TrainingState(model=model)

    assert (run.restore(state, "best"), model.weight[0, 0].item()) == (2, 2.0)
    assert (run.restore(state, "latest"), model.weight[0, 0].item()) == (3, 3.0)
    assert [Path(run.path_of(word)).name for word in ("best", "latest")] == [
        "checkpoint-00000002",
        "checkpoint-00000003",
    ]
    hfshard.load_model(model, run.path_of("best"))
    assert model.weight[0, 0].item() == 2.0


def test_words_that_name_no_checkpoint_are_refused(run: CheckpointManager, tmp_path: Path) -> None:
    state = TrainingState(model=model_of(0))
    with pytest.raises(InvalidArgumentError, match="keep_best="):
        CheckpointManager(run.root).restore(state, "best")
    with pytest.raises(CheckpointNotFoundError, match=r"There is no checkpoint with the metric 'other' in"):
        CheckpointManager(run.root, keep_best="other").restore(state, "best")
    with pytest.raises(CheckpointNotFoundError, match=r"There is no checkpoint in '.*empty'"):
        CheckpointManager(tmp_path / "empty").restore(state, "latest")
    with pytest.raises(InvalidArgumentError, match="'best' or 'latest', got 'newest'"):
        run.path_of("newest")  # type: ignore[arg-type]


def test_the_error_for_weights_of_a_run_names_its_checkpoints(run: CheckpointManager) -> None:
    names = "checkpoint-00000003, checkpoint-00000002, checkpoint-00000001"
    with pytest.raises(CheckpointNotFoundError, match=rf"have weights, {names}: give one of them, as '.*-00000003'"):
        hfshard.load_model(model_of(0), run.root)


def test_parts_that_are_left_out_stay_as_they_were_built(tmp_path: Path) -> None:
    def loader(batch_size: int) -> Any:
        return ResumableDataLoader(list(range(8)), batch_size, shuffle=True)  # type: ignore[arg-type]

    manager = CheckpointManager(tmp_path)
    first = loader(2)
    next(iter(first))
    manager.save(1, TrainingState(model=model_of(1), loader=first))
    model, other = model_of(0), loader(4)
    state = TrainingState(model=model, loader=other)

    with pytest.raises(StateDictMismatchError, match=r"restore\(state, ..., without=\['loader'\]\)"):
        manager.restore(state, 1)
    manager.restore(state, 1, without=["loader"])

    assert (model.weight[0, 0].item(), other.batch) == (1.0, 0)
    nn.init.zeros_(model.weight)
    assert manager.restore_latest(state, without=["loader"]) == 1
    assert model.weight[0, 0].item() == 1.0
    with pytest.raises(InvalidArgumentError, match=r"no part 'lodaer' to leave out. It has: model, loader"):
        manager.restore(state, 1, without=["lodaer"])
    with pytest.raises(InvalidArgumentError, match=r"must be a list of names, such as \['loader'\]"):
        manager.restore(state, 1, without="loader")
    with pytest.raises(StateDictMismatchError, match="strict=False to leave it out"):
        manager.restore(TrainingState(model=model), 1)


def test_a_model_that_is_left_out_still_names_parameters(tmp_path: Path) -> None:
    def parts() -> TrainingState:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        return TrainingState(model=model, optimizer=optimizer, gradients=Gradients(model))

    manager = CheckpointManager(tmp_path / "run")
    state, fresh = parts(), parts()
    state.components["optimizer"].step()
    manager.save(1, state)
    before = fresh.components["model"].weight.detach().clone()
    assert manager.restore(fresh, 1, without=["model", "gradients"]) == 1

    model = fresh.components["model"]
    assert torch.equal(model.weight, before)
    assert model.weight.grad is not None
    assert fresh.components["optimizer"].state[model.weight]["step"] == 2


def test_a_generator_is_a_part(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    torch.rand(2, generator=generator)
    manager = CheckpointManager(tmp_path)
    manager.save(1, TrainingState(noise=generator))
    expected = torch.rand(2, generator=generator)
    fresh = torch.Generator().manual_seed(4)

    manager.restore(TrainingState(noise=fresh), 1)

    assert torch.equal(torch.rand(2, generator=fresh), expected)


def test_what_can_not_be_saved_is_told_what_to_write_instead(tmp_path: Path) -> None:
    manager, model = CheckpointManager(tmp_path / "run"), model_of(1)
    parts: Any = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    with pytest.raises(InvalidArgumentError, match=r"Write: TrainingState\(model=..., optimizer=...\)"):
        manager.save(1, parts)
    with pytest.raises(InvalidArgumentError, match=r"got a Linear. Write: TrainingState\(model=model, optimizer=opt"):
        manager.restore(model)  # type: ignore[arg-type]
    with pytest.raises(UnstorableTensorError, match=r"'extra/args' is a argparse.Namespace.*vars\(args\)"):
        manager.save(1, TrainingState(model=model), extra={"args": argparse.Namespace(lr=1)})
    with pytest.raises(UnstorableTensorError, match=r"'extra/place'.*build the object from them after a restore"):
        manager.save(1, TrainingState(model=model), extra={"place": tmp_path})
    with pytest.raises(InvalidArgumentError, match=r"'train_loader' is a DataLoader.*ResumableDataLoader"):
        TrainingState(train_loader=DataLoader([1, 2]))  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
