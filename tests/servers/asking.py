"""Requests to a service on loopback, each by a connection of its own, and answers that are passed on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse

from tests.servers.wire import Exchange

UPSTREAM_SECONDS = 60.0
HOP = frozenset({"connection", "content-length", "transfer-encoding", "keep-alive", "expect"})
"""Headers of one connection; those of the body's length are made anew."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a service answered."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


def ask(
    host: str,
    method: str,
    target: str,
    body: bytes | Iterable[bytes] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Send a request, and read its answer whole.

    Args:
        host: "127.0.0.1:PORT", or a URL with nothing behind that.
        method: Of HTTP.
        target: Path and query.
        body: Of the request; for an iterable, the headers say how long it is, or it is sent in chunks.
        headers: Of the request.
    """
    with closing(HTTPConnection(host.removeprefix("http://"), timeout=UPSTREAM_SECONDS)) as connection:
        connection.request(method, target, body, dict(headers or {}))
        answer = connection.getresponse()
        return Answer(answer.status, _headers_of(answer), answer.read())


def pass_on(exchange: Exchange, answer: Answer) -> None:
    """Answer what a service has answered."""
    headers = {name: text for name, text in answer.headers.items() if name not in HOP}
    is_head = exchange.record.method == "HEAD"
    length = int(answer.headers.get("content-length", 0)) if is_head else len(answer.body)
    exchange.stream(answer.status, [answer.body], length, headers)


def _headers_of(answer: HTTPResponse) -> dict[str, str]:
    return {name.lower(): text for name, text in answer.getheaders()}
