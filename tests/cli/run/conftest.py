"""An environment without ranks, and a directory with programs."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.cli.run.programs import LOOKS, without_hfshard_on


@pytest.fixture(scope="session")
def environment(child_environment: dict[str, str]) -> dict[str, str]:
    """That of a shell in which nothing runs."""
    return without_hfshard_on(child_environment)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """The same program as a script, a module of a package, a directory, a zip file; "in here" has a space."""
    directory = tmp_path / "in here"
    (directory / "package").mkdir(parents=True)
    for name in ("look.py", "package/__init__.py", "package/look.py", "package/__main__.py"):
        (directory / name).write_text("" if name.endswith("__init__.py") else LOOKS)
    with zipfile.ZipFile(directory / "look.pyz", "w") as archive:
        archive.writestr("__main__.py", LOOKS)
    return directory
