"""Buckets on the Hub server of the tests; one prefix a test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from huggingface_hub import HfApi, constants

from hfshard.stores.bucket import BucketStore
from hfshard.stores.open_store import open_store
from tests.hubserver.hub_server import HubServer

BUCKET = "org/models"

_PREFIXES = itertools.count(1)


@pytest.fixture(scope="session")
def bucket_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with HubServer(tmp_path_factory.mktemp("hub"), page_size=2) as server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(constants, "HF_HUB_OFFLINE", False)
            HfApi(endpoint=server.endpoint, token="hf_write").create_bucket(BUCKET)
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
    opened = open_store(f"hf://buckets/{BUCKET}/runs/{next(_PREFIXES)}")
    assert isinstance(opened, BucketStore)
    return opened
