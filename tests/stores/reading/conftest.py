"""A place in S3 with a checkpoint in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hfshard.stores.opening import open_store
from tests.stores.objects.conftest import bucket as bucket
from tests.stores.objects.conftest import s3 as s3
from tests.stores.objects.conftest import s3_endpoint as s3_endpoint


@pytest.fixture
def store_address(bucket: str) -> str:
    return f"s3://{bucket}/runs/bert"


def put_directory(directory: Path, address: str) -> None:
    """Put the files of a directory, as tools that sync do."""
    store = open_store(address)
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            store.put(path.relative_to(directory).as_posix(), path.read_bytes())
