"""What a rank that failed tells the others."""

from __future__ import annotations

import pytest

from hfshard.distributed.liveness import error_from_record, failure_record


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (OSError("The disk is full."), "OSError: The disk is full"),
    ],
)
def test_the_others_are_told_what_failed_in_one_sentence(error: BaseException, said: str) -> None:
    told = error_from_record(failure_record(error, 1))

    assert told.rank == 1
    assert str(told) == f"Rank 1 failed, so the other ranks gave up: {said}. Fix that, and call again on every rank."
