"""The services that tests of stores talk to do what their names promise, asked without hfshard."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers import forkserver
from tests.stores.services.buckets import Bucket
from tests.stores.services.kinds import SERVICES


def test_what_is_put_is_listed_read_and_deleted(bucket: Bucket, store_prefix: str, tmp_path: Path) -> None:
    bucket.put(f"{store_prefix}/a b/ü.json", b"{}")
    bucket.put(f"{store_prefix}/weights", b"\0" * 5000)
    bucket.put(f"{store_prefix}-beside", b"")

    assert bucket.sizes(f"{store_prefix}/") == {f"{store_prefix}/a b/ü.json": 2, f"{store_prefix}/weights": 5000}
    assert bucket.objects(store_prefix) == {"a b/ü.json": b"{}", "weights": b"\0" * 5000}
    assert bucket.unfinished(store_prefix) == []
    copied = bucket.copy_to(store_prefix, tmp_path / "copy")
    assert (copied / "a b" / "ü.json").read_bytes() == b"{}"

    bucket.delete(f"{store_prefix}/weights")
    assert bucket.sizes(f"{store_prefix}/") == {f"{store_prefix}/a b/ü.json": 2}


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_an_unfinished_upload_is_seen_by_its_name(bucket: Bucket, scheme: str, store_prefix: str) -> None:
    key = f"{store_prefix}/part"
    if scheme == "az":
        bucket.ask("PUT", key, {"comp": "block", "blockid": "MDAwMQ=="}, b"12345")
    else:
        bucket.ask("POST", key, {"uploads": ""})
    assert bucket.unfinished(store_prefix) == [key]
    assert bucket.sizes(f"{store_prefix}/") == {}


def test_each_process_of_a_run_has_the_same_service(bucket: Bucket, scheme: str) -> None:
    code = "import sys; from tests.stores.services.running import url_of; print(url_of(sys.argv[1]))"
    done = forkserver.run(["-c", code, scheme], env=os.environ)
    assert (done.stdout, done.stderr) == (f"{bucket.url}\n", "")


def test_a_place_is_fresh_and_known_to_the_tools_of_its_service(store_place: str) -> None:
    scheme = store_place.partition("://")[0]
    if scheme in SERVICES:
        variable = {
            "s3": "AWS_ENDPOINT_URL_S3",
            "gs": "STORAGE_EMULATOR_HOST",
            "az": "AZURE_STORAGE_CONNECTION_STRING",
            "hf": "HF_ENDPOINT",
        }
        assert "http://127.0.0.1:" in os.environ[variable[scheme]]
    else:
        assert not Path(store_place).exists()
