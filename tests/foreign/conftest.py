"""Where checkpoints are that the tests of a session share, as the real frameworks take seconds to write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def produced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for all processes of the session."""
    own = tmp_path_factory.getbasetemp()
    root = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "produced"
    root.mkdir(exist_ok=True)
    return root
