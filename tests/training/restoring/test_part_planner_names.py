"""What is saved is found again by name: parameters in another order, wrappers on and off, an honest `module`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hfshard.training import CheckpointManager, TrainingState
from tests.training import ingredients
from tests.training.fingerprint import flatten

FIRST, ALL = 3, 6
"""Steps before the checkpoint, and in a whole run."""

Wrap = Callable[[nn.Module], nn.Module]


@pytest.fixture(scope="module")
def world_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store: Any = torch.distributed.FileStore(  # type: ignore[attr-defined]
        str(tmp_path_factory.mktemp("group") / "store"), 1
    )
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def _compiled(model: nn.Module) -> nn.Module:
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    return compiled


def _with_compiled_child(model: nn.Module) -> nn.Module:
    """As torchtitan does: each block is compiled, and put back where it was."""
    name, child = next(iter(model.named_children()))
    setattr(model, name, _compiled(child))
    return model


WRAPS: dict[str, Wrap] = {
    "plain": lambda model: model,
    "data-parallel": lambda model: nn.DataParallel(model),
    "twice-data-parallel": lambda model: nn.DataParallel(nn.DataParallel(model)),
    "compiled": _compiled,
    "compiled-data-parallel": lambda model: _compiled(nn.DataParallel(model)),
    "data-parallel-compiled": lambda model: nn.DataParallel(_compiled(model)),
    "compiled-child": _with_compiled_child,
    "data-parallel-compiled-child": lambda model: nn.DataParallel(_with_compiled_child(model)),
    "distributed": lambda model: DistributedDataParallel(model),
    "distributed-compiled": lambda model: DistributedDataParallel(_compiled(model)),
}


class Swapped(nn.Module):
    """`ingredients.mlp` with its children made in the other order: the same names, the same sum."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(8, 1), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(torch.tanh(self.first(x)))


class Training:
    """A model with AdamW, a schedule and an average, whose numbers do not depend on how it is wrapped."""

    def __init__(self, seed: int, make: Callable[[], nn.Module], wrap: Wrap, order: Callable[[Any], Any]) -> None:
        torch.manual_seed(seed)
        plain = make()
        self.names = [name for name, _ in plain.named_parameters()]
        self.parameters = list(plain.parameters())
        self.model = wrap(plain)
        self.optimizer = torch.optim.AdamW(order(self.groups()), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.state = TrainingState(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, average=self.average
        )

    def groups(self) -> list[dict[str, Any]]:
        matrices = [parameter for parameter in self.parameters if parameter.ndim > 1]
        others = [parameter for parameter in self.parameters if parameter.ndim <= 1]
        return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "betas": (0.8, 0.9)}]

    def train(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            x = torch.sin(torch.arange(8.0).reshape(2, 4) + step)
            self.optimizer.zero_grad()
            loss = (self.model(x) ** 2).sum() + sum((one**3).sum() for one in self.parameters)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.average.update_parameters(self.model)

    def numbers(self) -> dict[str, str]:
        """By the names of the model as it was before anything wrapped it."""
        found: dict[str, str] = {}
        for name, parameter, averaged in zip(self.names, self.parameters, self.average.parameters(), strict=True):
            group = next(
                group for group in self.optimizer.param_groups if any(one is parameter for one in group["params"])
            )
            options = {key: value for key, value in sorted(group.items()) if key not in ("params", "param_names")}
            found |= flatten([parameter, averaged, self.optimizer.state[parameter], options], name)
        return found


def _same(groups: Any) -> Any:
    return groups


def _backwards(groups: Any) -> Any:
    """The other way round, within and among groups."""
    return [{**group, "params": group["params"][::-1]} for group in groups[::-1]]


def _straight(make: Callable[[], nn.Module]) -> dict[str, str]:
    run = Training(1, make, WRAPS["plain"], _same)
    run.train(0, ALL)
    return run.numbers()


def _saved_and_resumed(path: Path, before: tuple[Any, Wrap, Any], after: tuple[Any, Wrap, Any]) -> Training:
    """Train, save in one form, restore into the other, train on."""
    first, second = Training(1, *before), Training(2, *after)
    first.train(0, FIRST)
    with CheckpointManager(path) as manager:
        manager.save(FIRST, first.state)
    with CheckpointManager(path) as manager:
        assert manager.restore_latest(second.state) == FIRST
    second.train(FIRST, ALL)
    return second


@pytest.mark.parametrize("wrap", [name for name in WRAPS if name != "plain"])
@pytest.mark.parametrize("is_wrapped_first", [True, False], ids=["saved-wrapped", "restored-wrapped"])
def test_wrappers_make_no_difference(tmp_path: Path, world_of_one: None, wrap: str, is_wrapped_first: bool) -> None:
    wrapped, plain = (ingredients.mlp, WRAPS[wrap], _same), (ingredients.mlp, WRAPS["plain"], _same)
    both = (wrapped, plain) if is_wrapped_first else (plain, wrapped)
    assert _saved_and_resumed(tmp_path, *both).numbers() == _straight(ingredients.mlp)


@pytest.mark.parametrize("wrap", ["plain", "data-parallel", "compiled-data-parallel"])
@pytest.mark.parametrize("is_wrapped_first", [True, False], ids=["saved-wrapped", "restored-wrapped"])
def test_a_child_that_is_called_module_keeps_its_name(tmp_path: Path, wrap: str, is_wrapped_first: bool) -> None:
    wrapped, plain = (ingredients.Honest, WRAPS[wrap], _same), (ingredients.Honest, WRAPS["plain"], _same)
    both = (wrapped, plain) if is_wrapped_first else (plain, wrapped)
    assert _saved_and_resumed(tmp_path, *both).numbers() == _straight(ingredients.Honest)
    with safe_open(tmp_path / "checkpoint-00000003" / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == [
            "head.bias", "head.weight", "module.first.bias", "module.first.weight", "module.last.bias",
            "module.last.weight",
        ]  # fmt: skip


@pytest.mark.parametrize("swaps", [(True, False), (False, True)], ids=["saved-swapped", "restored-swapped"])
def test_parameters_in_another_order_are_found_by_name(tmp_path: Path, swaps: tuple[bool, bool]) -> None:
    forms = [(Swapped if swap else ingredients.mlp, WRAPS["plain"], _same) for swap in swaps]
    # The names and values of the one model are the other's: the first step of both is made from the checkpoint's.
    first = Training(1, *forms[0])
    first.train(0, FIRST)
    second = _saved_and_resumed(tmp_path, forms[0], forms[1])
    first.train(FIRST, ALL)
    assert second.numbers() == {path: first.numbers()[path] for path in second.numbers()}
    assert len(second.numbers()) == len(first.numbers())


@pytest.mark.parametrize("orders", [(_backwards, _same), (_same, _backwards)], ids=["saved", "restored"])
def test_groups_and_their_members_in_another_order_keep_their_state(tmp_path: Path, orders: tuple[Any, Any]) -> None:
    forms = [(ingredients.mlp, WRAPS["plain"], order) for order in orders]
    assert _saved_and_resumed(tmp_path, forms[0], forms[1]).numbers() == _straight(ingredients.mlp)


def test_parameters_of_the_same_shape_are_not_swapped(tmp_path: Path) -> None:
    def training(names: str) -> tuple[nn.Module, torch.optim.Optimizer, TrainingState]:
        model = nn.ModuleDict(OrderedDict((name, nn.Linear(2, 2)) for name in names))
        optimizer = torch.optim.Adam(model.named_parameters())
        return model, optimizer, TrainingState(model=model, optimizer=optimizer)

    model, optimizer, state = training("abc")
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, float(number + 1))
    optimizer.step()
    CheckpointManager(tmp_path).save(1, state)
    other, other_optimizer, other_state = training("cba")
    CheckpointManager(tmp_path).restore_latest(other_state)
    # Adam's first average is a tenth of the first gradient, which said which parameter it was.
    averages = {
        name: other_optimizer.state[one]["exp_avg"].flatten()[0].item() for name, one in other.named_parameters()
    }
    expected = {"a.weight": 0.1, "a.bias": 0.2, "b.weight": 0.3, "b.bias": 0.4, "c.weight": 0.5, "c.bias": 0.6}
    assert averages == pytest.approx(expected)
    assert other_optimizer.param_groups[0]["param_names"] == [name for name, _ in other.named_parameters()]


def test_the_optimizers_tensors_are_named_after_their_parameters(tmp_path: Path) -> None:
    run = Training(1, ingredients.mlp, WRAPS["compiled-data-parallel"], _same)
    run.train(0, 1)
    CheckpointManager(tmp_path).save(1, run.state)
    with safe_open(tmp_path / "checkpoint-00000001" / "optimizer.safetensors", "pt") as file:
        assert sorted(file.keys()) == [
            "first.bias/exp_avg", "first.bias/exp_avg_sq", "first.bias/step",
            "first.weight/exp_avg", "first.weight/exp_avg_sq", "first.weight/step",
            "last.bias/exp_avg", "last.bias/exp_avg_sq", "last.bias/step",
            "last.weight/exp_avg", "last.weight/exp_avg_sq", "last.weight/step",
        ]  # fmt: skip


def test_two_models_with_the_same_names_have_an_optimizer_each(tmp_path: Path) -> None:
    def training(seed: int) -> tuple[dict[str, Any], TrainingState]:
        torch.manual_seed(seed)
        maker, judge = ingredients.mlp(), ingredients.mlp()
        loss = nn.Linear(1, 1)
        members: dict[str, Any] = {
            "maker": maker, "judge": judge, "loss": loss,
            "of_maker": torch.optim.Adam([*maker.parameters(), *loss.parameters()], lr=0.01),
            "of_judge": torch.optim.SGD(judge.parameters(), lr=0.01, momentum=0.9),
        }  # fmt: skip
        state = TrainingState(
            model=maker, optimizer=members["of_maker"], judge=judge, of_judge=members["of_judge"], loss=loss
        )
        return members, state

    def train(members: dict[str, Any], steps: int) -> None:
        for _ in range(steps):
            x = torch.randn(2, 4)
            for name in ("of_maker", "of_judge"):
                members[name].zero_grad()
            (members["loss"](members["maker"](x)) - members["judge"](x)).square().sum().backward()
            for name in ("of_maker", "of_judge"):
                members[name].step()

    def numbers(members: dict[str, Any]) -> dict[str, str]:
        return dict(flatten({name: part.state_dict() for name, part in members.items()}, "run"))

    members, state = training(1)
    train(members, FIRST)
    CheckpointManager(tmp_path).save(FIRST, state)
    train(members, FIRST)
    others, other_state = training(2)
    CheckpointManager(tmp_path).restore_latest(other_state)
    train(others, FIRST)
    assert numbers(others) == numbers(members)


def test_modules_that_share_a_parameter_may_be_passed_in_another_order(tmp_path: Path) -> None:
    def state(order: int) -> TrainingState:
        head = nn.Linear(2, 2)
        modules = {"left": nn.Sequential(head, nn.Linear(2, 1)), "right": nn.Sequential(nn.Linear(2, 1), head)}
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        return TrainingState(optimizer=optimizer, **dict(list(modules.items())[::order]))

    CheckpointManager(tmp_path).save(1, state(1))
    assert CheckpointManager(tmp_path).restore(state(-1)).differences == ()
