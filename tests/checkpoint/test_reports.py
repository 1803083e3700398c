"""A report of a check is plain data."""

from __future__ import annotations

from hfshard.checkpoint.reports import Problem, VerifyReport


def test_a_checkpoint_is_ok_if_nothing_is_wrong_whatever_it_is_warned_of() -> None:
    problem = Problem("/c/model.safetensors", "w", "Tensor 'w' differs.")

    assert VerifyReport("/c", ("model.safetensors",), (), ("A stray file.",), 8).ok
    assert not VerifyReport("/c", ("model.safetensors",), (problem,), (), 8).ok
