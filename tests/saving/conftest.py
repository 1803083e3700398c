"""What the tests of re-shards are given: a Hub with a client that pulls, and a repo of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hub.pull.pull_hub import PullHub
from tests.hub.server_fixture import new_repo_id, shared


@pytest.fixture
def hub(request: pytest.FixtureRequest) -> Iterator[PullHub]:
    """The Hub that all tests of pulls share."""
    yield from shared(request, PullHub)


@pytest.fixture
def repo() -> str:
    """A name for a repo of this test alone; it does not exist yet."""
    return new_repo_id()
