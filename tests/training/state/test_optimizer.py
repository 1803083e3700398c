"""An optimizer's state that is not of one parameter, but of all in their order, is refused in another order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from hfshard.errors import InvalidArgumentError, StateDictMismatchError, UnstorableTensorError
from hfshard.training import CheckpointManager, TrainingState
from tests.training import fingerprint

STEPS = 2
Change = Callable[[Optimizer, list[torch.Tensor]], None]


class Run:
    """Two layers whose parameters the optimizer is given in the order of their names."""

    def __init__(self, names: str, make: Callable[[Any], Optimizer], model_names: str = "ab") -> None:
        torch.manual_seed(1)
        self.model = nn.ModuleDict({name: nn.Linear(4, 4) for name in model_names})
        parameters = [one for name in names for one in self.model[name].parameters()]
        self.optimizer = make(parameters)
        self.state = TrainingState(model=self.model, optimizer=self.optimizer)

    def train(self, steps: int = STEPS) -> dict[str, str]:
        """Take some steps; the weights and the optimizer's state, by name."""

        def closure() -> Any:
            self.optimizer.zero_grad()
            loss: Any = sum(((one - len(name)) ** 4).sum() for name, one in sorted(self.model.named_parameters()))
            loss.backward()
            return loss

        for _ in range(steps):
            self.optimizer.step(closure)
        found = dict(fingerprint.of_model(self.model))
        return found | dict(fingerprint.of_optimizer(self.optimizer, self.model, "optimizer"))


def _saved(path: Path, run: Run) -> Run:
    run.train()
    CheckpointManager(path).save(STEPS, run.state)
    return run


def _lbfgs(parameters: Any) -> Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.01, max_iter=3, history_size=2)


@pytest.mark.parametrize("model_names", ["ab", "ba"], ids=["optimizer-turned", "model-and-optimizer-turned"])
def test_lbfgs_is_refused_in_another_order_of_parameters(tmp_path: Path, model_names: str) -> None:
    _saved(tmp_path, Run("ab", _lbfgs))
    other = Run("ba", _lbfgs, model_names)
    before = dict(fingerprint.of_model(other.model))
    with pytest.raises(StateDictMismatchError, match=r"of 'optimizer' \(LBFGS\) depends on the order .*'a.weight'"):
        CheckpointManager(tmp_path).restore(other.state)
    assert dict(fingerprint.of_model(other.model)) == before and not other.optimizer.state


def test_lbfgs_is_exact_in_the_same_order(tmp_path: Path) -> None:
    first = _saved(tmp_path, Run("ab", _lbfgs))
    second = Run("ab", _lbfgs, "ba")  # the model's own order makes no difference
    CheckpointManager(tmp_path).restore(second.state)
    assert second.train() == first.train()


def _add_to_state(value: Callable[[list[torch.Tensor]], Any]) -> Change:
    """Put it beside the state of the first parameter, for all."""

    def change(optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
        optimizer.state[parameters[0]]["own"] = value(parameters)

    return change


def _replace_state(value: Callable[[list[torch.Tensor]], Any]) -> Change:
    """Only the first parameter has a state, which stands for all."""

    def change(optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
        own = optimizer.state[parameters[0]]
        optimizer.state.clear()
        optimizer.state[parameters[0]] = own
        _add_to_state(value)(optimizer, parameters)

    return change


def _add_shared(value: Callable[[list[torch.Tensor]], Any]) -> Change:
    """State that belongs to no parameter."""

    def change(optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
        optimizer.state["shared"] = {"own": value(parameters)}  # type: ignore[index]

    return change


def _add_option(value: Callable[[list[torch.Tensor]], Any]) -> Change:
    """An option of the group that the state_dict has and the constructor does not."""

    def change(optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
        optimizer.param_groups[0]["own"] = value(parameters)

    return change


def _vector(parameters: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in parameters])


DEPENDENT: dict[str, Change] = {
    "vector-in-the-first": _add_to_state(_vector),
    "vectors-in-a-list-in-the-first": _add_to_state(lambda parameters: [_vector(parameters)]),
    "norms-in-the-first": _replace_state(lambda parameters: [float(one.detach().norm()) for one in parameters]),
    "norms-as-a-tensor-in-the-first": _replace_state(lambda parameters: torch.tensor([0.1] * len(parameters))),
    "shared-vector": _add_shared(_vector),
    "shared-list": _add_shared(lambda parameters: [one.detach() for one in parameters]),
    "shared-matrices": _add_shared(lambda parameters: [one.detach() for one in parameters if one.ndim == 2]),
    "shared-norms": _add_shared(lambda parameters: [float(one.detach().norm()) for one in parameters]),
    "option-vector": _add_option(_vector),
    "option-scales": _add_option(lambda parameters: [float(one.detach().norm()) for one in parameters]),
}  # fmt: skip

INDEPENDENT: dict[str, Change] = {
    "factors": _add_to_state(lambda parameters: [torch.eye(4), torch.ones(4, 1), torch.ones(4)]),
    "history": _add_to_state(lambda parameters: {"norms": [1.0, 2.0, 3.0, 4.0], "mean": torch.ones(())}),
    "blocks": _add_to_state(lambda parameters: torch.ones(3)),
    "shared-counts": _add_shared(lambda parameters: {"steps": 3, "mean": torch.ones(()), "seen": [1, 2, 3]}),
    "option": _add_option(lambda parameters: {"warm": [1, 2], "scale": 0.5}),
}


def _adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, betas=[0.9, 0.99])  # type: ignore[arg-type]


def _changed(path: Path, change: Change) -> Run:
    run = Run("ab", _adamw)
    run.train()
    change(run.optimizer, run.optimizer.param_groups[0]["params"])
    CheckpointManager(path).save(STEPS, run.state)
    return run


@pytest.mark.parametrize("name", DEPENDENT)
def test_state_that_depends_on_the_order_is_refused_in_another(tmp_path: Path, name: str) -> None:
    _changed(tmp_path, DEPENDENT[name])
    manager = CheckpointManager(tmp_path)
    manager.restore(Run("ab", _adamw).state)
    with pytest.raises(StateDictMismatchError, match=r"own[\w.]*' of 'optimizer'"):
        manager.restore(Run("ba", _adamw).state)


@pytest.mark.parametrize("name", INDEPENDENT)
def test_state_of_each_parameter_is_found_by_name_in_any_order(tmp_path: Path, name: str) -> None:
    first = _changed(tmp_path, INDEPENDENT[name])
    second = Run("ba", _adamw)
    CheckpointManager(tmp_path).restore(second.state)
    for key, parameter in first.model.named_parameters():
        expected = dict(fingerprint.flatten(first.optimizer.state[parameter], key))
        assert dict(fingerprint.flatten(second.optimizer.state[second.model.get_parameter(key)], key)) == expected


def test_the_names_of_parameters_stand_in_the_order_of_the_parameters(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    named = torch.optim.SGD(model.named_parameters(), lr=0.1)
    CheckpointManager(tmp_path).save(1, TrainingState(model=model, optimizer=named))
    plain = torch.optim.SGD([model.bias, model.weight], lr=0.1)
    CheckpointManager(tmp_path).restore(TrainingState(model=model, optimizer=plain))
    assert plain.param_groups[0]["param_names"] == ["bias", "weight"]


class Refusing(torch.optim.lr_scheduler.ConstantLR):
    """A scheduler that takes no state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise ValueError("not this one")


def test_a_learning_rate_in_a_tensor_stays_the_one_that_the_program_holds(tmp_path: Path) -> None:
    rate, parameter = torch.tensor(0.5), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], lr=rate)
    scheduler = Refusing(optimizer, factor=1.0)
    state = TrainingState(model=nn.ParameterList([parameter]), optimizer=optimizer)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        manager.save(2, TrainingState(**state.components, scheduler=scheduler))
        rate.fill_(0.25)

        with pytest.raises(StateDictMismatchError, match="not this one"):
            manager.restore(TrainingState(**state.components, scheduler=scheduler), 2)
        assert (float(rate), optimizer.param_groups[0]["lr"] is rate) == (0.25, True)

        manager.restore(state, 1)
        assert (float(rate), optimizer.param_groups[0]["lr"] is rate) == (0.5, True)


def test_parameters_on_the_device_meta_are_refused_before_anything_is_changed(tmp_path: Path) -> None:
    def built(device: str) -> tuple[nn.Module, TrainingState]:
        model = nn.Linear(2, 2, device=device)
        return model, TrainingState(model=model, optimizer=torch.optim.AdamW(model.parameters()))

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, built("cpu")[1])
        model, state = built("meta")
        before = [*model.parameters()]
        for arguments in ({}, {"strict": False}, {"without": ["optimizer"]}):
            with pytest.raises(InvalidArgumentError, match=r"trains 'weight', which is on the meta device.*to_empty"):
                manager.restore(state, 1, **arguments)
        assert [id(one) for one in model.parameters()] == [id(one) for one in before]
        assert all(one.is_meta for one in model.parameters())

        manager.restore(TrainingState(model=model), 1, strict=False)  # a model without an optimizer is filled
        assert not any(one.is_meta for one in model.parameters())


def test_groups_that_share_a_learning_rate_get_their_own_where_these_were_others(tmp_path: Path) -> None:
    def built(*rates: torch.Tensor) -> tuple[torch.optim.SGD, TrainingState]:
        first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        groups: Any = [{"params": [one], "lr": rate} for one, rate in zip((first, second), rates, strict=True)]
        optimizer = torch.optim.SGD(groups)
        return optimizer, TrainingState(model=nn.ParameterList([first, second]), optimizer=optimizer)

    shared = torch.tensor(0.5)
    manager = CheckpointManager(tmp_path)
    manager.save(1, built(torch.tensor(0.25), torch.tensor(0.75))[1])
    manager.save(2, built(torch.tensor(0.125), torch.tensor(0.125))[1])

    optimizer, state = built(shared, shared)
    manager.restore(state, 2)
    assert float(shared) == 0.125
    assert all(group["lr"] is shared for group in optimizer.param_groups)
    manager.restore(state, 1)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.75]


@pytest.mark.parametrize(
    ("value", "place", "kind"),
    [
        (np.ones(3), "shape", "numpy.ndarray"),
        (range(3), "shape", "range"),
        ([1, {"ids": range(2)}], "shape.1.ids", "range"),
    ],
    ids=["array", "range", "nested"],
)
def test_a_state_that_torch_cannot_load_is_refused_by_name_at_the_save(
    value: object, place: str, kind: str, tmp_path: Path
) -> None:
    run = Run("ab", torch.optim.Adam)
    run.train()
    run.optimizer.state[run.model.get_parameter("b.weight")]["shape"] = value
    manager = CheckpointManager(tmp_path / "run")

    with pytest.raises(UnstorableTensorError) as caught:
        manager.save(1, run.state)

    expected = f"'{place}' in the state of 'b.weight' in 'optimizer' is a {kind}, which torch's load_state_dict cannot"
    assert str(caught.value).startswith(expected)
    assert not list((tmp_path / "run").glob("checkpoint*"))


class _OwnLoad(torch.optim.Adam):
    """An optimizer that loads its array by itself."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        arrays = {key: state.pop("shape", None) for key, state in state_dict["state"].items()}
        super().load_state_dict(state_dict)
        for key, parameter in enumerate(self.param_groups[0]["params"]):
            if arrays.get(key) is not None:
                self.state[parameter]["shape"] = arrays[key]


def test_a_state_that_an_optimizer_loads_by_itself_is_saved(tmp_path: Path) -> None:
    run = Run("ab", _OwnLoad)
    run.train()
    run.optimizer.state[run.model.get_parameter("b.weight")]["shape"] = np.ones(3)
    CheckpointManager(tmp_path).save(1, run.state)

    other = Run("ab", _OwnLoad)
    CheckpointManager(tmp_path).restore(other.state)

    assert other.optimizer.state[other.model.get_parameter("b.weight")]["shape"].tolist() == [1.0, 1.0, 1.0]
