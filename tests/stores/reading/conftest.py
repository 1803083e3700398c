"""Loads are tried on S3: what another service does differently is its store's affair, and the suite's."""

from __future__ import annotations

from pathlib import Path

import pytest

from hfshard.stores.open_store import open_store


@pytest.fixture
def scheme() -> str:
    return "s3"


def put_directory(directory: Path, address: str) -> None:
    """Put the files of a directory, as tools that sync do."""
    store = open_store(address)
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            store.put(path.relative_to(directory).as_posix(), path.read_bytes())
