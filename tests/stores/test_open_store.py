"""Opening stores by their addresses."""

from __future__ import annotations

import sys

import pytest

from hfshard import stores
from hfshard.errors import InvalidArgumentError, StoreError
from hfshard.stores.open_store import open_store
from tests.servers.stores.buckets import BUCKET, Bucket


@pytest.mark.parametrize(("scheme", "package"), [("s3", "botocore"), ("gs", "obstore"), ("az", "obstore")])
def test_a_package_that_is_missing_is_named_with_its_extra(
    scheme: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("object_store", "connection", "s3", "gcs", "azure"):
        monkeypatch.delitem(sys.modules, f"hfshard.stores.{name}", raising=False)
        monkeypatch.delattr(stores, name, raising=False)
    for name in [package, *(name for name in sys.modules if name.partition(".")[0] == package)]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        StoreError, match=rf"{scheme}://models/bert requires the package '{package}.*'hfshard\[stores\]'"
    ):
        open_store(f"{scheme}://models/bert")


@pytest.mark.parametrize("scheme", ["s3"])
@pytest.mark.parametrize("variable", ["HFSHARD_STORE_MEMORY", "HFSHARD_STORE_TIMEOUT", "HFSHARD_STORE_RETRY_SECONDS"])
def test_a_setting_that_is_none_is_refused_at_once(
    store_address: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "much")
    with pytest.raises(InvalidArgumentError, match=variable):
        open_store(store_address)


@pytest.mark.parametrize("scheme", ["s3"])
def test_a_public_bucket_needs_no_credentials(
    bucket: Bucket, store_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    bucket.put(f"{store_prefix}/config.json", b"{}")
    assert list(open_store(f"s3://{BUCKET}/{store_prefix}").list_objects()) == ["config.json"]
