"""Names that are asked for are found fast, and those that match nothing are named."""

from __future__ import annotations

import pytest

from hfshard.errors import StateDictMismatchError
from hfshard.tensors.parameter_names import select_keys


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
