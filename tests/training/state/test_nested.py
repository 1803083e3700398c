"""Values in JSON and tensors: every type comes back as it was, what has no form is refused by its path."""

from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from hfshard.errors import DamagedCheckpointError, UnstorableTensorError
from hfshard.format.strict_json import padded_json, parse_json_object
from hfshard.pickles.plain_values import NOT_STORED
from hfshard.training.state.nested import ObjectState, decode, encode
from hfshard.training.state.step import RestoredStep
from tests.helpers.random_state_dicts import DTYPES, random_tensor
from tests.helpers.tensor_bytes import bytes_of
from tests.training import fingerprint
from tests.training.run import hostile

BLOCK = 4096


def through_a_file(value: Any, path: str = "x") -> Any:
    """What comes back when a value was written and read; its tensors as they are."""
    tensors: dict[str, torch.Tensor] = {}
    nested = encode(value, path, tensors)
    raw = padded_json({"value": nested})
    assert len(raw) % BLOCK == 0
    return decode(parse_json_object(raw, path="file", what="Tree", remedy="")["value"], tensors, "file")


def bits(value: Any) -> list[tuple[str, str]]:
    """All of a value, with the types of everything in it."""
    return [*fingerprint.flatten(value, "x"), ("type", type(value).__name__)]


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, -1, 2**63, -(2**64), 10**4000, 0.0, -0.0, 0.1, 1e308, 5e-324, math.inf, -math.inf,
        math.nan, 1 + 2j, complex(math.nan, -math.inf), "", "a\u0000b\n\"\\", "é中🎉", b"", b"\x00\xff", [],
        [1, [2.0, [None]]], (), (1,), ((1, 2), [3]), {}, {"a": 1}, {"$type": "tensor", "name": "x"},
        {1: "a", "1": "b"}, {None: 1, True: 2, (1, 2): 3},
        {0.5: {}, b"k": []}, OrderedDict([("b", 1), ("a", 2)]), Counter("hello"), deque([1, 2], maxlen=3), deque(),
        torch.Size([2, 3]), torch.float8_e4m3fn, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 3),
        np.float64(0.1), np.int8(-3), np.bool_(True), np.str_("x"), np.complex64(1j), np.datetime64("2026-01-01"),
        np.arange(6, dtype=">i4").reshape(2, 3), np.zeros((0, 3)), np.array(5.0), np.asfortranarray(np.ones((2, 3))),
        {"deep": [({"x": [(1,)]},)] * 3}, {"a" * 300: 1, "a" * 301: 2},
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert bits(through_a_file(value)) == bits(value)


def test_the_step_of_a_restore_comes_back_as_a_plain_int() -> None:
    back = through_a_file({"resumed": [RestoredStep(7)], RestoredStep(8): "loss"})

    assert back == {"resumed": [7], 8: "loss"}
    assert [type(back["resumed"][0]), type(list(back)[1])] == [int, int]


@pytest.mark.parametrize(
    "value", [set(), {1, "1", 2.0}, frozenset({(1, 2), None}), range(1, 10, 3), slice(None, 5, None), bytearray(b"ab")]
)
def test_values_that_compare_come_back(value: Any) -> None:
    found = through_a_file(value)
    assert found == value
    assert type(found) is type(value)


def test_default_dicts_keep_their_factory() -> None:
    found = through_a_file(defaultdict(list, {1: [2]}))
    assert found == {1: [2]}
    assert found["new"] == []
    assert through_a_file(defaultdict(None, {1: 2})).default_factory is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors_are_put_aside_as_they_are(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_tensor(1, dtype, shape)
    tensors: dict[str, torch.Tensor] = {}
    nested = encode([tensor], "opt", tensors)
    assert nested == [{"$type": "tensor", "name": "opt/0"}]
    assert tensors["opt/0"].data_ptr() == tensor.data_ptr()
    assert bytes_of(decode(nested, tensors, "file")[0]) == bytes_of(tensor)


def test_the_order_of_a_tensor_in_memory_comes_back() -> None:
    image = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    found = through_a_file([image])[0]
    assert torch.equal(found, image)
    assert found.stride() == (24, 1, 8, 2)


def test_tensors_whose_names_would_be_one_are_kept_apart() -> None:
    one, two, three, four = (torch.tensor(float(number)) for number in range(4))
    value = {"a": {"b": one}, "a/b": two, 1: three, "1": four}
    found = through_a_file(value)
    assert [found["a"]["b"].item(), found["a/b"].item(), found[1].item(), found["1"].item()] == [0, 1, 2, 3]
    long = {"k" * 250 + end: torch.tensor(float(number)) for number, end in enumerate("abc")}
    assert [tensor.item() for tensor in through_a_file(long).values()] == [0, 1, 2]
    value = {"a/b": one, "a": {"b": two}, "a/b~2": three}
    found = through_a_file(value)
    assert [found["a/b"].item(), found["a"]["b"].item(), found["a/b~2"].item()] == [0, 1, 2]


def test_a_dict_of_many_tensors_is_one_line() -> None:
    tensors: dict[str, torch.Tensor] = {}
    nested = encode({"exp_avg": torch.zeros(2), "step": torch.tensor(1.0)}, "w", tensors)
    assert nested == {"$type": "tensors", "at": "w", "keys": ["exp_avg", "step"]}
    assert list(tensors) == ["w/exp_avg", "w/step"]


Pair = namedtuple("Pair", "a b")


class Colour(enum.Enum):
    """An enum."""

    RED = 1


class Mine(dict):  # type: ignore[type-arg]
    """A dict that is more."""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: 1, "is a function"), (object(), "is a object"), (Colour.RED, "Colour"), (Pair(1, 2), "Pair"),
        (Mine(), "Mine"), (torch, "module"), (torch.nn.Linear, "type"), ("\ud800", "written as UTF-8"),
        (np.array([None]), "dtype"),
        (defaultdict(lambda: 1), "default factory"), (np.zeros(1, [("a", "f4")]), "dtype"), (1 .__add__, "wrapper"),
    ],
)  # fmt: skip
def test_what_has_no_form_is_refused_by_its_path(value: Any, words: str) -> None:
    with pytest.raises(UnstorableTensorError, match=rf"'state/list/1/key' is a .*{words}|{words}.*") as caught:
        encode({"list": [0, {"key": value}]}, "state", {})
    assert caught.value.fqn == "state/list/1/key"


def test_what_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnstorableTensorError, match="contains itself, or is nested deeper than 40 levels"):
        encode(loop, "x", {})


@pytest.mark.parametrize("wrap", [lambda one: [one], lambda one: (one,), lambda one: {"k": one}, lambda one: {1: one}])
def test_what_is_stored_can_be_read_however_deep_it_is(wrap: Any) -> None:
    value: Any = 1
    with pytest.raises(UnstorableTensorError, match="nested deeper"):
        for _ in range(50):
            value = wrap(value)
            assert bits(through_a_file(value)) == bits(value)


keys = st.one_of(
    st.text(max_size=5), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text(max_size=2))
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    st.builds(random_tensor, st.integers(0, 9), st.sampled_from(DTYPES), st.sampled_from([(), (0,), (3,), (2, 2)])),
    st.builds(np.float32, st.integers(-9, 9)),
    st.builds(lambda size: np.arange(size), st.integers(0, 4)),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.builds(deque, st.lists(inner, max_size=3), st.one_of(st.none(), st.integers(3, 5))),
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=50)
@given(values)
def test_any_value_comes_back_as_it_was(value: Any) -> None:
    assert bits(through_a_file(value)) == bits(value)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=30), st.integers(0, 2**64 - 1))
def test_the_size_of_a_file_does_not_depend_on_its_numbers(numbers: list[float], step: int) -> None:
    one = padded_json({"format": 1, "step": step, "numbers": numbers, "e": '1.5 and " 2'})
    zeros = padded_json({"format": 1, "step": 0, "numbers": [0.0] * len(numbers), "e": '1.5 and " 2'})
    assert len(one) == len(zeros)
    assert json.loads(one) == {"format": 1, "step": step, "numbers": numbers, "e": '1.5 and " 2'}


def test_marks_and_objects_come_back() -> None:
    nested = encode(
        [print, Colour],
        "x",
        {},
        on_object=lambda value: NOT_STORED if value is print else ObjectState("C", {"a": (1,)}),
    )
    found = decode(json.loads(json.dumps(nested)), {}, "file")
    assert found == [NOT_STORED, ObjectState("C", {"a": (1,)})]


@pytest.mark.parametrize("odd", [value for value in hostile.VALUES if isinstance(value, dict) and value], ids=str)
def test_odd_json_is_a_value_or_an_error_of_ours(odd: dict[str, Any]) -> None:
    try:
        decode([odd], {"counter/mean": torch.zeros(2)}, "the file")
    except DamagedCheckpointError as error:
        assert "'the file' is damaged" in str(error)
