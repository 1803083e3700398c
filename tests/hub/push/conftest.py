"""What the tests of pushes are given: a Hub with a client that pushes, and a repo of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hub.push.push_hub import PushHub
from tests.hub.server_fixture import new_repo_id, shared


@pytest.fixture
def hub(request: pytest.FixtureRequest) -> Iterator[PushHub]:
    """The Hub that all tests of pushes share."""
    yield from shared(request, PushHub)


@pytest.fixture(scope="module")
def module_hub(request: pytest.FixtureRequest) -> Iterator[PushHub]:
    """The same Hub, for what the tests of a module look at together."""
    yield from shared(request, PushHub)


@pytest.fixture
def repo() -> str:
    """A name for a repo of this test alone; it does not exist yet."""
    return new_repo_id()
