"""An HTTP origin on loopback: threads, and what happens to a request from first byte to log."""

from __future__ import annotations

import base64
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from tests.servers.faults import Fault, Faults
from tests.servers.log import Log, Request
from tests.servers.wire import (
    Body,
    ClientGoneError,
    Exchange,
    HangUpError,
    Headers,
    HubError,
    StorageError,
    reset,
    wait_until_gone,
)

# How long a stopping server waits for the threads of its connections, which end at once where nothing hangs.
STOP_SECONDS = 60.0
# No client of a test keeps a connection idle for so long.
IDLE_SECONDS = 300.0

Route = Callable[..., None]
"""Answers an exchange; called with the state that its origin serves, the exchange, and parts of the path by name."""


@dataclass(frozen=True, slots=True)
class Found:
    """What answers a request."""

    kind: str
    route: Route | None
    parts: dict[str, str] = field(default_factory=dict)
    """Of the path: argument of the route -> text."""
    origin: str = "api"


class Served:
    """What origins serve: the log of requests, the faults to come, and what went wrong in the server itself."""

    def __init__(self) -> None:
        self.log = Log()
        self.faults = Faults()
        self.errors: list[str] = []
        """Tracebacks."""

    def revoke(self, exchange: Exchange) -> None:
        """Let the URL of a request be expired from now on."""
        raise NotImplementedError("This server signs no URLs.")


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = IDLE_SECONDS
    server: Origin

    def answer(self) -> None:
        """Answer one request: log it, let a fault have its way, route it."""
        served = self.server.served
        found = self.server.find(self.command, self.path, self.headers)
        record = Request(
            method=self.command,
            path=self.path,
            origin=found.origin,
            kind=found.kind,
            range=self.headers.get("Range"),
            token=_token_of(self.headers.get("Authorization", "")),
            user_agent=self.headers.get("User-Agent", ""),
        )
        fault = served.faults.take(f"{record.method} {record.kind} {record.path}")
        record.fault = fault.kind if fault is not None else ""
        served.log.add(record)
        body = Body(self.rfile, self.headers, record, fault)
        exchange = Exchange(self.connection, body, self.headers, record, fault)
        exchange.must_close = self.close_connection
        try:
            self._answer(exchange, found.route, found.parts)
        except HangUpError:
            self.close_connection = True
            if fault is not None:
                self._hang_up(fault)
        except (ClientGoneError, ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception:
            self.close_connection = True
            served.errors.append(f"{record}\n{traceback.format_exc()}")
            if not exchange.is_answered:
                exchange.must_close = True
                exchange.reply_error(HubError(500, "Internal error of the test server; see its `errors`"))

    def _hang_up(self, fault: Fault) -> None:
        if fault.action is not None:
            fault.action()
        fault.reached.set()
        if fault.how == "silence":
            wait_until_gone(self.connection, IDLE_SECONDS)
        elif fault.how == "rst":
            # The buffered reader holds the connection open, too.
            self.rfile.close()
            reset(self.connection)

    def _answer(self, exchange: Exchange, route: Route | None, parts: dict[str, str]) -> None:
        served, fault = self.server.served, exchange.fault
        try:
            if fault is not None and fault.kind == "race" and fault.action is not None:
                fault.action()
                fault.reached.set()
            elif fault is not None and fault.kind == "status":
                fault.reached.set()
                exchange.body.drain()
                error = HubError(fault.status, "A fault of the test server")
                if fault.retry_after is not None:
                    error.headers["Retry-After"] = f"{fault.retry_after:g}"
                raise error
            elif fault is not None and fault.kind == "expired":
                fault.reached.set()
                served.revoke(exchange)
            elif fault is not None and fault.kind == "slow" and fault.after_bytes == 0:
                fault.wait()
            if route is None:
                raise HubError(404, f"The test server has no {exchange.record.method} {exchange.path}")
            route(served, exchange, **parts)
        except StorageError as error:
            exchange.reply(error.status, error.xml.encode(), {"Content-Type": "application/xml", **error.headers})
        except HubError as error:
            exchange.reply_error(error)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the log is the server's own."""


class Origin(ThreadingHTTPServer):
    """One origin (host and port) on loopback.

    Args:
        served: What it serves.
        find: Finds what answers a request, by its method, its target and its headers.
        host: By which its URL calls it.
        port: 0: any that is free.
    """

    daemon_threads = True
    # Clients open many connections at once.
    request_queue_size = 128

    def __init__(
        self, served: Served, find: Callable[[str, str, Headers], Found], host: str = "127.0.0.1", port: int = 0
    ) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.served, self.find, self.host = served, find, host
        self._connections: set[socket.socket] = set()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name=f"serves {self.url}", daemon=True)

    @property
    def url(self) -> str:
        """The origin as a URL."""
        return f"http://{self.host}:{self.server_port}"

    def start(self) -> None:
        """Answer requests from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Close every connection and wait for its thread."""
        self.shutdown()
        self._thread.join()
        self.server_close()
        with self._changed:
            for connection in self._connections:
                # A thread that waits for the next request of this connection wakes up.
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue
            self._changed.wait_for(lambda: not self._connections, STOP_SECONDS)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one connection, and know that it is open."""
        with self._changed:
            self._connections.add(request)
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._changed:
                self._connections.discard(request)
                self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep what went wrong outside an exchange; a client that went away is nothing."""
        error = traceback.format_exc()
        if not error.rstrip().splitlines()[-1].startswith(("ConnectionResetError", "BrokenPipeError", "TimeoutError")):
            self.served.errors.append(error)


class Server:
    """A server of one origin or more, which fails a test where it failed itself.

    Args:
        served: What its origins serve.
    """

    def __init__(self, served: Served) -> None:
        self._served = served
        self._origins: list[Origin] = []

    def open_origins(self) -> list[Origin]:
        """Make its origins."""
        raise NotImplementedError

    def start(self) -> None:
        """Open the origins."""
        self._origins = self.open_origins()
        for origin in self._origins:
            origin.start()

    def stop(self) -> None:
        """Let everyone at a gate go, and close the origins."""
        self._served.faults.clear()
        for origin in self._origins:
            origin.stop()
        self._origins = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._served.errors:
            failures = "\n".join(self._served.errors)
            raise AssertionError(f"The {type(self).__name__} failed:\n{failures}") from error


@contextmanager
def serving(route: Callable[[Exchange], None]) -> Iterator[str]:
    """Let one function answer all requests; gives the URL."""
    found = Found("any", lambda _, exchange: route(exchange))
    served = Served()
    origin = Origin(served, lambda *request: found)
    origin.start()
    try:
        yield origin.url
    finally:
        origin.stop()
    assert not served.errors, "\n".join(served.errors)


def _token_of(authorization: str) -> str | None:
    """The token of a request, or the password in its place, as of a URL with a user: the Hub takes both."""
    scheme, _, credentials = authorization.partition(" ")
    if scheme.lower() == "basic":
        return base64.b64decode(credentials).decode().partition(":")[2]
    return credentials if scheme.lower() == "bearer" else None
