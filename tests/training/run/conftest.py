"""What the tests of pushed runs are given: a Hub with a client that trains and pushes, and a repo of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hub.server_fixture import new_repo_id, shared
from tests.training.run.run_hub import RunHub


@pytest.fixture
def hub(request: pytest.FixtureRequest) -> Iterator[RunHub]:
    """The Hub that all tests of pushed runs share."""
    yield from shared(request, RunHub)


@pytest.fixture
def repo() -> str:
    """A name for a repo of this test alone; it does not exist yet."""
    return new_repo_id()
