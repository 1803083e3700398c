"""hfshard installed for the length of a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import hfshard


@pytest.fixture(autouse=True)
def uninstalled() -> Iterator[None]:
    """Whatever a test installs is gone when it ends."""
    hfshard.uninstall()
    yield
    hfshard.uninstall()


@pytest.fixture
def installed() -> None:
    """Hfshard is on."""
    hfshard.install(quiet=True)
