"""Directories of torch.distributed.checkpoint, restored and converted: training goes on as under their framework."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim.lr_scheduler import MultiStepLR

import hfshard
from hfshard.cli.main import main
from hfshard.errors import InvalidArgumentError, MissingShardError, StateDictMismatchError, UnsafePickleError
from hfshard.training import CheckpointManager, TrainingState
from tests.distributed.gloo import check_ranks
from tests.foreign.conftest import produced as produced
from tests.foreign.dcp_files import save_dcp
from tests.foreign.producers.dcp import SHARDINGS, whole_state
from tests.foreign.producers.models import MILESTONES, build, optimizer_of, train
from tests.foreign.producers.truth import (
    checkpoint_of,
    read_truth,
    write_optimizer,
    write_truth,
)
from tests.foreign.test_matrix import BY_NAME, place_of
from tests.helpers.evil import Evil
from tests.helpers.tensor_bytes import assert_same


class Parts:
    """A model and its optimizer, as for the runs that the producers save."""

    def __init__(self, sharding: str = "alone", ranks: int = 1, is_scheduled: bool = False) -> None:
        torch.manual_seed(77)
        model = build("nasty")
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.fill_(1)
        self.model: nn.Module = SHARDINGS[sharding](model, ranks)
        self.optimizer = optimizer_of(self.model, build("nasty"))
        self.scheduler = MultiStepLR(self.optimizer, [7]) if is_scheduled else None

    def state(self) -> TrainingState:
        return TrainingState(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)

    def write(self, place: Path, rank: int = 0) -> None:
        """Write the truth of it; every rank must call."""
        place.mkdir(parents=True, exist_ok=True)
        state = whole_state(self.model)
        if rank == 0:
            write_truth(place, state)
        write_optimizer(place, self.model, self.optimizer)


def assert_same_truth(place: Path, other: Path, but: str = "none") -> None:
    """Compare weights and states, except the state of one parameter."""
    assert_same(read_truth(place), read_truth(other))
    found, expected = (
        {name: one.flatten() for name, one in read_truth(where, "states").items() if not name.startswith(f"{but}/")}
        for where in (place, other)
    )
    assert_same(found, expected)


def resume(rank: int, runs: dict[str, Path], place: Path) -> None:
    """Go on under the framework, and under FSDP2 from what hfshard has restored."""
    for sharding, checkpoint in runs.items():
        theirs = Parts(sharding, 2)
        model, optimizer = get_state_dict(theirs.model, theirs.optimizer)
        state = (
            {"model": model, "optimizer": optimizer}
            if sharding == "fsdp2"
            else {"app": {"model": model, "optim": optimizer}}
        )
        load(state, checkpoint_id=checkpoint, planner=DefaultLoadPlanner(allow_partial_load=True))
        set_state_dict(theirs.model, theirs.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        train(theirs.model, theirs.optimizer)
        theirs.write(place / f"theirs-{sharding}", rank)

        ours = Parts("fsdp2", 2)
        restored = CheckpointManager(place / "runs").restore(ours.state(), str(checkpoint))
        assert restored.differences == ()
        ours.write(place / f"restored-{sharding}", rank)
        train(ours.model, ours.optimizer)
        ours.write(place / f"ours-{sharding}", rank)


def test_a_run_goes_on_as_under_its_framework(produced: Path, tmp_path: Path) -> None:
    """To the bit: the sum of two equal gradients, halved, is each of them.

    But for the state of a parameter without gradients: torch's load makes one, and FSDP1 goes on counting its steps.
    """
    names = {"fsdp2": "torch-fsdp2-nested-2", "fsdp1": "torch-fsdp1-app-2"}
    places = {sharding: place_of(BY_NAME[name], produced) for sharding, name in names.items()}
    check_ranks(
        tmp_path / "ranks", 2, resume, {sharding: checkpoint_of(place) for sharding, place in places.items()}, tmp_path
    )

    for sharding, place in places.items():
        assert_same_truth(tmp_path / f"restored-{sharding}", place)
        assert_same_truth(tmp_path / f"ours-{sharding}", tmp_path / f"theirs-{sharding}", but="unused")
        checkpoint = str(checkpoint_of(place))
        alone, converted = Parts(), Parts()
        restored = CheckpointManager(tmp_path / "none").restore(alone.state(), checkpoint)
        assert main(["convert", checkpoint, str(tmp_path / sharding)]) == 0
        CheckpointManager(tmp_path / sharding).restore_latest(converted.state())
        assert (restored, restored.differences) == (0, ())
        for number, parts in enumerate((alone, converted)):
            train(parts.model, parts.optimizer)
            parts.write(tmp_path / f"alone-{number}-{sharding}")
            assert_same_truth(tmp_path / f"alone-{number}-{sharding}", tmp_path / f"theirs-{sharding}", but="unused")


@pytest.mark.parametrize("is_converted", [False, True])
def test_a_flat_optimizer_takes_the_groups_that_are_built(is_converted: bool, produced: Path, tmp_path: Path) -> None:
    place = place_of(BY_NAME["torch-fsdp2-torchtitan-2-threads"], produced)
    parts = Parts(is_scheduled=True)
    manager = CheckpointManager(tmp_path / "run")
    source: Any = str(checkpoint_of(place))
    if is_converted:
        assert main(["convert", source, str(tmp_path / "run")]) == 0
        source = 2

    restored = manager.restore(parts.state(), source)

    parts.write(tmp_path)
    assert_same_truth(tmp_path, place)
    assert restored == 2
    assert parts.scheduler is not None
    assert parts.scheduler.milestones == Counter(MILESTONES)
    assert [group["weight_decay"] for group in parts.optimizer.param_groups] == [0.1, 0.0, 0.0]
    assert restored.extra["train_state"]["losses"] == b"seen"
    assert any(words.startswith("the random number generators") for words in restored.lacking)


def test_groups_of_parameters_with_different_options_are_refused(produced: Path, tmp_path: Path) -> None:
    place = place_of(BY_NAME["torch-fsdp2-torchtitan-2-threads"], produced)
    model = build("nasty")
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    state = TrainingState(model=model, optimizer=optimizer, scheduler=MultiStepLR(optimizer, [7]))

    with pytest.raises(StateDictMismatchError, match=r"'gain' and 'embed\.weight', which had"):
        CheckpointManager(tmp_path).restore(state, str(checkpoint_of(place)))


@pytest.mark.parametrize("name", ["accelerate-fsdp2-4", "lightning-2"])
def test_programs_directories_restore(name: str, produced: Path, tmp_path: Path) -> None:
    place = place_of(BY_NAME[name], produced)
    parts = Parts(is_scheduled=name.startswith("accelerate"))

    restored = CheckpointManager(tmp_path / "run").restore(parts.state(), str(checkpoint_of(place)))

    parts.write(tmp_path)
    assert_same_truth(tmp_path, place)
    if parts.scheduler is not None:
        assert parts.scheduler.milestones == Counter(MILESTONES)
        assert any("it has those of 4 processes" in words for words in restored.lacking)
    else:
        assert restored == 2


# Directories that are refused: nothing is changed, and nothing runs.


def saved(place: Path, **values: Any) -> str:
    state = {
        "model.weight": torch.ones(1, 2), "optimizer.state.weight.exp_avg": torch.ones(1, 2),
        "optimizer.state.weight.exp_avg_sq": torch.ones(1, 2), "optimizer.state.weight.step": torch.tensor(1.0),
        "optimizer.param_groups.0.params": ["weight"],
    }  # fmt: skip
    options = torch.optim.Adam(nn.Linear(2, 1).parameters()).param_groups[0]
    state |= {f"optimizer.param_groups.0.{key}": one for key, one in options.items() if key != "params"} | values
    paths = {
        name: tuple(int(key) if key.isdecimal() else key for key in name.split("."))
        for name in state
        if name != "model.weight"
    }
    save_dcp(place, state, paths=paths)
    return str(place)


def remove_file(place: Path) -> None:
    (place / "__0_0.distcp").unlink()


@pytest.mark.parametrize(
    ("values", "change", "error", "message"),
    [
        ({}, remove_file, MissingShardError, r"__0_0\.distcp"),
        ({"step": Evil()}, None, UnsafePickleError, "asks for 'posix.system'"),
        ({"optimizer.param_groups.0.params": [0]}, None, InvalidArgumentError, "numbers, not names"),
        ({"optimizer.state.weight.exp_avg": torch.ones(3)}, None, StateDictMismatchError, "'exp_avg' of 'weight' has"),
    ],
)
def test_a_directory_is_refused_and_nothing_changes(
    values: dict[str, Any], change: Any, error: type[Exception], message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    place = saved(tmp_path / "d", **values)
    if change is not None:
        change(tmp_path / "d")
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.clone()
    optimizer = torch.optim.Adam(model.parameters())

    with pytest.raises(error, match=message):
        CheckpointManager(tmp_path / "run").restore(TrainingState(model=model, optimizer=optimizer), place)

    assert torch.equal(model.weight, before)
    assert not optimizer.state
    assert not (tmp_path / "evil").exists()
    assert not (tmp_path / "run").exists()


def test_weights_alone_are_no_run(tmp_path: Path) -> None:
    model = nn.Linear(2, 1, bias=False)
    save_dcp(tmp_path / "d", {"model.weight": torch.ones(1, 2)})
    state = TrainingState(model=model, optimizer=torch.optim.Adam(model.parameters()))

    with pytest.raises(InvalidArgumentError, match="has the weights of a model alone, and no run"):
        CheckpointManager(tmp_path / "run").restore(state, str(tmp_path / "d"))
    assert main(["convert", str(tmp_path / "d"), str(tmp_path / "out")]) == 0
    assert torch.equal(hfshard.load_state_dict(tmp_path / "out")["weight"], torch.ones(1, 2))


def test_keys_choose_a_model_and_its_optimizer(tmp_path: Path) -> None:
    model = nn.Linear(2, 1, bias=False)
    saved(tmp_path / "d", **{"ema.weight": torch.zeros(1, 2)})
    state = TrainingState(model=model, optimizer=torch.optim.Adam(model.parameters()))
    manager = CheckpointManager(tmp_path / "run")

    with pytest.raises(hfshard.errors.AmbiguousWeightsError, match=r"'ema' .* 'model'"):
        manager.restore(state, str(tmp_path / "d"))
    restored = manager.restore(state, str(tmp_path / "d"), keys={"model": "ema", "optimizer": "optimizer"})

    assert (restored, torch.equal(model.weight, torch.zeros(1, 2))) == (0, True)
