"""What all tests of hubs are given: a repo of their own."""

from __future__ import annotations

import pytest

from tests.hub.server_fixture import new_repo_id


@pytest.fixture
def repo() -> str:
    """A name for a repo of this test alone; it does not exist yet."""
    return new_repo_id()
