"""A run in a bucket of S3, by moto's server on loopback."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stores.objects.conftest import bucket, s3, s3_endpoint
from tests.stores.runs.bucket_run import BucketRun

__all__ = ["bucket", "s3", "s3_endpoint"]


@pytest.fixture
def run(bucket: str, s3: Any) -> BucketRun:
    return BucketRun(s3, bucket, "runs/bert")
