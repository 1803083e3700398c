"""A proxy before a service: it logs each request with its kind and bytes, and breaks those that a test chooses.

It is an origin of the test Hub's server with one route, so all of its faults are at hand: see `Fault`.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Self, cast

from tests.hubserver.faults import Fault, Faults
from tests.hubserver.hub import Hub
from tests.hubserver.log import Log, Request
from tests.hubserver.server import ROUTES, Found, Origin, find_route
from tests.hubserver.wire import Exchange, HangUpError, Headers, HubError
from tests.stores.services.upstream import Answer, ask

_HOP = {"connection", "content-length", "transfer-encoding", "keep-alive", "expect"}
"""Headers of one connection; those of the body's length are made anew."""
_COPY_SOURCES = ("x-amz-copy-source", "x-goog-copy-source", "x-ms-copy-source")


class FaultProxy:
    """Passes requests on to a service.

    Args:
        upstream: The service's URL.
        scheme: The service's.
    """

    def __init__(self, upstream: str, scheme: str) -> None:
        self.upstream = upstream
        self.scheme = scheme
        self.faults = Faults()
        self.log = Log()
        self.errors: list[str] = []
        self._late: list[tuple[str, str, bytes, dict[str, str]]] = []
        self._lock = threading.Lock()
        self._origin = _Front(self)

    @property
    def url(self) -> str:
        """What clients take for the service's."""
        return self._origin.url

    def fail(self, kind: str, match: str = "", **options: Any) -> Fault:
        """Let requests fail; the keywords are those of `Fault`. All are matched as `METHOD kind target`."""
        fault = Fault(match=match, kind=kind, **options)
        self.faults.add(fault)
        return fault

    def requests(self, kind: str | None = None) -> list[Request]:
        """Those since the last `clear`, of one kind or of all: see `kind_of`."""
        return self.log.requests(kind)

    def keep(self, method: str, target: str, body: bytes, headers: dict[str, str]) -> None:
        """Keep a request until `land`."""
        with self._lock:
            self._late.append((method, target, body, headers))

    def land(self) -> list[Answer]:
        """Let the requests that are late arrive at the service, in their order; their clients have left long ago."""
        with self._lock:
            late, self._late = self._late, []
        return [ask(self.upstream, method, target, body, headers) for method, target, body, headers in late]

    def clear(self) -> None:
        """Forget the requests, and the faults that are still to come; what is late stays so."""
        self.log.clear()
        self.faults.clear()

    def __enter__(self) -> Self:
        self._origin.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.faults.clear()
        self._origin.stop()
        if self.errors and error is None:
            raise AssertionError("The proxy failed:\n" + "\n".join(self.errors))


class _Front(Origin):
    def __init__(self, proxy: FaultProxy) -> None:
        # An origin takes faults, log and errors of its hub; all else is for routes.
        super().__init__(cast(Hub, proxy), ("api",))
        self._is_hub = proxy.scheme == "hf"

    def find(self, method: str, target: str, headers: Headers) -> Found:
        """Find nothing but a word for the request; all are passed on."""
        kind = find_route(tuple(ROUTES), method, target).kind if self._is_hub else kind_of(method, target, headers)
        return Found("store", kind, _pass_on, {})


def kind_of(method: str, target: str, headers: Headers) -> str:
    """What a request is about, in words that are the same for all services but buckets of the Hub.

    These are list, uploads (a listing of the unfinished ones), head, get, put, copy, begin, part, finish, abort,
    delete, delete_many and other.
    """
    _, _, query = target.partition("?")
    words = dict(part.partition("=")[::2] for part in query.split("&"))
    block = words.get("comp", "")
    if method == "PUT":
        if "partNumber" in words or block == "block":
            return "part"
        if block == "blocklist":
            return "finish"
        return "copy" if any(name in headers for name in _COPY_SOURCES) else "put"
    if method == "POST":
        if "uploads" in words:
            return "begin"
        return "finish" if "uploadId" in words else "delete_many" if {"delete", "comp"} & set(words) else "other"
    if method == "DELETE":
        return "abort" if "uploadId" in words else "delete"
    if "uploads" in words:
        return "uploads"
    if {"list-type", "prefix", "restype"} & set(words):
        return "list"
    return method.lower()


def _pass_on(proxy: FaultProxy, exchange: Exchange) -> None:
    fault, record = exchange.fault, exchange.record
    if fault is not None and fault.kind == "drop" and fault.after_bytes == 0:
        raise HangUpError
    headers = {name: text for name, text in exchange.headers.items() if name.lower() not in _HOP}
    if "Content-Length" in exchange.headers:
        headers["Content-Length"] = exchange.headers["Content-Length"]
    if fault is not None and fault.kind == "late":
        proxy.keep(record.method, record.path, b"".join(exchange.body.pieces()), headers)
        fault.reached.set()
        raise HubError(fault.status, "A fault of the test server")
    body = None if exchange.body.is_empty else exchange.body.pieces()
    answer = ask(proxy.upstream, record.method, record.path, body, headers)
    given = {name: text for name, text in answer.headers.items() if name not in _HOP}
    length = int(answer.headers.get("content-length", 0)) if record.method == "HEAD" else len(answer.body)
    exchange.stream(answer.status, [answer.body], length, given)
