"""The two HTTP origins of the test Hub: threads, routes, and what happens to a request from first byte to log."""

from __future__ import annotations

import base64
import re
import socket
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.hubserver.faults import Fault
from tests.hubserver.hub import Hub
from tests.hubserver.log import Request
from tests.hubserver.routes import api, buckets, cas, commits, discussions, lfs, resolve
from tests.hubserver.urls import StorageError
from tests.hubserver.wire import Body, ClientGoneError, Exchange, HangUpError, Headers, HubError, reset, wait_until_gone

# How long a stopping server waits for the threads of its connections, which end at once where nothing hangs.
STOP_SECONDS = 60.0
# No client of a test keeps a connection idle for so long.
IDLE_SECONDS = 300.0

Route = Callable[..., None]
_REPO = r"(?P<repo_id>[^/]+/[^/]+)"
_MODEL = rf"/api/models/{_REPO}"
_REVISION = r"(?P<revision>[^/]+)"
_NAME = r"(?P<name>[^/]+)"
_BUCKET = r"/api/buckets/(?P<bucket_id>[^/]+/[^/]+)"
_XET = r"[0-9a-f]{64}"

ROUTES: dict[str, list[tuple[str, str, str, Route]]] = {
    "api": [
        ("GET", r"/api/whoami-v2", "whoami", api.whoami),
        ("POST", r"/api/repos/create", "create_repo", api.create_repo),
        ("DELETE", r"/api/repos/delete", "delete_repo", api.delete_repo),
        ("POST", r"/api/validate-yaml", "validate_yaml", api.validate_yaml),
        ("GET", r"/api/agent-harnesses", "harnesses", api.harnesses),
        ("PUT", rf"{_MODEL}/settings", "settings", api.settings),
        ("GET", rf"{_MODEL}", "info", api.info),
        ("GET", rf"{_MODEL}/revision/{_REVISION}", "info", api.info),
        ("GET", rf"{_MODEL}/tree/{_REVISION}(?:/(?P<path>.*))?", "tree", api.tree),
        ("POST", rf"{_MODEL}/paths-info/{_REVISION}", "paths-info", api.paths_info),
        ("GET", rf"{_MODEL}/commits/{_REVISION}", "commits", api.commits),
        ("GET", rf"{_MODEL}/refs", "refs", api.refs),
        ("POST", rf"{_MODEL}/branch/{_NAME}", "branch", api.create_branch),
        ("DELETE", rf"{_MODEL}/branch/{_NAME}", "branch", api.delete_branch),
        ("POST", rf"{_MODEL}/tag/{_NAME}", "tag", api.create_tag),
        ("DELETE", rf"{_MODEL}/tag/{_NAME}", "tag", api.delete_tag),
        ("GET", rf"{_MODEL}/discussions", "discussion", discussions.list_all),
        ("POST", rf"{_MODEL}/discussions", "discussion", discussions.create),
        ("GET", rf"{_MODEL}/discussions/(?P<number>\d+)", "discussion", discussions.details),
        ("GET", rf"{_MODEL}/xet-(?P<scope>read|write)-token/.*", "xet_token", api.xet_token),
        ("POST", rf"{_MODEL}/preupload/{_REVISION}", "preupload", commits.preupload),
        ("POST", rf"{_MODEL}/commit/{_REVISION}", "commit", commits.commit),
        ("POST", r"/api/complete_multipart/(?P<repo_id>[^/]+/[^/]+)/(?P<sha256>\w+)", "lfs_complete", lfs.complete),
        ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", "lfs_batch", lfs.batch),
        ("POST", rf"/{_REPO}\.git/info/lfs/objects/verify", "lfs_verify", lfs.verify),
        ("GET", r"/api/buckets/(?P<namespace>[^/]+)", "bucket_list", buckets.of_namespace),
        ("POST", _BUCKET, "bucket_create", buckets.create),
        ("GET", _BUCKET, "bucket_info", buckets.info),
        ("DELETE", _BUCKET, "bucket_delete", buckets.delete),
        ("POST", r"/api/repos/move", "bucket_move", buckets.move),
        ("PUT", rf"{_BUCKET}/settings", "bucket_settings", buckets.settings),
        ("GET", rf"{_BUCKET}/tree(?:/(?P<path>.*))?", "bucket_tree", buckets.tree),
        ("POST", rf"{_BUCKET}/paths-info", "bucket_paths", buckets.paths_info),
        ("POST", rf"{_BUCKET}/batch", "bucket_batch", buckets.batch),
        ("GET", rf"{_BUCKET}/xet-(?P<scope>read|write)-token", "xet_token", buckets.xet_token),
        ("HEAD", r"/buckets/(?P<bucket_id>[^/]+/[^/]+)/resolve/(?P<path>.+)", "bucket_head", buckets.resolve),
        ("GET", r"/buckets/(?P<bucket_id>[^/]+/[^/]+)/resolve/(?P<path>.+)", "bucket_get", buckets.resolve),
        ("HEAD", rf"/{_REPO}/resolve/{_REVISION}/(?P<path>.+)", "resolve_head", resolve.resolve),
        ("GET", rf"/{_REPO}/resolve/{_REVISION}/(?P<path>.+)", "resolve_get", resolve.resolve),
    ],
    "storage": [
        ("POST", rf"/v1/xorbs/default/(?P<xorb>{_XET})", "xorb_put", cas.put_xorb),
        ("POST", rf"/v1/xorb-grants/default/{_XET}", "xorb_grant", cas.no_grants),
        ("POST", r"/v(?P<version>[12])/shards", "shard_put", cas.put_shard),
        ("GET", rf"/v1/chunks/default(?:-merkledb)?/(?P<chunk>{_XET})", "chunk_query", cas.query_chunk),
        ("GET", rf"/v(?P<version>[12])/reconstructions/(?P<file_hash>{_XET})", "reconstruction", cas.reconstruction),
        ("POST", r"/v1/telemetry", "telemetry", cas.telemetry),
        ("GET", rf"/xorbs/(?P<xorb>{_XET})", "xorb_get", cas.get_xorb),
        ("GET", rf"/xet-bridge/(?P<file_hash>{_XET})", "bridge_get", cas.get_file),
        ("HEAD", rf"/xet-bridge/(?P<file_hash>{_XET})", "bridge_head", cas.get_file),
        ("GET", rf"/{_REPO}/(?P<sha256>\w+)", "storage_get", resolve.storage_get),
        ("HEAD", rf"/{_REPO}/(?P<sha256>\w+)", "storage_head", resolve.storage_get),
        ("PUT", rf"/{_REPO}/(?P<sha256>\w+)", "lfs_put", lfs.storage_put),
    ],
}


@dataclass(frozen=True, slots=True)
class Found:
    """What answers a request."""

    origin: str
    kind: str
    route: Route | None
    parts: dict[str, str]
    """Of the path: argument of the route -> text."""


def find_route(origins: tuple[str, ...], method: str, target: str) -> Found:
    """Find what answers a request on the port of one origin or of more."""
    path, _, query = target.partition("?")
    for origin in origins:
        for route_method, pattern, kind, route in ROUTES[origin]:
            if route_method == method and (match := re.fullmatch(pattern, path)):
                kind = "lfs_part" if kind == "lfs_put" and "partNumber=" in query else kind
                parts = {name: part for name, part in match.groupdict().items() if part is not None}
                return Found(origin, kind, route, parts)
    return Found(origins[0], "other", None, {})


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = IDLE_SECONDS
    server: Origin

    def answer(self) -> None:
        """Answer one request: log it, let a fault have its way, route it."""
        hub = self.server.hub
        found = self.server.find(self.command, self.path, self.headers)
        if len(self.server.names) > 1:
            hub.answers_to(self.headers.get("Host", ""))
        record = Request(
            method=self.command,
            path=self.path,
            origin=found.origin,
            kind=found.kind,
            range=self.headers.get("Range"),
            token=_token_of(self.headers.get("Authorization", "")),
            user_agent=self.headers.get("User-Agent", ""),
        )
        fault = hub.faults.take(f"{record.method} {record.kind} {record.path}")
        record.fault = fault.kind if fault is not None else ""
        hub.log.add(record)
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
            hub.errors.append(f"{record}\n{traceback.format_exc()}")
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
        hub, fault = self.server.hub, exchange.fault
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
                hub.signer.revoke(exchange)
            elif fault is not None and fault.kind == "slow" and fault.after_bytes == 0:
                fault.wait()
            if route is None:
                raise HubError(404, f"The test server has no {exchange.record.method} {exchange.path}")
            route(hub, exchange, **parts)
        except StorageError as error:
            exchange.reply(error.status, error.xml.encode(), {"Content-Type": "application/xml", **error.headers})
        except HubError as error:
            exchange.reply_error(error)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the log is the hub's."""


class Origin(ThreadingHTTPServer):
    """One origin (host and port) on loopback, or both on one port.

    The two have host names of their own, too: huggingface_hub 1.x goes by the host alone when it asks whether a
    redirect leaves the Hub (and then stops there, and leaves the token out).
    """

    daemon_threads = True
    # Clients open many connections at once.
    request_queue_size = 128

    def __init__(self, hub: Hub, names: tuple[str, ...], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.hub, self.names = hub, names
        self.host = "127.0.0.1" if "api" in names else "localhost"
        self._connections: set[socket.socket] = set()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name=f"hub-{names[0]}", daemon=True)

    @property
    def url(self) -> str:
        """The origin as a URL."""
        return f"http://{self.host}:{self.server_address[1]}"

    def find(self, method: str, target: str, headers: Headers) -> Found:
        """Find what answers a request."""
        return find_route(self.names, method, target)

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
            self.hub.errors.append(error)


def _token_of(authorization: str) -> str | None:
    """The token of a request, or the password in its place, as of a URL with a user: the Hub takes both."""
    scheme, _, credentials = authorization.partition(" ")
    if scheme.lower() == "basic":
        return base64.b64decode(credentials).decode().partition(":")[2]
    return credentials if scheme.lower() == "bearer" else None
