"""The log of the test Hub server: one record per request, with the body bytes that really went over the wire."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(slots=True)
class Request:
    """One request; it enters the log when its headers are read and is filled in while it is answered."""

    method: str
    path: str
    """Path and query, as sent."""
    origin: str
    """`"api"` or `"storage"`."""
    kind: str
    """Short name of the route: `"info"`, `"commit"`, `"storage_get"`, ..."""
    status: int = 0
    """HTTP status of the answer; 0 where none was sent."""
    bytes_up: int = 0
    """Body bytes that the server read."""
    bytes_down: int = 0
    """Body bytes that the server handed to the socket."""
    range: str | None = None
    token: str | None = None
    user_agent: str = ""
    fault: str = ""
    """Kind of the fault that hit this request, or empty."""

    def __str__(self) -> str:
        extra = f" range={self.range}" if self.range else ""
        extra += f" fault={self.fault}" if self.fault else ""
        return f"{self.status} {self.method} {self.kind} {self.path} up={self.bytes_up} down={self.bytes_down}{extra}"


class Log:
    """Every request since the last `clear`, in the order in which their headers were read; safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: list[Request] = []

    def add(self, request: Request) -> None:
        """Append a request; its fields are filled in later, in place."""
        with self._lock:
            self._requests.append(request)

    def requests(self, kind: str | None = None) -> list[Request]:
        """Copy the list of requests, of one kind or of all."""
        with self._lock:
            return [request for request in self._requests if kind in (None, request.kind)]

    def clear(self) -> None:
        """Forget every request."""
        with self._lock:
            self._requests.clear()
