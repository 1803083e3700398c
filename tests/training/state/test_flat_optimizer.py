"""Runs under FSDP1: the resumed one is the uninterrupted one, and others take it up by the parameters' names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from hfshard.errors import HfshardError, InvalidArgumentError, StateDictMismatchError
from hfshard.training import CheckpointManager, Gradients, TrainingState
from tests.distributed.gloo import check_ranks
from tests.foreign.producers.models import build
from tests.helpers.tensor_bytes import assert_same
from tests.tensors.fsdp1_models import counted_gathers, gathered, train, trained_by, wrapped


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return TrainingState(model, optimizer, scheduler)


def save_and_resume(rank: int, place: Path, ways: list[str]) -> None:
    for way in ways:
        model = wrapped(way)
        optimizer = trained_by(model, way)
        train(model, optimizer, rank)
        manager = CheckpointManager(place / way)
        with counted_gathers() as calls:
            manager.save(1, state_of(model, optimizer))
        assert not calls
        expected = train(model, optimizer, 5 + rank)

        other = wrapped(way)
        again = trained_by(other, way)
        train(other, again, 3 + rank)
        assert manager.restore(state_of(other, again)) == 1
        assert train(other, again, 5 + rank) == expected
        assert_same(gathered(other), gathered(model))

        halves = wrapped(way)
        fresh = trained_by(halves, way)
        for name in ("optimizer", "model"):
            assert manager.restore(state_of(halves, fresh), without=[name]) == 1
        assert train(halves, fresh, 5 + rank) == expected


def refuse(rank: int, place: Path) -> None:
    model = wrapped("flat")
    manager = CheckpointManager(place)
    with pytest.raises(InvalidArgumentError, match=r"'gradients': under FullyShardedDataParallel \(FSDP1\)"):
        manager.save(1, TrainingState(model, gradients=Gradients(model)))
    parts = wrapped("parts")
    some = [one for one in parts.parameters() if one.numel() > 3]
    with pytest.raises(HfshardError, match="other parameters in the groups of 'optimizer'"):
        manager.save(1, TrainingState(parts, torch.optim.AdamW(some)))
    rows: Any = torch.optim.Adafactor(model.parameters())
    for one in model.parameters():
        rows.state[one] = {"step": torch.tensor(1.0), "row_var": torch.zeros(3)}
    with pytest.raises(InvalidArgumentError, match=r"'row_var' for '.*' is neither one number nor as long"):
        manager.save(1, TrainingState(model, rows))
    assert not list(place.glob("checkpoint-*"))


def save_two(rank: int, place: Path) -> None:
    save_and_resume(rank, place, ["parts", "flat"])
    refuse(rank, place / "refused")


def tensors_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """The optimizer's tensors of a plain or fully sharded model, whole, by parameter."""
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}/{key}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found


def take_up(rank: int, place: Path) -> None:
    spread = build("nasty")
    fully_shard(spread)
    plain = build("nasty")
    for model in (plain, spread):
        CheckpointManager(place / "parts").restore(state_of(model, optimizer := trained_by(model, "plain")))
        found = tensors_of(optimizer, model)
        if model is plain:
            expected = found, dict(model.state_dict())
    assert_same(found, expected[0])
    whole = {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in spread.state_dict().items()}
    assert_same(whole, expected[1])

    for way in ("parts", "flat"):  # on other ranks than it was saved by
        model = wrapped(way)
        optimizer = trained_by(model, way)
        manager = CheckpointManager(place / way)
        manager.restore(state_of(model, optimizer))
        manager.save(2, state_of(model, optimizer))
        if rank == 0:
            for base in ("model", "optimizer"):
                before, after = (_read(place / way / f"checkpoint-0000000{step}", base) for step in (1, 2))
                assert_same(after, before)
    with pytest.raises(StateDictMismatchError, match="The groups of 'optimizer' differ"):
        manager = CheckpointManager(place / "parts")
        model = wrapped("flat")
        manager.restore(state_of(model, trained_by(model, "flat")))


def _read(directory: Path, base: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {key: one for file in directory.glob(f"{base}*.safetensors") for key, one in load_file(file).items()}


def test_resumed_runs_are_the_uninterrupted_ones(tmp_path: Path) -> None:
    check_ranks(tmp_path / "ranks", 2, save_two, tmp_path)
    check_ranks(tmp_path / "others", 3, take_up, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "ways"),
    [(1, ["parts", "flat"]), (2, ["whole", "bits", "flat and full"]), (4, ["parts", "flat", "hybrid"])],
)
def test_every_way_on_every_number_of_ranks(tmp_path: Path, ranks: int, ways: list[str]) -> None:
    check_ranks(tmp_path / "ranks", ranks, save_and_resume, tmp_path, ways)
