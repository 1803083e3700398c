"""Names: what wrappers put before them is taken off, and what is honestly called so stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hfshard.errors import StateDictMismatchError
from hfshard.state_dicts.keys import select_keys
from hfshard.state_dicts.state_dict import assign, collect_state_dict
from hfshard.state_dicts.wrappers import has_wrapper_prefix, match_prefixes

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


class Telling(nn.Module):
    """Tells in which order it was asked to load, and with what."""

    def __init__(self, told: list[tuple[str, list[str]]], version: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.told, self._version = told, version
        self.register_load_state_dict_pre_hook(self.before)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            lambda _, keys: told.append(("after", sorted(keys.missing_keys)))
        )

    def before(self, _: nn.Module, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.told.append((f"{prefix} version {metadata.get('version')}", sorted(state_dict)))


def told_by(load: Any) -> list[tuple[str, list[str]]]:
    """What the modules of a model tell when `load` brings two of its three weights."""
    told: list[tuple[str, list[str]]] = []
    model = nn.Sequential(Telling(told, 3), nn.ModuleList([Telling(told)]))
    setattr(model, "a.b", Telling(told))
    load(model, {"0.weight": torch.ones(1), "a.b.weight": torch.ones(1)})
    assert [float(value) for value in model.state_dict().values()] == [1, 0, 1]
    return told


def test_modules_hooks_see_what_torch_would_show_them() -> None:
    assert told_by(assign) == [
        ("0. version 3", ["0.weight"]),
        ("after", []),
        ("1.0. version 1", []),
        ("after", ["1.0.weight"]),
        ("a.b. version 1", ["a.b.weight"]),
        ("after", ["1.0.weight"]),
    ]


def test_a_tensor_of_another_shape_is_refused_as_by_torch() -> None:
    with pytest.raises(RuntimeError, match=r"loading state_dict for Linear:\n\tsize mismatch for weight"):
        assign(nn.Linear(2, 2), {"weight": torch.zeros(3, 3)})


def test_a_model_that_loads_by_itself_is_asked_to() -> None:
    class Own(nn.Linear):
        given: Any = None

        def load_state_dict(self, state_dict: Any, *arguments: Any, **options: Any) -> Any:
            self.given = list(state_dict), options

    model = Own(1, 1)
    assign(model, {"weight": torch.zeros(1, 1)})
    assert model.given == (["weight"], {"strict": False, "assign": False})
