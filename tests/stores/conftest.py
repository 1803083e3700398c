"""Places in every service for tests of stores, each fresh, with the environment in which its own tools find it."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from huggingface_hub import HfApi, constants

from hfshard.stores import retry
from tests.servers.stores import running
from tests.servers.stores.buckets import BUCKET, BUCKETS, HUB_BUCKET, Bucket
from tests.servers.stores.fault_proxy import FaultProxy
from tests.servers.stores.kinds import SERVICES

if TYPE_CHECKING:
    from hfshard.stores.bucket import BucketStore
    from tests.servers.hub.hub_server import HubServer

DIRECTORY = "directory"
VARIABLES = ("AWS_", "AZURE_", "GOOGLE_", "STORAGE_EMULATOR_HOST", "CLOUDSDK_", "HFSHARD_STORE_")
SERVER_BUCKET = "org/models"
_PREFIXES = itertools.count(1)
_FIRST_WAIT_SECONDS = 0.3
"""Before a request that failed is sent again; it is tried for as long as users' are, however slow the machine is."""
_ABORT_SECONDS = 100.0
"""For which an upload that is given up is waited for, where tests look whether anything is left of it."""


def use_service(scheme: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Let this test find a service, or skip it aloud where that lacks something; gives its bucket."""
    lacks = SERVICES[scheme].lacks()
    if lacks:
        pytest.skip(lacks)
    url = running.url_of(scheme)
    lead_to(url, scheme, monkeypatch)
    monkeypatch.setattr(retry, "_FIRST_WAIT", _FIRST_WAIT_SECONDS)
    if scheme != "hf":
        from hfshard.stores import object_store  # needs obstore, which tests of directories do without

        monkeypatch.setattr(object_store, "_ABORT_SECONDS", _ABORT_SECONDS)
    return BUCKETS[scheme](url)


def lead_to(url: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clients of a service take this URL for its own."""
    for name, text in SERVICES[scheme].environment(url).items():
        monkeypatch.setenv(name, text)
    if scheme == "hf":
        # huggingface_hub has read its environment.
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def new_place(scheme: str) -> str:
    """The address of a place in a service where nothing lies."""
    root = f"hf://buckets/{HUB_BUCKET}" if scheme == "hf" else f"{scheme}://{BUCKET}"
    return f"{root}/{secrets.token_hex(6)}/place"


@pytest.fixture(params=list(SERVICES))
def scheme(request: pytest.FixtureRequest) -> str:
    """That of each service, one after the other; `@pytest.mark.parametrize("scheme", ["s3"])` chooses."""
    given: str = request.param
    return given


@pytest.fixture
def bucket(scheme: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """The bucket of the service, for looking into it without hfshard."""
    return use_service(scheme, monkeypatch)


@pytest.fixture
def proxy(scheme: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Stands before the service from now on: counts the requests, and breaks those that the test chooses."""
    with FaultProxy(bucket.url, scheme) as proxy:
        lead_to(proxy.url, scheme, monkeypatch)
        yield proxy


@pytest.fixture
def store_address(scheme: str, bucket: Bucket) -> str:
    """The address of a place in the service where nothing lies."""
    return new_place(scheme)


@pytest.fixture
def store_prefix(store_address: str) -> str:
    """What the keys in `bucket` of that place begin with, without the last slash."""
    return store_address.partition(f"/{BUCKET}/")[2]


@pytest.fixture(params=[DIRECTORY, *SERVICES])
def store_place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where nothing lies yet: a directory, and an address in each service."""
    if request.param == DIRECTORY:
        yield str(tmp_path / "place")
    else:
        use_service(request.param, monkeypatch)
        yield new_place(request.param)


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user who has set nothing, in a home of his own, on a machine of no cloud; gives the home."""
    for name in os.environ:
        if name.startswith(VARIABLES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    monkeypatch.setenv("HFSHARD_STORE_RETRY_SECONDS", "0.2")
    monkeypatch.setenv("HFSHARD_STORE_TIMEOUT", "2")
    return tmp_path


@pytest.fixture(scope="session")
def bucket_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    from tests.servers.hub.hub_server import HubServer

    with HubServer(tmp_path_factory.mktemp("hub"), page_size=2) as server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(constants, "HF_HUB_OFFLINE", False)
            HfApi(endpoint=server.endpoint, token="hf_write").create_bucket(SERVER_BUCKET)
        yield server


@pytest.fixture
def hub(
    bucket_server: HubServer, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> HubServer:
    """The server, and the environment that leads hfshard there."""
    home = tmp_path_factory.getbasetemp() / "hf-home"
    for name, value in bucket_server.environment(home=home).items():
        if name.startswith("HF_"):
            monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", bucket_server.endpoint)
    bucket_server.clear_log()
    return bucket_server


@pytest.fixture
def store(hub: HubServer) -> BucketStore:
    """A place in a bucket of that server, of this test alone."""
    from hfshard.stores.bucket import BucketStore
    from hfshard.stores.open_store import open_store

    opened = open_store(f"hf://buckets/{SERVER_BUCKET}/runs/{next(_PREFIXES)}")
    assert isinstance(opened, BucketStore)
    return opened
