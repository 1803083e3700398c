"""Places in every service for tests of stores, each fresh, with the environment in which its own tools find it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from hfshard.stores import retry
from tests.stores.services import running
from tests.stores.services.buckets import BUCKET, BUCKETS, HUB_BUCKET, Bucket
from tests.stores.services.fault_proxy import FaultProxy
from tests.stores.services.kinds import SERVICES

DIRECTORY = "directory"
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
