"""Wrappers' prefixes are stripped from names, and a child that is really called so keeps its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hfshard.errors import StateDictMismatchError
from hfshard.tensors.parameter_names import has_wrapper_prefix, match_prefixes, select_keys
from hfshard.tensors.state_dict import collect_state_dict, parameter_names

NAMES: list[tuple[str, list[str], list[str], list[str]]] = [
    ("nothing to take off", ["a.w", "b"], ["a.w", "b"], ["a.w", "b"]),
    ("one wrapper", ["a.w", "b"], ["module.a.w", "module.b"], ["a.w", "b"]),
    ("two", ["a.w", "b"], ["_orig_mod.module.a.w", "_orig_mod.module.b"], ["a.w", "b"]),
    ("an honest child", ["module.w", "b"], ["module.w", "b"], ["module.w", "b"]),
    ("an honest child in a wrapper", ["module.w", "b"], ["module.module.w", "module.b"], ["module.w", "b"]),
    (
        "a name of an honest child's and the wrapper's",
        ["module.w", "w"],
        ["module.module.w", "module.w"],
        ["module.w", "w"],
    ),
    ("an honest child that is all there is", ["module.w"], ["module.w"], ["module.w"]),
    ("the same in a wrapper", ["module.w"], ["module.module.w"], ["module.w"]),
    ("a wrapped child", ["a.0.w", "b"], ["a.module.0.w", "b"], ["a.0.w", "b"]),
    ("a compiled child", ["a.0.w", "b"], ["a.0._orig_mod.w", "b"], ["a.0.w", "b"]),
    ("a compiled child in a wrapper", ["a.0.w", "b"], ["module.a.0._orig_mod.w", "module.b"], ["a.0.w", "b"]),
    ("more than the model has", ["a"], ["module.a", "module.extra"], ["a", "extra"]),
    ("an extra name of its own", ["a"], ["a", "module.extra"], ["a", "module.extra"]),
    ("a wrapped copy beside it", ["a"], ["a", "module.a"], ["a", "module.a"]),
    ("a wrapped copy before it", ["a"], ["module.a", "a"], ["module.a", "a"]),
    ("two wrapped copies", ["a"], ["module.a", "_orig_mod.a"], ["a", "_orig_mod.a"]),
    ("a leaf that is called so", ["module"], ["module.module"], ["module"]),
    ("letters that begin so", ["module_list.w"], ["module_list.w"], ["module_list.w"]),
    ("nothing of the model's", ["a"], ["module.x"], ["module.x"]),
    ("no names", ["a"], [], []),
]


@pytest.mark.parametrize(("expected", "names", "result"), [row[1:] for row in NAMES], ids=[row[0] for row in NAMES])
def test_wrappers_are_taken_off_where_that_makes_names_fit(
    expected: list[str], names: list[str], result: list[str]
) -> None:
    assert list(match_prefixes(names, expected).items()) == list(zip(names, result))


def test_only_a_whole_part_of_a_name_is_a_wrappers() -> None:
    assert has_wrapper_prefix(["a", "b.module.c"])
    assert not has_wrapper_prefix(["module_list.0", "a.modules", "mod", "orig_mod.a"])


@pytest.mark.compat
def test_wrappers_are_taken_off_a_model_by_what_they_are_and_never_by_name() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)
            self.wrapped = nn.DataParallel(nn.Linear(2, 2))

    model = Net()

    state_dict = collect_state_dict(nn.DataParallel(nn.DataParallel(model)))

    assert list(state_dict) == ["module.weight", "module.bias", "wrapped.weight", "wrapped.bias"]
    own = model.state_dict()
    own_names = ["module.weight", "module.bias", "wrapped.module.weight", "wrapped.module.bias"]
    assert [value.data_ptr() for value in state_dict.values()] == [own[name].data_ptr() for name in own_names]


class ScaledParallel(nn.DataParallel[nn.Module]):
    """A wrapper that has a parameter of its own, under the name of one of the wrapped module's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.weight = nn.Parameter(torch.full((1,), 7.0))


def test_a_wrapper_with_parameters_of_its_own_loses_none() -> None:
    wrapper = ScaledParallel(nn.Linear(1, 1, bias=False))
    assert list(collect_state_dict(wrapper)) == ["weight", "module.weight"]
    assert list(collect_state_dict(nn.Sequential(wrapper))) == ["0.weight", "0.module.weight"]


@pytest.mark.compat
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # that torch's compiler uses itself
def test_names_of_parameters_are_those_of_the_state_dict_where_activations_are_recomputed() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

    inside: Any = torch.compile(nn.Linear(2, 2))
    net = nn.Sequential(checkpoint_wrapper(inside), offload_wrapper(checkpoint_wrapper(nn.Linear(2, 2, bias=False))))
    assert next(iter(dict(net.named_parameters()))) == "0._checkpoint_wrapped_module._orig_mod.weight"

    assert list(collect_state_dict(net)) == ["0.weight", "0.bias", "1.weight"]
    assert list(parameter_names(net).values()) == ["0.weight", "0.bias", "1.weight"]
    assert list(parameter_names(net[1]).values()) == ["weight"]


# Names that are asked for are found fast, and those that match nothing are named.


class CountedName(str):
    """A name that counts how often any such name is looked up."""

    lookups = 0

    def __hash__(self) -> int:
        CountedName.lookups += 1
        return super().__hash__()


def test_exact_keys_are_selected_in_linear_time() -> None:
    names = [CountedName(f"layers.{number}.weight") for number in range(1000)]

    assert select_keys(names, names[::2]) == names[::2]

    assert CountedName.lookups <= 20 * len(names)  # a set of all names for each of them made a million


def test_selected_keys_that_match_nothing_are_all_named() -> None:
    with pytest.raises(StateDictMismatchError, match=r"d\.\*, e") as raised:
        select_keys(["a.b", "a[0].b", "c"], ["a.*", "a[0].b", "d.*", "e"])
    assert raised.value.missing_keys == ("d.*", "e")
    assert select_keys(["a.b", "a[0].b", "c"], ["c", "a[0].b", "*.b"]) == ["a.b", "a[0].b", "c"]
