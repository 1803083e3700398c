"""Failed requests of an object store: what they leave open."""

from __future__ import annotations

import pytest

from hfshard.stores.connection import Failure


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        *((Failure(status=status), True) for status in (408, 500, 502, 503, 504, 599)),
        *((Failure(status=status), False) for status in (301, 400, 403, 404, 409, 412, 429, 501)),
        (Failure(status=500, code="InternalError"), True),
        (Failure(status=500, code="NotImplemented"), False),
        *((Failure(transport=kind), True) for kind in ("Body", "Request", "Timeout")),
        *((Failure(transport=kind), False) for kind in ("", "Connect")),
    ],
    ids=str,
)
def test_a_change_may_be_made_unless_the_service_or_the_connection_says_otherwise(
    failure: Failure, expected: bool
) -> None:
    assert failure.may_be_done is expected
