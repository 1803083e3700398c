"""Described values are what they should be, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hfshard.errors import UnsafePickleError
from hfshard.foreign.described_values import (
    MALFORMED,
    parse_count,
    parse_dict,
    parse_shape,
    parse_state,
    parse_text,
    pattern_of,
    reject_other_names,
)
from hfshard.pickles.pickle_opcodes import DescribedObject


def test_values_are_returned() -> None:
    ordered = DescribedObject("collections.OrderedDict", (), pairs=[("a", 1)])

    assert parse_dict(ordered) == {"a": 1}
    assert parse_state(DescribedObject("m.C", (), {"a": 1}), "m.B", "m.C") == {"a": 1}
    assert parse_text("a") == "a"
    assert parse_count((1 << 63) - 1) == (1 << 63) - 1
    assert parse_shape(DescribedObject("torch.Size", ((2, 3),))) == parse_shape([2, 3]) == (2, 3)


@pytest.mark.parametrize(
    ("parse", "value"),
    [
        (parse_dict, [1]),
        (parse_dict, {1: 2}),
        (parse_state, {"a": 1}),
        (parse_text, b"a"),
        (parse_count, True),
        (parse_count, -1),
        (parse_count, 1 << 63),
        (parse_count, 1.0),
        (parse_shape, 3),
        (parse_shape, (1,) * 65),
        (parse_shape, (-1,)),
    ],
)
def test_other_values_are_refused(parse: Callable[..., Any], value: Any) -> None:
    with pytest.raises(MALFORMED):
        parse(value, *["m.C"] * (parse is parse_state))


def test_names_are_admitted_one_by_one_or_by_a_pattern() -> None:
    admitted = pattern_of(("a.B", "c.D"), r"e\.\w+")

    reject_other_names({"a.B", "c.D", "e.F", "torch.float32"}, admitted, "x.pt", "a test")
    for name in ("a.Bc", "axB", "e.F.g", "torch.load"):
        with pytest.raises(UnsafePickleError, match=f"'x.pt' asks for '{name}', which is nothing a test needs"):
            reject_other_names({"a.B", name}, admitted, "x.pt", "a test")
