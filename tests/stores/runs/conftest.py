"""A run in each service."""

from __future__ import annotations

import pytest

from tests.servers.stores.buckets import Bucket
from tests.stores.runs.bucket_run import BucketRun


@pytest.fixture
def run(bucket: Bucket, store_address: str) -> BucketRun:
    return BucketRun(bucket, store_address)
