"""What the tests of directory hubs are given: an empty hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from hfshard.hub.directory.directory_hub import DirectoryHub


@pytest.fixture
def hub(tmp_path: Path) -> DirectoryHub:
    """A hub to which nothing was pushed yet."""
    return DirectoryHub.create(tmp_path / "org" / "name")
