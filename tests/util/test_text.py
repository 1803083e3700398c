"""Words for messages."""

from __future__ import annotations

import pytest

from hfshard._util.text import error_words, list_some


@pytest.mark.parametrize(
    ("items", "expected"),
    [([], ""), (["a"], "a"), (["a", "b"], "a, b"), (["a", "b", "c"], "a, b and 1 more")],
)
def test_a_list_is_cut_and_says_how_much_is_missing(items: list[str], expected: str) -> None:
    assert list_some(items, 2) == expected


def test_each_item_is_quoted_where_asked_for() -> None:
    assert list_some({"x": 1, "y": 2}.keys(), 1, quote=True) == "'x' and 1 more"


def test_an_error_that_says_nothing_is_known_by_its_class_alone() -> None:
    assert error_words(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert error_words(OSError("the disk is full")) == "OSError: the disk is full"
