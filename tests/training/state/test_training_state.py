"""The parts of a state have kinds and names, and what cannot be a part is refused with what to do instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hfshard.errors import InvalidArgumentError
from hfshard.training import Gradients, ResumableDataLoader, TrainingState
from hfshard.training.state.training_state import checked_state, reject_meta
from tests.training.data.samples import Numbers
from tests.training.ingredients import Keeps


def counter() -> Keeps:
    """Anything with a state."""
    return Keeps(torch.ones(1))


def test_parts_are_of_the_kind_of_their_class_or_else_of_their_name() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    state = TrainingState(
        model,
        optimizer,
        scheduler=counter(),
        ema=nn.Linear(2, 2),
        warmup=torch.optim.lr_scheduler.StepLR(optimizer, 1),
        second=ResumableDataLoader(Numbers()),
        gradients=Gradients(model),
        rank=counter(),
    )

    assert [*state.of_kind("module")] == ["model", "ema"]
    assert [*state.of_kind("optimizer")] == ["optimizer"]
    assert [*state.of_kind("scheduler")] == ["scheduler", "warmup"]
    assert [*state.of_kind("loader")] == ["second", "gradients"]
    assert [*state.of_kind("stateful")] == ["rank"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"rank12": counter()}, "'rank12' is a reserved name. Give the part another name."),
        ({"model": {}}, "model must be an nn.Module, got a dict."),
        ({"ema": 5}, "'ema' is a int, which has no state_dict and load_state_dict to save and restore it with."),
        (
            {"data": DataLoader(Numbers())},
            "'data' is a DataLoader, which has no state_dict and load_state_dict to save and restore it with. "
            "Use hfshard.training.ResumableDataLoader, which takes the same arguments.",
        ),
    ],
    ids=["rank12", "model", "no state", "plain loader"],
)
def test_what_cannot_be_a_part_is_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        TrainingState(**parts)

    assert str(caught.value) == message


def test_a_part_that_is_left_out_still_names_its_parameters() -> None:
    model = nn.Linear(2, 2, bias=False)
    state = TrainingState(model, count=counter())

    left = state.without(["model"])

    assert [*left.components] == [*left.kinds] == ["count"]
    assert left.left_out == {"model": model}
    assert left.parameter_names() == {id(model.weight): "weight"}
    assert [*state.components] == ["model", "count"]
    assert state.without([]) is state
    with pytest.raises(InvalidArgumentError, match=r"^The state has no part 'ema' to leave out\. It has: model, count"):
        state.without(["model", "ema"])
    with pytest.raises(InvalidArgumentError, match=r"^without must be a list of names, such as \['count'\]\.$"):
        state.without("count")


def test_a_shared_parameter_is_named_by_the_model_and_then_by_the_first_of_the_others() -> None:
    model, ema, head = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    ema.weight = model.weight
    head.bias = ema.bias
    tied = nn.ModuleDict({"a": head, "b": head})

    state = TrainingState(zoo=tied, ema=ema, model=model)
    state.aliases["bias"] = "stage.bias"

    assert state.parameter_names() == {
        id(model.weight): "weight",
        id(model.bias): "stage.bias",
        id(ema.bias): "ema:bias",
        id(head.weight): "zoo:a.weight",
    }
    assert state.tied_parameters() == [["zoo:a.weight", "zoo:b.weight"], ["zoo:a.bias", "zoo:b.bias"]]


def test_anything_else_is_answered_with_what_to_write() -> None:
    usual = (
        r"^state must be a TrainingState, got a NoneType\. Write: TrainingState\(model=model, optimizer=optimizer\)\.$"
    )
    with pytest.raises(InvalidArgumentError, match=usual):
        checked_state(None)
    with pytest.raises(InvalidArgumentError, match=r"got a dict\. Write: TrainingState\(model=\.\.\.\)\.$"):
        checked_state({"model": 1, "my ema": 2, 3: 4})


def test_an_optimizer_of_meta_parameters_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    reject_meta(TrainingState(model, torch.optim.SGD(model[0].parameters(), lr=0.1)))

    with pytest.raises(InvalidArgumentError, match=r"^'optimizer' trains '1\.weight', which is on the meta device\. "):
        reject_meta(TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1)))
