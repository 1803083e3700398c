"""What the tests of scripts share."""

from __future__ import annotations

import pytest

from tests.helpers.processes import environment_of


@pytest.fixture(scope="session")
def forking_environment(child_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment for a script whose own new interpreters are forks."""
    return environment_of(tmp_path_factory.mktemp("python"), child_environment)
