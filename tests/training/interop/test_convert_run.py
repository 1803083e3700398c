"""Old files become checkpoints of runs, which are restored as the files themselves; or it is said why they can't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import TensorDataset

from hfshard import load_state_dict
from hfshard.errors import DamagedCheckpointError, InvalidArgumentError, StateDictMismatchError, UnsafePickleError
from hfshard.training import CheckpointManager, ResumableDataLoader, TrainingState
from hfshard.training.interop.convert_run import convert_foreign, is_foreign_run
from tests.training.fingerprint import flatten
from tests.training.interop.programs import PROGRAMS, adamw, built, net, old, result, save_of, train

REFUSED = {"torchvision's, with arguments": "its 2 groups have numbers, not names, for parameters"}
"""Programs whose files can't be converted without the model -> why."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_converted_file_is_restored_as_the_file_itself(name: str, tmp_path: Path) -> None:
    program = PROGRAMS[name]
    saved = built(program, seed=1)
    train(saved, 0, 4)
    path = str(tmp_path / "old.pt")
    torch.save(program.save(saved), path, **program.options)
    manager = CheckpointManager(tmp_path / "run")
    if name in REFUSED:
        with pytest.raises(InvalidArgumentError, match=REFUSED[name]):
            convert_foreign(path, manager.root)
        assert not Path(manager.root).exists()
        return
    from_file, from_run = built(program, seed=2), built(program, seed=2)
    expected = manager.restore(TrainingState(**from_file.named), path, strict=not program.differs, keys=program.keys)

    converted = convert_foreign(path, manager.root, strict=not program.differs, keys=program.keys)
    assert manager.verify() == {converted.step: []}
    restored = manager.restore_latest(TrainingState(**from_run.named))
    train(from_file, 4, 6)
    train(from_run, 4, 6)

    assert restored is not None
    assert (restored, restored.path) == (expected, converted.path)
    assert restored.lacking == converted.lacking == (*expected.lacking, "the position in the data")
    assert [*flatten(restored.extra, "")] == [*flatten(expected.extra, "")]
    assert result(from_run) == result(from_file)
    assert load_state_dict(converted.path).keys() == from_file.model.state_dict().keys()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    sum(one.square().sum() for one in model.parameters() if one.requires_grad).backward()  # type: ignore[union-attr]
    optimizer.step()


def test_parameters_that_may_be_others_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    for one in model[1].parameters():
        one.requires_grad_(False)
    optimizer = AdamW([one for one in model.parameters() if one.requires_grad])
    trained(model, optimizer)
    with pytest.raises(InvalidArgumentError, match=r"its 4 parameters match with or without '0.weight'"):
        convert_foreign(old(tmp_path, model, optimizer), tmp_path / "run")

    other = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 2))
    frozen = AdamW([*other[0].parameters(), *other[2].parameters()])
    trained(other, frozen)
    converted = convert_foreign(old(tmp_path, other, frozen), tmp_path / "run")  # shapes tell
    CheckpointManager(tmp_path / "run").restore(TrainingState(other, frozen), converted.step)

    unlike = AdamW([nn.Parameter(torch.ones(7))])
    unlike.param_groups[0]["params"][0].sum().backward()
    unlike.step()
    with pytest.raises(InvalidArgumentError, match="its 1 parameters do not match the 6 weights in order"):
        convert_foreign(old(tmp_path, other, unlike), tmp_path / "run", step=9)


def test_an_order_that_was_only_assumed_is_not_trusted(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    of_its_own = AdamW([*model[1].parameters(), *model[0].parameters()])
    trained(model, of_its_own)
    convert_foreign(old(tmp_path, model, of_its_own), tmp_path / "run")
    with pytest.raises(StateDictMismatchError, match=r"'state' of 'optimizer' \(AdamW\) depends on the order"):
        CheckpointManager(tmp_path / "run").restore_latest(TrainingState(model, of_its_own))


def test_names_that_are_none_of_the_weights_are_refused(tmp_path: Path) -> None:
    both = nn.ModuleDict({"generator": net(), "discriminator": net()})
    optimizer = AdamW(both["generator"].named_parameters())
    trained(both, optimizer)
    with pytest.raises(InvalidArgumentError, match=r"of 'optimizer' .*its groups name '0.weight', which is not one of"):
        convert_foreign(old(tmp_path, nn.DataParallel(both), optimizer), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_key_for_a_part_that_nobody_looks_for_is_refused(tmp_path: Path) -> None:
    parts = adamw(net())
    path = old(tmp_path, parts.model, parts.optimizer, teacher=net().state_dict())
    words = r"keys names 'optimiser', which is not a known part\. Name one of: model, .*, scaler, ema\."
    with pytest.raises(InvalidArgumentError, match=words):
        convert_foreign(path, tmp_path / "run", keys={"optimiser": "optimizer"})
    assert not (tmp_path / "run").exists()
    assert convert_foreign(path, tmp_path / "run", keys={"ema": "teacher"}).parts == ("model", "optimizer", "ema")


def test_ties_and_wrappers_are_those_of_the_model(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False), "c": nn.Linear(2, 1)})
    model["b"].weight = model["a"].weight
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    trained(model, optimizer)
    before = dict(flatten(optimizer.state_dict(), ""))
    path = old(tmp_path, nn.DataParallel(model), optimizer, epoch=2)

    converted = convert_foreign(path, tmp_path / "run")
    trained(model, optimizer)
    CheckpointManager(tmp_path / "run").restore(TrainingState(model, optimizer), 2)

    assert sorted(load_state_dict(converted.path)) == ["a.weight", "b.weight", "c.bias", "c.weight"]
    assert dict(flatten(optimizer.state_dict(), "")) == before


def test_what_is_there_stays_and_what_has_no_weights_is_refused(tmp_path: Path) -> None:
    parts = adamw(net())
    path = old(tmp_path, parts.model, parts.optimizer)
    assert is_foreign_run(path)
    convert_foreign(path, tmp_path / "run", step=5)
    with pytest.raises(InvalidArgumentError, match="checkpoint-00000005' already exists"):
        convert_foreign(path, tmp_path / "run", step=5)
    torch.save(save_of(parts, optimizer="optimizer"), path)
    with pytest.raises(InvalidArgumentError, match="has no weights under a usual key"):
        convert_foreign(path, tmp_path / "run")
    torch.save(parts.model.state_dict(), path)
    assert not is_foreign_run(path)
    torch.save({"model": parts.model.state_dict(), "object": parts}, path)
    with pytest.raises(UnsafePickleError, match=r"programs\.Parts"):
        convert_foreign(path, tmp_path / "run")


def test_a_converted_run_goes_on_with_a_loader_of_its_own(tmp_path: Path) -> None:
    parts = adamw(net())
    train(parts, 0, 2)
    convert_foreign(old(tmp_path, parts.model, parts.optimizer, step=2), tmp_path / "run")
    loader: Any = ResumableDataLoader(TensorDataset(torch.arange(8)), batch_size=2, seed=1)
    state = TrainingState(parts.model, parts.optimizer, loader=loader)

    with CheckpointManager(tmp_path / "run") as manager:
        first = manager.restore_latest(state)
        manager.save(3, state)
        second = manager.restore_latest(state)

    assert first is not None and second is not None
    assert (first, first.lacking[-1]) == (2, "the position in the data")
    assert (second, second.lacking) == (3, ())
    with pytest.raises(StateDictMismatchError, match=r"the state in .* is another optimizer's"):
        manager.restore(TrainingState(parts.model, SGD(parts.model.parameters(), momentum=0.9), loader=loader), 2)


@pytest.mark.parametrize(
    ("numbers", "state", "why"),
    [
        ([[1], [2]], {}, "do not have a number for each parameter"),
        ([0, 0], {}, "do not have a number for each parameter"),
        ([0, 1], {0: 5}, "a parameter's state is not a dict"),
    ],
    ids=str,
)
def test_an_optimizer_without_numbers_or_states_is_damaged(
    numbers: list[Any], state: dict[int, Any], why: str, tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    optimizer = AdamW(model.parameters())
    path = tmp_path / "old.pt"
    groups = [{**optimizer.state_dict()["param_groups"][0], "params": numbers}]
    torch.save({"model": model.state_dict(), "optimizer": {"state": state, "param_groups": groups}}, path)
    manager = CheckpointManager(tmp_path / "run")

    with pytest.raises(DamagedCheckpointError, match=why):
        convert_foreign(str(path), manager.root)
    with pytest.raises(DamagedCheckpointError, match=why):
        manager.restore(TrainingState(model=model, optimizer=optimizer), path)
    assert not Path(manager.root).exists()
