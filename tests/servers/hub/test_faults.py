"""What the Hub server does wrong on demand, and refuses as the Hub does: what no client of ours would notice."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.servers.asking import Answer
from tests.servers.asking import ask as ask_origin
from tests.servers.hub.hub_server import Fault, HubServer
from tests.servers.stock_client import WEIGHTS


@pytest.fixture
def model(tmp_path: Path) -> Iterator[HubServer]:
    """A hub with org/model, which has the weights and a config."""
    with HubServer(tmp_path / "hub") as hub:
        hub.create_repo("org/model").commit({"model.safetensors": WEIGHTS, "config.json": b"{}"}, "weights")
        yield hub


def ask(method: str, url: str, body: bytes | None = None, **headers: str) -> Answer:
    parts = urlsplit(url)
    token = {"Authorization": "Bearer hf_write"}
    return ask_origin(parts.netloc, method, f"{parts.path}?{parts.query}", body, {**token, **headers})


def storage_url(hub: HubServer) -> str:
    """Resolve the weights to their signed URL."""
    answer = ask("HEAD", f"{hub.endpoint}/org/model/resolve/main/model.safetensors")
    assert answer.status == 302
    return answer.headers["location"]


def receive_all(connection: socket.socket) -> tuple[bytes, str]:
    """Read to the end of a connection, and say how it ended."""
    received = bytearray()
    try:
        while piece := connection.recv(65_536):
            received += piece
    except ConnectionResetError:
        return bytes(received), "rst"
    return bytes(received), "fin"


@pytest.mark.parametrize("how", ["fin", "rst"])
def test_drop_ends_an_answer_after_so_many_bytes(model: HubServer, how: str) -> None:
    url = storage_url(model)
    model.fail(Fault(match="storage_get", kind="drop", after_bytes=70_000, how=how))
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as connection:
        connection.sendall(f"GET {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
        received, ending = receive_all(connection)
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"Content-Length: 256000" in head
    assert body == WEIGHTS[:70_000]
    assert ending == how
    assert model.log[-1].bytes_down == 70_000
    assert ask("GET", url).body == WEIGHTS


def test_slow_waits_at_the_gate_after_so_many_bytes(model: HubServer) -> None:
    url, gate = storage_url(model), threading.Event()
    fault = model.fail(Fault(match="storage_get", kind="slow", after_bytes=100_000, gate=gate))
    answers: list[bytes] = []
    thread = threading.Thread(target=lambda: answers.append(ask("GET", url).body))
    thread.start()
    assert fault.reached.wait(60)
    assert (model.log[-1].bytes_down, answers) == (100_000, [])
    gate.set()
    thread.join()
    assert answers == [WEIGHTS]


def test_corrupt_and_truncate_spoil_one_answer(model: HubServer) -> None:
    url = storage_url(model)
    model.fail(Fault(match="storage_get", kind="corrupt", offset=200_000))
    model.fail(Fault(match="storage_get", kind="truncate", after_bytes=10))
    spoiled = ask("GET", url).body
    assert [place for place in range(256_000) if spoiled[place] != WEIGHTS[place]] == [200_000]
    with pytest.raises(http.client.IncompleteRead) as error:
        ask("GET", url)
    assert (error.value.partial, error.value.expected) == (WEIGHTS[:10], 255_990)
    assert ask("GET", url, Range="bytes=-3").body == WEIGHTS[-3:]


def test_urls_are_good_for_what_they_were_signed_for(model: HubServer) -> None:
    url = storage_url(model)
    assert ask("GET", url.replace("X-Expires=1", "X-Expires=2")).status == 403
    assert ask("PUT", url, b"other").status == 403


def test_digests_of_uploads_are_checked(model: HubServer) -> None:
    content = b"new" * 20_000
    request = {"operation": "upload", "objects": [{"oid": hashlib.sha256(content).hexdigest(), "size": len(content)}]}
    batch = ask("POST", f"{model.endpoint}/org/model.git/info/lfs/objects/batch", json.dumps(request).encode())
    url = json.loads(batch.body)["objects"][0]["actions"]["upload"]["href"]
    model.fail(Fault(match="PUT lfs_put", kind="drop", after_bytes=50_000, how="rst"))
    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        ask("PUT", url, content)
    assert (model.log[-1].bytes_up, model.log[-1].status) == (50_000, 0)
    assert ask("PUT", url, b"old" * 20_000).status == 400
    assert ask("PUT", url, content).status == 200


def test_commit_is_refused_whole(model: HubServer) -> None:
    url, before = f"{model.endpoint}/api/models/org/model/commit/main", model.repo("org/model").branches["main"]
    header = {"key": "header", "value": {"summary": "b"}}
    good = {"key": "file", "value": {"path": "b.txt", "content": "Yg==", "encoding": "base64"}}
    missing = {"path": "x.bin", "algo": "sha256", "oid": "0" * 64, "size": 1}
    below = {"path": "config.json/x", "content": "", "encoding": "base64"}
    above = {"path": "../x", "content": "", "encoding": "base64"}
    for key, value in (("lfsFile", missing), ("file", below), ("file", above), ("unknown", {"path": "x"})):
        lines = [header, good, {"key": key, "value": value}]
        assert ask("POST", url, "\n".join(map(json.dumps, lines)).encode()).status == 400
    assert model.repo("org/model").branches["main"] == before
