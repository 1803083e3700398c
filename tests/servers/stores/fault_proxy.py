"""A proxy before a service: it logs each request with its kind and bytes, and breaks those that a test chooses.

For the faults see `Fault`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.servers.asking import HOP, Answer, ask, pass_on
from tests.servers.faults import Fault
from tests.servers.hub.routing import ROUTES, find_route
from tests.servers.log import Request
from tests.servers.origin import Found, Origin, Served, Server
from tests.servers.wire import Exchange, HangUpError, Headers, HubError

_EXTRAS = ("if-", "x-amz-meta-", "x-goog-meta-", "x-ms-meta-", "x-amz-copy-source-if-", "x-goog-if-")
"""What the headers of metadata and of conditions begin with."""
_COPY_SOURCES = ("x-amz-copy-source", "x-goog-copy-source", "x-ms-copy-source")


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """A request that its client was told nothing of, and that is still to be carried out."""

    method: str
    target: str
    body: bytes
    headers: Mapping[str, str]


class FaultProxy(Served, Server):
    """Passes requests on to a service.

    Args:
        upstream: The service's URL.
        scheme: The service's.
        is_plain: The service knows no metadata of objects and no conditions but those of reads: both are dropped.
    """

    def __init__(self, upstream: str, scheme: str, is_plain: bool = False) -> None:
        Served.__init__(self)
        Server.__init__(self, self)
        self.upstream = upstream
        self.scheme = scheme
        self.is_plain = is_plain
        self.held: list[HeldRequest] = []
        """Late requests that were not carried out yet."""
        self._timers: list[threading.Timer] = []

    def open_origins(self) -> list[Origin]:
        """Make the one that clients take for the service's."""
        return [Origin(self, self._find)]

    def _find(self, method: str, target: str, headers: Headers) -> Found:
        """Find nothing but a word for the request; all are passed on."""
        if self.scheme == "hf":
            kind = find_route(tuple(ROUTES), method, target).kind
        else:
            kind = kind_of(method, target, headers)
        return Found(kind, _pass_on, origin="store")

    @property
    def url(self) -> str:
        """What clients take for the service's."""
        return self._origins[0].url

    def fail(self, kind: str, match: str = "", **options: Any) -> Fault:
        """Let requests fail; the keywords are those of `Fault`. All are matched as `METHOD kind target`."""
        fault = Fault(match=match, kind=kind, **options)
        self.faults.add(fault)
        return fault

    def requests(self, kind: str | None = None) -> list[Request]:
        """Those since the last `clear`, of one kind or of all: see `kind_of`."""
        return self.log.requests(kind)

    def clear(self) -> None:
        """Forget the requests, and the faults that are still to come."""
        self.log.clear()
        self.faults.clear()

    def hold(self, request: HeldRequest, seconds: float | None) -> None:
        """Keep a request, for so long or until `release`."""
        self.held.append(request)
        if seconds is not None:
            timer = threading.Timer(seconds, self._carry_out, (request,))
            timer.daemon = True
            self._timers.append(timer)
            timer.start()

    def release(self) -> list[Answer]:
        """Carry out all late requests now, whose clients have left long ago; returns what the service answered."""
        answers = [self._carry_out(request) for request in list(self.held)]
        for timer in self._timers:
            timer.join()
        return [answer for answer in answers if answer is not None]

    def _carry_out(self, request: HeldRequest) -> Answer | None:
        try:
            self.held.remove(request)
        except ValueError:  # the timer was faster
            return None
        return ask(self.upstream, request.method, request.target, request.body or None, request.headers)


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
    headers = {name: text for name, text in exchange.headers.items() if name.lower() not in HOP}
    if "Content-Length" in exchange.headers:
        headers["Content-Length"] = exchange.headers["Content-Length"]
    if proxy.is_plain and record.method != "GET":
        headers = {name: text for name, text in headers.items() if not name.lower().startswith(_EXTRAS)}
    if fault is not None and fault.kind == "late":
        raw = b"".join(exchange.body.pieces())
        kept = {name: text for name, text in headers.items() if name != "Content-Length"}
        proxy.hold(HeldRequest(record.method, record.path, raw, kept), fault.late_seconds)
        fault.reached.set()
        if fault.action is not None:
            fault.action()
        raise HubError(fault.status, "The request is late")
    body = None if exchange.body.is_empty else exchange.body.pieces()
    pass_on(exchange, ask(proxy.upstream, record.method, record.path, body, headers))
