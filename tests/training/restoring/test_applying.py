"""What was loaded is put back when a part refuses, on this rank or on another."""

from __future__ import annotations

import logging

import pytest

from hfshard.training.ranks import ALONE
from hfshard.training.restoring.applying import all_or_nothing


def test_each_part_is_put_back_though_one_refuses_that_too(caplog: pytest.LogCaptureFixture) -> None:
    was_put_back = []

    def refuse() -> None:
        raise ValueError("not for me either")

    undo = [lambda: was_put_back.append("first"), refuse, lambda: was_put_back.append("last")]
    with caplog.at_level(logging.ERROR), pytest.raises(KeyError, match="weights"), all_or_nothing(ALONE, undo):
        raise KeyError("weights")
    assert was_put_back == ["last", "first"]
    assert "can't be put back as it was, and is mixed: not for me either" in caplog.text
