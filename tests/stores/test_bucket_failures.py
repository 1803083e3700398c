"""What fails in a bucket: tried again where that helps, else one error that says what to do, and no secret."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

import hfshard
from hfshard.errors import (
    HubAccessError,
    InvalidPathError,
    StoreAccessError,
    StoreConnectionError,
    StoreError,
    StoreNotFoundError,
)
from hfshard.stores.bucket import BucketStore
from hfshard.stores.open_store import open_store
from tests.helpers import processes
from tests.servers.faults import Fault
from tests.servers.hub.hub_server import HubServer

pytestmark = pytest.mark.compat


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that were to be waited; none is."""
    noted: list[float] = []
    monkeypatch.setattr(time, "sleep", noted.append)
    return noted


def put_and_read(store: BucketStore) -> None:
    put = store.put("a", b"some bytes")
    assert store.list_objects() == {"a": put}
    assert store.find("a") == put
    assert store.read(put) == b"some bytes"
    store.delete(["a"])
    assert store.find("a") is None


@pytest.mark.parametrize(
    "kind",
    ["bucket_tree", "bucket_paths", "bucket_batch", "xet_token", "xorb_put", "shard_put", "reconstruction", "xorb_get"],
)
@pytest.mark.parametrize(
    "fault",
    [{"kind": "status", "status": 500}, {"kind": "status", "status": 429}, {"kind": "drop"}, {"kind": "lost_answer"}],
    ids=["500", "429", "drop", "lost"],
)
def test_any_request_may_fail_once(
    store: BucketStore, hub: HubServer, waits: list[float], kind: str, fault: dict[str, str]
) -> None:
    failed = hub.fail(Fault(match=f" {kind} ", **fault))  # type: ignore[arg-type]

    put_and_read(store)

    assert failed.reached.is_set() or kind == "xorb_put"  # chunks of an earlier test
    hub.clear_faults()


@pytest.mark.parametrize("kind", ["drop", "lost_answer"])
def test_a_hub_that_never_answers_is_asked_again(
    store: BucketStore, hub: HubServer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("HFSHARD_STORE_TIMEOUT", "0.5")
    for request in ("bucket_tree", "bucket_paths", "bucket_batch"):
        hub.fail(Fault(match=request, kind=kind, how="silence"))
    put = store.put("config.json", b"{}")
    assert store.list_objects() == {"config.json": put}
    assert store.find("config.json") == put
    asked = [hub.count(f"bucket_{request}") for request in ("tree", "paths", "batch")]
    assert min(asked) >= 2  # and once more where the machine is too busy to answer in time


def test_the_hub_says_how_long_to_wait(store: BucketStore, hub: HubServer, waits: list[float]) -> None:
    hub.fail(Fault(match="bucket_tree", kind="status", status=503, retry_after=7))

    assert store.list_objects() == {}

    assert waits in ([7.0], [8.0])  # huggingface_hub adds a second from 2.0 on


@pytest.mark.parametrize("kind", ["bucket_batch", "shard_put", "xorb_get", "reconstruction"])
def test_what_fails_for_good_is_one_error(store: BucketStore, hub: HubServer, waits: list[float], kind: str) -> None:
    hub.fail(Fault(match=f" {kind} ", kind="drop", times=1000))

    with pytest.raises(StoreConnectionError, match=r"hf://buckets/org/models/runs/.*try again\.$"):
        put_and_read(store)
    hub.clear_faults()


def test_a_token_that_the_storage_takes_no_more_is_renewed(store: BucketStore, hub: HubServer) -> None:
    put = store.put("a", b"1")
    assert store.read(put) == b"1"
    hub.clear_log()
    hub.fail(Fault(match="reconstruction", kind="status", status=401, times=1000))
    hub.fail(Fault(match="xet_token", kind="race", action=hub.clear_faults))

    assert store.read(put) == b"1"

    assert hub.count("xet_token") == 1


ERRORS: list[tuple[str, str | None, Callable[[BucketStore], object], type[Exception], str]] = [
    (
        "hf://buckets/org/nothing/x",
        "hf_write",
        lambda store: store.list_objects(),
        StoreNotFoundError,
        r"no bucket 'org/nothing' on http://.* with the token '…' .* run: hf buckets create org/nothing; .* whoami\.",
    ),
    (
        "hf://buckets/org/nothing/x",
        "hf_write",
        lambda store: store.put("a", b"1"),
        StoreNotFoundError,
        "run: hf buckets create org/nothing",
    ),
    ("hf://buckets/org/models", "hf_bad", lambda store: store.find("a"), StoreAccessError, "run: hf auth login"),
    ("hf://buckets/org/models", "hf_read", lambda store: store.put("a", b"1"), StoreAccessError, "run: hf auth login"),
    ("hf://buckets/org/models", "hf_read", lambda store: store.delete(["a"]), StoreAccessError, "denied the request"),
    (
        "hf://buckets/org/models",
        None,
        lambda store: store.open_writer("a", 1),
        StoreAccessError,
        "no token, because none",
    ),
]


@pytest.mark.parametrize(("address", "token", "act", "expected", "message"), ERRORS)
def test_errors_name_the_address_and_what_to_do(
    hub: HubServer,
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    token: str | None,
    act: Callable[[BucketStore], object],
    expected: type[Exception],
    message: str,
) -> None:
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    store = open_store(address)
    assert isinstance(store, BucketStore)

    with pytest.raises(expected, match=message) as raised:
        act(store)

    assert address in str(raised.value)
    chain = [raised.value, raised.value.__cause__, raised.value.__context__]
    shown = [repr(one) + str(one) for one in (*chain, store, vars(store), vars(store._reader))]
    assert token is None or token not in "".join(shown)


def test_a_secret_never_stands_in_a_message(store: BucketStore) -> None:
    store.put("a", b"1")
    token = store._write_tokens.current()

    assert token.secret not in repr(token) + repr(store._write_tokens)


@pytest.mark.parametrize("token", ["hf_wr\x01ite", "hf_wrïte"])
def test_a_token_that_no_request_can_have_is_refused_by_its_variables_name(
    store: BucketStore, hub: HubServer, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(
        StoreAccessError, match="The environment variable HF_TOKEN has a control character or a non-ASCII letter"
    ):
        store.list_objects()
    with pytest.raises(
        HubAccessError, match="The environment variable HF_TOKEN has a control character or a non-ASCII letter"
    ):
        hfshard.load_state_dict("org/name")
    assert hub.count() == 0


def test_a_newline_in_a_token_of_the_environment_does_not_count(
    store: BucketStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_write\n")
    store.put("a", b"1")
    monkeypatch.setenv("HF_TOKEN", "hf_\nbad_0123456789")
    with pytest.raises(StoreAccessError, match="the token '…6789' from the environment variable HF_TOKEN"):
        store.list_objects()


@pytest.mark.parametrize("endpoint", ["https://hub.example\n", " https://hub.example", "hub.example", "someone:pw@hub"])
def test_an_endpoint_that_is_none_is_refused_by_its_variables_name(
    store: BucketStore, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.raises(StoreAccessError, match="The environment variable HF_ENDPOINT is not a valid URL") as raised:
        store.list_objects()
    assert endpoint not in str(raised.value)
    with pytest.raises(HubAccessError, match="The environment variable HF_ENDPOINT is not a valid URL"):
        hfshard.load_state_dict("org/name")


def test_offline_mode_is_named(store: BucketStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    with pytest.raises(StoreConnectionError, match=r"offline mode is on\. Unset HF_HUB_OFFLINE"):
        store.list_objects()


def test_a_login_page_is_no_hub(store: BucketStore, hub: HubServer) -> None:
    hub.fail(Fault(match="xet_token", kind="status", status=200))

    with pytest.raises(StoreConnectionError, match="login page of the network or a proxy"):
        store.put("a", b"1")


def test_a_writer_that_got_other_bytes_makes_nothing(store: BucketStore) -> None:
    writer = store.open_writer("a", 3)
    writer.write(memoryview(b"12"))

    with pytest.raises(StoreError, match=r"/a' was declared with 3 bytes, got 2\. Retry the save"):
        writer.finish()
    writer.abort()
    assert store.list_objects() == {}


def test_operations_that_the_hub_lists_as_failed_are_an_error(store: BucketStore, hub: HubServer) -> None:
    store.put("a", b"1")
    hub.fail(Fault(match="bucket_batch", kind="partial", operations=0, status=200))
    with pytest.raises(StoreError, match=r"did not make all changes to 'hf://buckets/org/models/runs/.*': 'runs/.*/b'"):
        store.put("b", b"1")
    hub.fail(Fault(match="bucket_batch", kind="partial", operations=0, status=200))

    with pytest.raises(StoreError, match="did not make all"):
        store.delete(["a"])


def test_a_name_that_no_bucket_can_have(hub: HubServer) -> None:
    with pytest.raises((InvalidPathError, StoreNotFoundError), match="hf://buckets/org/a b"):
        open_store("hf://buckets/org/a b").list_objects()


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    forget = "[sys.modules.pop(name) for name in list(sys.modules) if name.startswith('hfshard')]"
    opened = "from hfshard.stores.open_store import open_store; open_store('hf://buckets/org/b')"
    script = f"import sys; {forget}; sys.modules['hf_xet'] = None; {opened}"

    done = processes.run(["-c", script], env=dict(os.environ), cwd=tmp_path)

    assert done.stderr.splitlines()[-1] == (
        "hfshard.errors.StoreError: hf://buckets/org/b requires the package 'hf_xet', which is not installed. Run: "
        "pip install 'hfshard[stores]'"
    )
