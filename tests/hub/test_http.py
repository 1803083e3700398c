"""Answers that no Hub gives, but a proxy, a login page or somebody hostile may."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from huggingface_hub import HfApi, constants, file_download

from hfshard.errors import HubConnectionError
from hfshard.hub.download import fetch_tree
from hfshard.hub.http import HubReader, tree_of
from hfshard.hub.repo import RemoteFile, RepoTree

pytestmark = pytest.mark.compat

RAW = b'{"a":1}\n'
SHA256 = "a" * 64


class Impatient(threading.Event):
    """Waits for nothing, and notes for how long it was to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits += [timeout] if timeout else []
        return self.is_set()


class Handler(BaseHTTPRequestHandler):
    """Answers every file with `answer`, and storage URLs with `action`."""

    answer: ClassVar[tuple[int, dict[str, str], bytes]] = (200, {}, RAW)
    action: ClassVar[dict[str, Any] | None] = None
    info: ClassVar[Any] = {}

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        is_info = self.path.startswith("/api/")
        self._send(*((200, {}, json.dumps(self.info).encode()) if is_info else self.answer))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.action is None:
            self._send(404, {}, b"")
        else:
            objects = [{"oid": SHA256, "size": len(RAW), "actions": {"download": self.action}}]
            self._send(200, {}, json.dumps({"objects": objects}).encode())

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Handler]]:
    """What the server at the Hub's address answers."""

    class Own(Handler):
        pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Own) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "is_offline_mode", lambda: False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        for module in (constants, file_download):
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        yield Own
        server.shutdown()
        thread.join()


def read(sha256: str | None = None) -> bytes:
    """Read a file of a commit."""
    tree = RepoTree("b" * 40, {"config.json": RemoteFile(len(RAW), sha256, "c" * 40)})
    return HubReader("org/m", tree, False, Impatient()).read_all("config.json")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ((302, {"Location": "/again"}, b""), "redirects"),
        ((302, {"Location": "ftp://host/file"}, b""), "unsupported protocol 'ftp://'"),
        ((302, {"Location": "file:///etc/passwd"}, b""), "unsupported protocol 'file://'"),
        ((302, {"Location": "http://[::1/x"}, b""), "Invalid URL"),
        ((302, {"Location": "http://a..b/x"}, b""), "could not be downloaded"),
        ((200, {"Content-Encoding": "gzip"}, b"nonsense"), "decompressing"),
        ((200, {}, b"short"), "ended too early"),
    ],
    ids=["loop", "ftp", "file", "address", "host", "gzip", "short"],
)
def test_answer_that_makes_no_sense_is_an_error_of_the_connection(
    handler: type[Handler], answer: tuple[int, dict[str, str], bytes], problem: str
) -> None:
    handler.answer = answer
    with pytest.raises(HubConnectionError, match=r"'config\.json' of 'org/m' could not be downloaded") as raised:
        read()
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("0", [0.5, 1.0, 2.0, 4.0, 8.0]),
        ("Fri, 31 Dec 1999 23:59:59 GMT", [0.5, 1.0, 2.0, 4.0, 8.0]),
        ("3", [3.0] * 3 + [4.0, 8.0]),
    ],
)
def test_a_busy_server_that_asks_for_no_wait_is_not_asked_six_times_at_once(
    handler: type[Handler], monkeypatch: pytest.MonkeyPatch, asked: str, expected: list[float]
) -> None:
    handler.answer = 429, {"Retry-After": asked}, b""
    impatient = Impatient()
    tree = RepoTree("b" * 40, {"config.json": RemoteFile(len(RAW), None, "c" * 40)})

    with pytest.raises(HubConnectionError, match=r"failed 6 times in a row, the last time with: HTTP 429"):
        HubReader("org/m", tree, False, impatient).read_all("config.json")
    assert impatient.waits == expected

    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    monkeypatch.setattr(Handler, "do_GET", lambda handler: handler._send(*handler.answer))
    with pytest.raises(HubConnectionError, match="HTTP 429"):
        fetch_tree("org/m", None, False)
    assert waits == expected


@pytest.mark.parametrize(
    "action",
    [
        {"href": "http://a..b/x"},
        {"href": "http://[::1/x"},
        {"href": "http://127.0.0.1:1/x", "header": {"X-\u00e9": "1"}},
        {"href": "http://127.0.0.1:1/x", "header": {"X": "1\n2"}},
    ],
    ids=["host", "address", "name", "value"],
)
def test_storage_url_that_makes_no_sense_is_not_used(handler: type[Handler], action: dict[str, Any]) -> None:
    handler.action = action
    assert read(SHA256) == RAW


@pytest.mark.parametrize("name", [5, None, ["a"]])
def test_list_of_files_without_names_is_not_that_of_a_hub(handler: type[Handler], name: object) -> None:
    handler.info = {"id": "org/m", "sha": "b" * 40, "siblings": [{"rfilename": name, "size": 1, "blobId": "c" * 40}]}
    with pytest.raises(HubConnectionError, match="is not that of a Hub"):
        tree_of(HfApi(endpoint=constants.ENDPOINT, token=False), "org/m", None)
