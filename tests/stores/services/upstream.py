"""Requests to a service on loopback, each by a connection of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse

UPSTREAM_SECONDS = 60.0


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


def _headers_of(answer: HTTPResponse) -> dict[str, str]:
    return {name.lower(): text for name, text in answer.getheaders()}
