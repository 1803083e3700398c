"""The HTTP side of the test Hub server: one exchange per request, its bodies counted, and faults that break them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import select
import socket
import struct
import sys
import termios
import time
from collections.abc import Iterable, Iterator, Mapping
from email.message import Message
from http import HTTPStatus
from io import BufferedIOBase
from typing import Any
from urllib.parse import parse_qs

from tests.servers.faults import Fault
from tests.servers.log import Request
from tests.servers.objects import PIECE_BYTES

# Larger JSON than any client sends: 256 files with samples of 512 bytes make about 200 kB.
MAX_JSON_BYTES = 16 * 1024 * 1024
# How long a reset waits, at most, until the client's system has what was sent before it.
LINGER_SECONDS = 60.0


# What http.server parses the head of a request into.
Headers = Message


class HubError(Exception):
    """An answer that refuses the request, as the Hub words it."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {"X-Error-Message": message} | {name.replace("_", "-"): text for name, text in headers.items()}
        if code is not None:
            self.headers["X-Error-Code"] = code
        self.body: Any = {"error": message}


class StorageError(HubError):
    """A refusal by a storage: XML, and none of the Hub's headers."""

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(status, message, **headers)
        self.headers.pop("X-Error-Message")
        self.xml = (
            f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'
        )


class HangUpError(Exception):
    """The connection ends here, by a fault."""


class ClientGoneError(ConnectionError):
    """The client closed the connection in the middle of its request or of the answer."""


class Body:
    """The body of a request, read in pieces and counted."""

    def __init__(self, stream: BufferedIOBase, headers: Headers, record: Request, fault: Fault | None) -> None:
        self._stream, self._record, self._fault = stream, record, fault
        self._is_chunked = "chunked" in headers.get("Transfer-Encoding", "").lower()
        self.length = int(headers.get("Content-Length") or 0)
        self.is_empty = not self._is_chunked and self.length == 0
        self._limit = fault.limit("up", not self.is_empty) if fault is not None else None
        self._is_read = False

    def pieces(self) -> Iterator[bytes]:
        """Read the body once; a fault may end it or hold it up."""
        if self._is_read:
            return
        self._is_read = True
        if self._fault is not None and self._fault.kind == "drop" and self._limit == 0:
            raise HangUpError
        if self._is_chunked:
            while size := int(self._stream.readline().split(b";")[0] or b"0", 16):
                yield from self._take(size)
                self._stream.readline()
            while self._stream.readline().strip():  # trailers
                pass
        else:
            yield from self._take(self.length)

    def _take(self, left: int) -> Iterator[bytes]:
        while left > 0:
            size = min(PIECE_BYTES, left)
            if self._limit is not None and self._record.bytes_up < self._limit:
                size = min(size, self._limit - self._record.bytes_up)
            piece = self._stream.read(size)
            self._record.bytes_up += len(piece)
            left -= len(piece)
            if len(piece) < size:
                raise ClientGoneError
            if self._fault is not None and self._record.bytes_up == self._limit:
                self._fault.wait()
                if self._fault.kind == "drop":
                    raise HangUpError
            yield piece

    def read(self, limit: int = MAX_JSON_BYTES) -> bytes:
        """Read a small body whole."""
        content = bytearray()
        for piece in self.pieces():
            content += piece
            if len(content) > limit:
                raise HubError(413, "Payload too large")
        return bytes(content)

    def json(self) -> dict[str, Any]:
        """Read a JSON object."""
        try:
            value = json.loads(self.read() or b"{}")
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise HubError(400, "Invalid JSON")
        return value

    def drain(self) -> None:
        """Read what nobody read, so that the next request of the connection begins where it should."""
        for _ in self.pieces():
            pass


class Exchange:
    """One request and its one answer."""

    def __init__(
        self, connection: socket.socket, body: Body, headers: Headers, record: Request, fault: Fault | None
    ) -> None:
        self.body, self.headers, self.record, self.fault = body, headers, record, fault
        self._connection = connection
        self.is_answered = False
        self.must_close = False
        self.path, _, query = record.path.partition("?")
        self._query = parse_qs(query, keep_blank_values=True)

    def query(self, name: str, default: str = "") -> str:
        """Get a parameter of the query."""
        return self._query.get(name, [default])[0]

    def query_list(self, name: str) -> list[str]:
        """Get a parameter of the query that may come more than once, as `name` or `name[]`."""
        return self._query.get(name, []) + self._query.get(f"{name}[]", [])

    def flag(self, name: str) -> bool:
        """Get a parameter of the query that is true or false."""
        return self.query(name).lower() in ("1", "true")

    def reply_json(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Answer with JSON."""
        self.reply(
            status, json.dumps(value).encode(), {"Content-Type": "application/json; charset=utf-8", **(headers or {})}
        )

    def reply_error(self, error: HubError) -> None:
        """Answer with a refusal."""
        self.reply_json(error.body, error.status, error.headers)

    def reply(self, status: int, content: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        """Answer with a small body."""
        self.stream(status, [content], len(content), headers)

    def stream(
        self, status: int, pieces: Iterable[bytes], length: int, headers: Mapping[str, str] | None = None
    ) -> None:
        """Answer with `length` bytes; a fault may keep some back, change or delay them."""
        self.body.drain()
        self.is_answered = True
        if self.fault is not None and self.fault.kind == "lost_answer":
            raise HangUpError
        limit = self._fault_limit()
        if self.fault is not None and self.fault.kind in ("drop", "truncate") and limit == 0:
            raise HangUpError
        self.record.status = status
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"Content-Length: {length}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        if self.must_close:
            lines.append("Connection: close")
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        if self.record.method == "HEAD":
            self._connection.sendall(head)
        elif self.fault is None and length <= PIECE_BYTES:
            # In one packet, so that a client that goes away at the sight of a 404 still gets (and counts) all of it.
            self.record.bytes_down += length
            self._connection.sendall(head + b"".join(pieces))
        else:
            self._connection.sendall(head)
            for piece in pieces:
                self._send(piece, limit)

    def _fault_limit(self) -> int | None:
        if self.fault is None:
            return None
        limit = self.fault.limit("down", not self.body.is_empty)
        if limit == 0 and self.fault.kind == "slow":
            self.fault.wait()
        return limit

    def _send(self, piece: bytes, limit: int | None) -> None:
        fault, sent = self.fault, self.record.bytes_down
        if fault is not None and fault.kind == "corrupt" and sent <= fault.offset < sent + len(piece):
            changed = bytearray(piece)
            changed[fault.offset - sent] ^= 1
            piece = bytes(changed)
            fault.reached.set()
        if fault is None or limit is None:
            self._send_all(piece)
            return
        view = memoryview(piece)
        while view:
            left = limit - self.record.bytes_down
            part = view[:left] if left > 0 else view
            self._send_all(part)
            view = view[len(part) :]
            if self.record.bytes_down == limit:
                fault.wait()
                if fault.kind != "slow":
                    raise HangUpError

    def _send_all(self, data: bytes | memoryview) -> None:
        # Counted before they go, and taken back if they don't: a client that has its last byte may read the log.
        if _is_gone(self._connection):
            raise ClientGoneError
        view = memoryview(data)
        self.record.bytes_down += len(view)
        try:
            while view:
                view = view[self._connection.send(view) :]
        except BaseException:
            self.record.bytes_down -= len(view)
            raise


def _is_gone(connection: socket.socket) -> bool:
    # The system takes data for a peer that has closed; it only says so at the send after that.
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    try:
        return bool(poll.poll(0)) and connection.recv(1, socket.MSG_PEEK) == b""
    except ConnectionError:
        return True


def wait_until_gone(connection: socket.socket, seconds: float) -> None:
    """Wait until the client has closed its side, for so long at most; what it still sends is thrown away."""
    connection.settimeout(seconds)
    with contextlib.suppress(OSError):
        while connection.recv(PIECE_BYTES):
            pass


def reset(connection: socket.socket) -> None:
    """Close a connection by RST, once the peer's system has what was sent."""
    deadline = time.monotonic() + LINGER_SECONDS
    with contextlib.suppress(OSError):
        while _unsent_bytes(connection) and time.monotonic() < deadline:
            select.select([], [], [], 0.001)
        # Linger on, for 0 s: close() sends RST.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _unsent_bytes(connection: socket.socket) -> int:
    if sys.platform != "linux":
        return 0
    return int.from_bytes(fcntl.ioctl(connection, termios.TIOCOUTQ, b"\0" * 4), sys.byteorder)
