"""The writing half of GCS's XML API before fake-gcs-server, which has its reading half and the JSON API.

Conditional puts, multipart uploads and copies become requests of the JSON API; the condition itself is checked by
fake-gcs-server. What it does not know of reads (If-Match) is checked here, on the answer that is sent on.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote
from xml.sax.saxutils import escape, unescape

from tests.stores.services.upstream import Answer, ask

_JSON_API = ("/storage/", "/upload/", "/download/", "/batch/", "/_internal/")
_HOP = {"host", "connection", "content-length", "transfer-encoding", "keep-alive", "date"}
_META = "x-goog-meta-"
_BOUNDARY = "hfshard-tests"


@dataclass(slots=True)
class _Upload:
    bucket: str
    name: str
    metadata: Mapping[str, str]
    parts: dict[int, bytes] = field(default_factory=dict)


class _Uploads:
    """Unfinished multipart uploads: their parts in memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uploads: dict[str, _Upload] = {}

    def begin(self, bucket: str, name: str, metadata: Mapping[str, str]) -> str:
        key = secrets.token_hex(8)
        with self._lock:
            self._uploads[key] = _Upload(bucket, name, metadata)
        return key

    def find(self, key: str) -> _Upload | None:
        with self._lock:
            return self._uploads.get(key)

    def forget(self, key: str) -> None:
        with self._lock:
            self._uploads.pop(key, None)

    def below(self, bucket: str, prefix: str) -> list[tuple[str, str]]:
        """Name and key of each."""
        with self._lock:
            uploads = [(upload.name, key) for key, upload in self._uploads.items() if upload.bucket == bucket]
        return sorted(upload for upload in uploads if upload[0].startswith(prefix))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Gateway

    def answer(self) -> None:
        """Answer one request."""
        body = self._read_body()
        path, _, query = self.path.partition("?")
        bucket, _, name = unquote(path.lstrip("/")).partition("/")
        asked = {key: values[0] for key, values in parse_qs(query, keep_blank_values=True).items()}
        if self.path.startswith(_JSON_API):
            self._reply(self._pass_on(body))
        elif "uploads" in asked or "uploadId" in asked:
            self._reply(self._answer_upload(bucket, name, asked, body))
        elif self.command == "POST" and "delete" in asked:
            self._reply(self._delete(bucket, body))
        elif self.command == "PUT" and "x-goog-copy-source" in self.headers:
            self._reply(self._copy(bucket, name))
        elif self.command == "PUT" and name:
            self._reply(self._insert(bucket, name, body, self._metadata()))
        else:
            self._reply(self._read(bucket, body))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer

    def _read_body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self._read_exactly(int(self.headers.get("Content-Length") or 0))
        body = bytearray()
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self._read_exactly(size)
            self.rfile.readline()
        self.rfile.readline()
        return bytes(body)

    def _read_exactly(self, size: int) -> bytes:
        piece = self.rfile.read(size)
        if len(piece) < size:
            raise ConnectionError("The client went away in the middle of its request.")
        return piece

    def _ask(self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Answer:
        return ask(self.server.upstream, method, target, body or None, headers)

    def _pass_on(self, body: bytes) -> Answer:
        headers = {name: text for name, text in self.headers.items() if name.lower() not in _HOP}
        return self._ask(self.command, self.path, body, headers)

    def _read(self, bucket: str, body: bytes) -> Answer:
        answer = self._pass_on(body)
        wanted = self.headers.get("If-Match")
        if answer.status < 300 and wanted is not None and wanted != answer.headers.get("etag"):
            return _refusal(412, "PreconditionFailed")
        if answer.status == 200 and self.command == "GET" and unquote(self.path.partition("?")[0]).strip("/") == bucket:
            body = re.sub(rb"<ETag>([^&<]*)</ETag>", rb"<ETag>&quot;\1&quot;</ETag>", answer.body)  # as GCS has them
            return Answer(answer.status, answer.headers, body)
        return self._missing(bucket) if answer.status in (404, 500) else answer

    def _missing(self, bucket: str) -> Answer:
        is_there = self._ask("GET", f"/storage/v1/b/{quote(bucket, safe='')}").status == 200
        return _refusal(404, "NoSuchKey" if is_there else "NoSuchBucket")

    def _metadata(self) -> dict[str, str]:
        given = {header.lower(): text for header, text in self.headers.items()}
        return {header.removeprefix(_META): text for header, text in given.items() if header.startswith(_META)}

    def _insert(self, bucket: str, name: str, raw: bytes, metadata: Mapping[str, str]) -> Answer:
        fields = {"name": name, "contentType": "application/octet-stream", "metadata": metadata}
        about = json.dumps(fields).encode()
        parts = [b"Content-Type: application/json\r\n\r\n" + about, b"Content-Type: application/octet-stream\r\n\r\n"]
        head = b"".join(b"\r\n--%s\r\n%s" % (_BOUNDARY.encode(), part) for part in parts)
        target = f"/upload/storage/v1/b/{quote(bucket, safe='')}/o?uploadType=multipart"
        condition = self.headers.get("x-goog-if-generation-match")
        if condition is not None:
            target += f"&ifGenerationMatch={quote(condition)}"
        kind = {"Content-Type": f"multipart/related; boundary={_BOUNDARY}"}
        answer = self._ask("POST", target, b"%s%s\r\n--%s--\r\n" % (head, raw, _BOUNDARY.encode()), kind)
        return self._inserted(bucket, answer)

    def _inserted(self, bucket: str, answer: Answer) -> Answer:
        if answer.status == 412:
            return _refusal(412, "PreconditionFailed")
        if answer.status >= 300:
            return self._missing(bucket)
        made: dict[str, Any] = json.loads(answer.body)
        made = made.get("resource", made)
        return Answer(200, {"etag": f'"{made["md5Hash"]}"', "x-goog-generation": str(made["generation"])}, b"")

    def _copy(self, bucket: str, name: str) -> Answer:
        source, _, of = unquote(self.headers["x-goog-copy-source"].lstrip("/")).partition("/")
        places = [f"b/{quote(each, safe='')}/o/{quote(key, safe='')}" for each, key in ((source, of), (bucket, name))]
        condition = self.headers.get("x-goog-if-generation-match")
        query = "" if condition is None else f"?ifGenerationMatch={condition}"
        answer = self._ask("POST", f"/storage/v1/{places[0]}/rewriteTo/{places[1]}{query}")
        return self._inserted(bucket, answer)

    def _delete(self, bucket: str, body: bytes) -> Answer:
        rows = []
        for key in re.findall("<Key>(.*?)</Key>", body.decode()):
            place = f"b/{quote(bucket, safe='')}/o/{quote(unescape(key), safe='')}"
            status = self._ask("DELETE", f"/storage/v1/{place}").status
            is_gone = status < 300 or status == 404
            rows.append(f"<Deleted><Key>{key}</Key></Deleted>" if is_gone else f"<Error><Key>{key}</Key></Error>")
        return _xml("DeleteResult", "".join(rows))

    def _answer_upload(self, bucket: str, name: str, asked: Mapping[str, str], body: bytes) -> Answer:
        uploads = self.server.uploads
        key = asked.get("uploadId", "")
        if self.command == "GET" and not name:
            below = uploads.below(bucket, asked.get("prefix", ""))
            rows = "".join(f"<Upload><Key>{escape(of)}</Key><UploadId>{key}</UploadId></Upload>" for of, key in below)
            return _xml("ListMultipartUploadsResult", f"<IsTruncated>false</IsTruncated>{rows}")
        if self.command == "POST" and "uploads" in asked:
            if self._ask("GET", f"/storage/v1/b/{quote(bucket, safe='')}").status != 200:
                return _refusal(404, "NoSuchBucket")
            key = uploads.begin(bucket, name, self._metadata())
            return _xml("InitiateMultipartUploadResult", f"{_place(bucket, name)}<UploadId>{key}</UploadId>")
        upload = uploads.find(key)
        if upload is None:
            return _refusal(404, "NoSuchUpload")
        if self.command == "PUT":
            upload.parts[int(asked["partNumber"])] = body
            return Answer(200, {"etag": f'"{secrets.token_hex(8)}"'}, b"")
        if self.command == "DELETE":
            uploads.forget(key)
            return Answer(204, {}, b"")
        return self._complete(bucket, name, key, upload, body)

    def _complete(self, bucket: str, name: str, key: str, upload: _Upload, body: bytes) -> Answer:
        numbers = [int(number) for number in re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)]
        if not numbers or not set(numbers) <= set(upload.parts):
            return _refusal(400, "InvalidPart")
        answer = self._insert(bucket, name, b"".join(upload.parts[number] for number in numbers), upload.metadata)
        if answer.status != 200:
            return answer
        self.server.uploads.forget(key)
        etag = f"<ETag>{escape(answer.headers['etag'])}</ETag>"
        return Answer(200, answer.headers, _xml("CompleteMultipartUploadResult", _place(bucket, name) + etag).body)

    def _reply(self, answer: Answer) -> None:
        self.send_response_only(answer.status)
        for name, text in answer.headers.items():
            if name not in _HOP:
                self.send_header(name, text)
        is_head = self.command == "HEAD"
        length = answer.headers.get("content-length", "0") if is_head else str(len(answer.body))
        if answer.status != 204:
            self.send_header("Content-Length", length)
        self.end_headers()
        if not is_head:
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


class _Gateway(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.uploads = _Uploads()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is nothing."""


def _place(bucket: str, name: str) -> str:
    return f"<Bucket>{escape(bucket)}</Bucket><Key>{escape(name)}</Key>"


def _xml(tag: str, body: str) -> Answer:
    text = f'<?xml version="1.0" encoding="UTF-8"?><{tag}>{body}</{tag}>'
    return Answer(200, {"content-type": "application/xml"}, text.encode())


def _refusal(status: int, code: str) -> Answer:
    answer = _xml("Error", f"<Code>{code}</Code><Message>{code}</Message>")
    return Answer(status, answer.headers, answer.body)


def serve_gateway(upstream: str) -> str:
    """Serve the XML API in threads of this process; gives its URL."""
    gateway = _Gateway(upstream)
    threading.Thread(target=gateway.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{gateway.server_port}"
