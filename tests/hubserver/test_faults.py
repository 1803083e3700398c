"""Each kind of fault does what it says, and the Hub server refuses what the Hub refuses: seen on the wire."""

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

from tests.hubserver.hub_server import Fault, HubServer

WEIGHTS = bytes(range(256)) * 1000  # 256,000 bytes, no two neighbours alike
TOKEN = {"Authorization": "Bearer hf_write"}


@pytest.fixture
def model(tmp_path: Path) -> Iterator[HubServer]:
    """A hub with org/model, which has the weights and a config."""
    with HubServer(tmp_path / "hub") as hub:
        hub.create_repo("org/model").commit({"model.safetensors": WEIGHTS, "config.json": b"{}"}, "weights")
        yield hub


def ask(method: str, url: str, body: bytes | None = None, **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Send one request on a connection of its own."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    try:
        connection.request(method, f"{parts.path}?{parts.query}", body, {**TOKEN, **headers})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def storage_url(hub: HubServer, path: str = "model.safetensors") -> str:
    """Resolve a file of org/model to its signed URL."""
    status, headers, _ = ask("HEAD", f"{hub.endpoint}/org/model/resolve/main/{path}")
    assert status == 302
    return headers["Location"]


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
    assert ask("GET", url)[2] == WEIGHTS


@pytest.mark.parametrize("how", ["fin", "rst"])
def test_drop_ends_an_upload_after_so_many_bytes(model: HubServer, how: str) -> None:
    content = b"new" * 20_000
    url = upload_url(model, content)
    model.fail(Fault(match="PUT lfs_put", kind="drop", after_bytes=50_000, how=how))
    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        ask("PUT", url, content)
    assert (model.log[-1].bytes_up, model.log[-1].status) == (50_000, 0)
    assert ask("PUT", url, content)[0] == 200
    assert ask("PUT", url, b"old" * 20_000)[0] == 400
    assert [request.bytes_up for request in model.log if request.kind == "lfs_put"] == [50_000, 60_000, 60_000]


def upload_url(hub: HubServer, content: bytes) -> str:
    request = {"operation": "upload", "objects": [{"oid": hashlib.sha256(content).hexdigest(), "size": len(content)}]}
    _, _, answer = ask("POST", f"{hub.endpoint}/org/model.git/info/lfs/objects/batch", json.dumps(request).encode())
    url: str = json.loads(answer)["objects"][0]["actions"]["upload"]["href"]
    return url


def test_status_refuses_so_many_requests_after_so_many(model: HubServer) -> None:
    model.fail(Fault(match="GET info", kind="status", status=429, retry_after=2, skip=1, times=2))
    answers = [ask("GET", f"{model.endpoint}/api/models/org/model") for _ in range(4)]
    assert [status for status, _, _ in answers] == [200, 429, 429, 200]
    assert [headers["Retry-After"] for _, headers, _ in answers] == [None, "2", "2", None]


def test_slow_waits_at_the_gate_after_so_many_bytes(model: HubServer) -> None:
    url, gate = storage_url(model), threading.Event()
    fault = model.fail(Fault(match="storage_get", kind="slow", after_bytes=100_000, gate=gate))
    answers: list[bytes] = []
    thread = threading.Thread(target=lambda: answers.append(ask("GET", url)[2]))
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
    spoiled = ask("GET", url)[2]
    assert [place for place in range(256_000) if spoiled[place] != WEIGHTS[place]] == [200_000]
    with pytest.raises(http.client.IncompleteRead) as error:
        ask("GET", url)
    assert (error.value.partial, error.value.expected) == (WEIGHTS[:10], 255_990)
    assert ask("GET", url, Range="bytes=-3")[2] == WEIGHTS[-3:]


def test_corrupt_store_keeps_size_and_digest(model: HubServer) -> None:
    model.repo("org/model").corrupt("model.safetensors", at=77)
    _, headers, _ = ask("HEAD", f"{model.endpoint}/org/model/resolve/main/model.safetensors")
    assert headers["X-Linked-Etag"] == f'"{hashlib.sha256(WEIGHTS).hexdigest()}"'
    assert headers["X-Linked-Size"] == "256000"
    content = ask("GET", headers["Location"])[2]
    assert (len(content), content[77], WEIGHTS[77]) == (256_000, 76, 77)


def test_expired_url_stays_dead_and_a_new_one_works(model: HubServer) -> None:
    url = storage_url(model)
    model.fail(Fault(match="storage_get", kind="expired"))
    assert [ask("GET", url)[0] for _ in range(2)] == [403, 403]
    assert ask("GET", storage_url(model))[2] == WEIGHTS
    assert ask("GET", storage_url(model).replace("X-Expires=1", "X-Expires=2"))[0] == 403
    assert ask("PUT", storage_url(model), b"other")[0] == 403


def commit_body(**header: str) -> bytes:
    file = {"path": "b.txt", "content": "Yg==", "encoding": "base64"}
    lines = [{"key": "header", "value": {"summary": "b", **header}}, {"key": "file", "value": file}]
    return b"\n".join(json.dumps(line).encode() for line in lines)


def test_lost_answer_leaves_the_commit_made(model: HubServer) -> None:
    model.fail(Fault(match="POST commit", kind="lost_answer"))
    with pytest.raises(http.client.RemoteDisconnected):
        ask("POST", f"{model.endpoint}/api/models/org/model/commit/main", commit_body())
    assert model.repo("org/model").read("b.txt") == b"b"
    assert model.log[-1].status == 0


def test_race_commits_before_the_request_is_handled(model: HubServer) -> None:
    view, url = model.repo("org/model"), f"{model.endpoint}/api/models/org/model/commit/main"
    parent = view.commits()[0].oid
    model.fail(Fault(match="POST commit", kind="race", action=lambda: view.commit({"c.txt": b"c"}, "theirs")))
    assert ask("POST", url, commit_body(parentCommit=parent))[0] == 412
    assert [commit.title for commit in view.commits()] == ["theirs", "weights", "initial commit"]
    assert ask("POST", url, commit_body(parentCommit=view.branches["main"]))[0] == 200


def test_commit_is_refused_whole(model: HubServer) -> None:
    url, before = f"{model.endpoint}/api/models/org/model/commit/main", model.repo("org/model").branches["main"]
    missing = {"path": "x.bin", "algo": "sha256", "oid": "0" * 64, "size": 1}
    below = {"path": "config.json/x", "content": "", "encoding": "base64"}
    above = {"path": "../x", "content": "", "encoding": "base64"}
    for key, value in (("lfsFile", missing), ("file", below), ("file", above), ("unknown", {"path": "x"})):
        body = commit_body() + b"\n" + json.dumps({"key": key, "value": value}).encode()
        assert ask("POST", url, body)[0] == 400
    assert model.repo("org/model").branches["main"] == before


def test_client_that_dies_at_the_gate_has_what_the_log_says(model: HubServer) -> None:
    parts, gate = urlsplit(storage_url(model)), threading.Event()
    fault = model.fail(Fault(match="storage_get", kind="slow", after_bytes=100_000, gate=gate))
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as connection:
        connection.sendall(f"GET {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
        assert fault.reached.wait(60)
    gate.set()
    model.stop()  # the thread of the connection is done
    assert model.log[-1].bytes_down == 100_000


def test_server_has_no_xet(model: HubServer) -> None:
    assert ask("GET", f"{model.endpoint}/api/models/org/model/xet-write-token/main")[0] == 404
    assert model.log[-1].kind == "xet_token"
