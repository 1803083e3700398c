"""A state's parts are found by name, compared, applied, and put back when one refuses, on this rank or on another."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hfshard._util.call_ranks import Session
from hfshard.errors import StateDictMismatchError
from hfshard.training import CheckpointManager, TrainingState
from hfshard.training.restoring.part_planner import all_or_nothing, may_refuse
from tests.sweeps.run_states import Counter, Tiny
from tests.training import ingredients
from tests.training.fingerprint import flatten


class Pressed:
    """Presses Ctrl-C at one of the lines that the package and torch run within the block, or counts them."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.lines = 0

    def __enter__(self) -> Pressed:
        self._signal = signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        signal.signal(signal.SIGINT, self._signal)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not any(part in frame.f_code.co_filename for part in ("/hfshard/training/", "/torch/optim/", "/torch/nn/")):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                os.kill(os.getpid(), signal.SIGINT)
        return self._trace


def test_ctrl_c_at_any_line_of_a_restore_leaves_all_as_it_was_or_restores_all(tmp_path: Path) -> None:
    saved = Tiny(2)
    with CheckpointManager(tmp_path) as manager:
        manager.save(2, saved.state())
        new = saved.fingerprint()
        manager.restore(Tiny(5).state(), 2)  # which fills caches
        state = Tiny(5).state()
        with Pressed() as counted:
            manager.restore(state, 2)
        found = []
        for at in sorted(random.Random(1).sample(range(1, counted.lines + 1), 120)):
            run = Tiny(5)
            old, state = run.fingerprint(), run.state()
            with pytest.raises(KeyboardInterrupt), Pressed(at):
                manager.restore(state, 2)
            found.append({False: "new", True: "old"}[run.fingerprint() == old])
            assert run.fingerprint() in (old, new), at
    assert found == sorted(found, reverse=True)  # first none, then all
    assert {*found} == {"new", "old"}


def test_each_part_is_put_back_though_one_refuses_that_too(caplog: pytest.LogCaptureFixture) -> None:
    was_put_back = []

    def refuse() -> None:
        raise ValueError("not for me either")

    undo = [lambda: was_put_back.append("first"), refuse, lambda: was_put_back.append("last")]
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(KeyError, match="weights"),
        all_or_nothing(Session(), undo),
    ):
        raise KeyError("weights")
    assert was_put_back == ["last", "first"]
    assert "Cannot undo the load of a part of the state, which is now mixed: not for me either" in caplog.text


class Counting(nn.Linear):
    """Has a state that is no tensor."""

    def __init__(self, count: int) -> None:
        super().__init__(2, 2)
        self.count = count

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


class Refusing(nn.BatchNorm1d):
    """Refuses its tensors once it has them."""

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        if int(self.num_batches_tracked or 0) > 0:
            raise ValueError("not for me")


def build(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: Any = nn.Sequential(Counting(seed), nn.Linear(2, 2), Refusing(2))
    model[1].weight = model[0].weight
    model(torch.ones(2, 2)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=float(seed), momentum=0.9)
    optimizer.step()
    return model, optimizer


def test_refused_weights_leave_the_whole_state_as_it_was(tmp_path: Path) -> None:
    model, optimizer = build(1)
    other, its_optimizer = build(2)
    other[2].num_batches_tracked.zero_()
    before = {name: value.clone() for name, value in other.state_dict().items() if isinstance(value, torch.Tensor)}
    counter, its_counter = Counter(), Counter()
    counter.values = {"count": 7, "mean": torch.ones(2)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainingState(model, optimizer, counter=counter))
        with pytest.raises(StateDictMismatchError, match=r"'model' refused its state .* Nothing was restored"):
            manager.restore(TrainingState(other, its_optimizer, counter=its_counter), 1)

    assert {name for name, value in before.items() if not torch.equal(value, other.state_dict()[name])} == set()
    assert other[1].weight is other[0].weight
    assert (other[0].count, its_optimizer.param_groups[0]["lr"]) == (2, 2.0)
    assert its_counter.values["count"] == Counter().values["count"] != 7


@pytest.mark.compat
def test_models_without_hooks_of_their_own_need_no_copy() -> None:
    assert not may_refuse(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.TransformerEncoderLayer(4, 2)))
    assert not may_refuse(weight_norm(nn.Linear(2, 2)))
    assert may_refuse(nn.Sequential(Refusing(2)))
    hooked = nn.Linear(2, 2)
    hooked.register_load_state_dict_post_hook(lambda *_: None)
    assert may_refuse(hooked)


def test_a_tie_that_the_checkpoint_does_not_have_is_refused(tmp_path: Path) -> None:
    saved, tied = (nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "ab"}) for _ in range(2))
    tied["b"].weight = tied["a"].weight
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainingState(model=saved))
        with pytest.raises(StateDictMismatchError, match=r"share memory in the 'model' that was"):
            manager.restore_latest(TrainingState(model=tied))


FIRST, ALL = 3, 6
"""Steps before the checkpoint, and in a whole run."""


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


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
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
    """A model with AdamW, a schedule and an average, whose numbers do not depend on how it is wrapped and ordered."""

    def __init__(
        self, seed: int, make: Callable[[], nn.Module] = ingredients.mlp, wrap: str = "plain", backwards: bool = False
    ) -> None:
        torch.manual_seed(seed)
        plain = make()
        self.names = [name for name, _ in plain.named_parameters()]
        self.parameters = list(plain.parameters())
        self.model = WRAPS[wrap](plain)
        order = -1 if backwards else 1  # of the groups, and of the members of each
        matrices, others = (
            [one for one in self.parameters if (one.ndim > 1) is is_matrix] for is_matrix in (True, False)
        )
        groups: list[dict[str, Any]] = [
            {"params": matrices[::order], "weight_decay": 0.1},
            {"params": others[::order], "weight_decay": 0.0, "betas": (0.8, 0.9)},
        ]
        self.optimizer = torch.optim.AdamW(groups[::order], lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.state = TrainingState(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, average=self.average
        )

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
    run = Training(1, ingredients.mlp, "compiled-data-parallel")
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
        maker, judge, loss = ingredients.mlp(), ingredients.mlp(), nn.Linear(1, 1)
        of_maker = torch.optim.Adam([*maker.parameters(), *loss.parameters()], lr=0.01)
        of_judge = torch.optim.SGD(judge.parameters(), lr=0.01, momentum=0.9)
        members = {"maker": maker, "judge": judge, "loss": loss, "of_maker": of_maker, "of_judge": of_judge}
        return members, TrainingState(model=maker, optimizer=of_maker, judge=judge, of_judge=of_judge, loss=loss)

    def train(members: dict[str, Any]) -> dict[str, str]:
        for _ in range(FIRST):
            x = torch.randn(2, 4)
            for name in ("of_maker", "of_judge"):
                members[name].zero_grad()
            (members["loss"](members["maker"](x)) - members["judge"](x)).square().sum().backward()
            for name in ("of_maker", "of_judge"):
                members[name].step()
        return dict(flatten({name: part.state_dict() for name, part in members.items()}, "run"))

    members, state = training(1)
    train(members)
    CheckpointManager(tmp_path).save(FIRST, state)
    expected = train(members)
    others, other_state = training(2)
    CheckpointManager(tmp_path).restore_latest(other_state)
    assert train(others) == expected


def test_modules_that_share_a_parameter_may_be_passed_in_another_order(tmp_path: Path) -> None:
    def state(order: int) -> TrainingState:
        head = nn.Linear(2, 2)
        modules = {"left": nn.Sequential(head, nn.Linear(2, 1)), "right": nn.Sequential(nn.Linear(2, 1), head)}
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        return TrainingState(optimizer=optimizer, **dict(list(modules.items())[::order]))

    CheckpointManager(tmp_path).save(1, state(1))
    assert CheckpointManager(tmp_path).restore(state(-1)).differences == ()


FORMS: dict[str, tuple[Any, ...]] = {
    **{wrap: (ingredients.mlp, wrap) for wrap in WRAPS if wrap != "plain"},
    **{f"honest-{wrap}": (ingredients.Honest, wrap) for wrap in ("plain", "data-parallel", "compiled-data-parallel")},
    "swapped": (Swapped,),
    "groups-backwards": (ingredients.mlp, "plain", True),
}
"""Models that are wrapped, ordered in another way, or have a child called `module`; the numbers are a plain one's."""


@pytest.mark.parametrize("is_saved", [True, False], ids=["saved", "restored"])
@pytest.mark.parametrize("form", FORMS)
def test_wrappers_and_orders_make_no_difference(tmp_path: Path, world_of_one: None, form: str, is_saved: bool) -> None:
    plain = (ingredients.Honest,) if form.startswith("honest") else (ingredients.mlp,)
    before, after = (FORMS[form], plain) if is_saved else (plain, FORMS[form])
    straight, first, second = Training(1, before[0]), Training(1, *before), Training(2, *after)
    straight.train(0, ALL)
    first.train(0, FIRST)
    with CheckpointManager(tmp_path) as manager:
        manager.save(FIRST, first.state)
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore_latest(second.state) == FIRST
    second.train(FIRST, ALL)
    assert second.numbers() == straight.numbers()


@pytest.mark.parametrize("is_frozen", [True, False])
def test_what_was_trained_and_is_frozen_now_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_frozen: bool
) -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[1].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    manager = CheckpointManager(tmp_path)
    manager.save(1, TrainingState(model=net, optimizer=optimizer))
    net[0].requires_grad_(not is_frozen)

    with caplog.at_level(logging.WARNING):
        manager.restore(TrainingState(model=net, optimizer=optimizer), 1)

    found = [record.getMessage() for record in caplog.records]
    assert len(found) == is_frozen
    assert all("has an optimizer state of '0.weight', which is frozen here" in words for words in found)
