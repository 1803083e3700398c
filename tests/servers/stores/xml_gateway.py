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
from typing import Any
from urllib.parse import parse_qs, quote, unquote
from xml.sax.saxutils import escape, unescape

from tests.servers.asking import HOP, Answer, ask, pass_on
from tests.servers.origin import Found, Origin, Served
from tests.servers.wire import Exchange, Headers

_JSON_API = ("/storage/", "/upload/", "/download/", "/batch/", "/_internal/")
_HOP = HOP | {"host", "date"}
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


class _Gateway(Served):
    """The API; nobody asks for its log.

    Args:
        upstream: fake-gcs-server's host and port.
    """

    def __init__(self, upstream: str) -> None:
        super().__init__()
        self.upstream = upstream
        self.uploads = _Uploads()

    def find(self, method: str, target: str, headers: Headers) -> Found:
        """Find the one route that there is."""
        self.log.clear()
        return Found("gcs", lambda _, exchange: pass_on(exchange, _Call(self, exchange).answer()))


class _Call:
    """One request."""

    def __init__(self, gateway: _Gateway, exchange: Exchange) -> None:
        self._upstream, self._uploads = gateway.upstream, gateway.uploads
        self._headers = exchange.headers
        self._method, self._target = exchange.record.method, exchange.record.path
        self._body = b"".join(exchange.body.pieces())

    def answer(self) -> Answer:
        """Answer the request."""
        path, _, query = self._target.partition("?")
        bucket, _, name = unquote(path.lstrip("/")).partition("/")
        asked = {key: values[0] for key, values in parse_qs(query, keep_blank_values=True).items()}
        if self._target.startswith(_JSON_API):
            return self._pass_on()
        if "uploads" in asked or "uploadId" in asked:
            return self._answer_upload(bucket, name, asked)
        if self._method == "POST" and "delete" in asked:
            return self._delete(bucket)
        if self._method == "PUT" and "x-goog-copy-source" in self._headers:
            return self._copy(bucket, name)
        if self._method == "PUT" and name:
            return self._insert(bucket, name, self._body, self._metadata())
        return self._read(bucket)

    def _ask(self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Answer:
        return ask(self._upstream, method, target, body or None, headers)

    def _pass_on(self) -> Answer:
        headers = {name: text for name, text in self._headers.items() if name.lower() not in _HOP}
        return self._ask(self._method, self._target, self._body, headers)

    def _read(self, bucket: str) -> Answer:
        answer = self._pass_on()
        wanted = self._headers.get("If-Match")
        if answer.status < 300 and wanted is not None and wanted != answer.headers.get("etag"):
            return _refusal(412, "PreconditionFailed")
        if (
            answer.status == 200
            and self._method == "GET"
            and unquote(self._target.partition("?")[0]).strip("/") == bucket
        ):
            body = re.sub(rb"<ETag>([^&<]*)</ETag>", rb"<ETag>&quot;\1&quot;</ETag>", answer.body)  # as GCS has them
            return Answer(answer.status, answer.headers, body)
        return self._missing(bucket) if answer.status in (404, 500) else answer

    def _missing(self, bucket: str) -> Answer:
        is_there = self._ask("GET", f"/storage/v1/b/{quote(bucket, safe='')}").status == 200
        return _refusal(404, "NoSuchKey" if is_there else "NoSuchBucket")

    def _metadata(self) -> dict[str, str]:
        given = {header.lower(): text for header, text in self._headers.items()}
        return {header.removeprefix(_META): text for header, text in given.items() if header.startswith(_META)}

    def _insert(self, bucket: str, name: str, raw: bytes, metadata: Mapping[str, str]) -> Answer:
        fields = {"name": name, "contentType": "application/octet-stream", "metadata": metadata}
        about = json.dumps(fields).encode()
        parts = [b"Content-Type: application/json\r\n\r\n" + about, b"Content-Type: application/octet-stream\r\n\r\n"]
        head = b"".join(b"\r\n--%s\r\n%s" % (_BOUNDARY.encode(), part) for part in parts)
        target = f"/upload/storage/v1/b/{quote(bucket, safe='')}/o?uploadType=multipart"
        condition = self._headers.get("x-goog-if-generation-match")
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
        source, _, of = unquote(self._headers["x-goog-copy-source"].lstrip("/")).partition("/")
        places = [f"b/{quote(each, safe='')}/o/{quote(key, safe='')}" for each, key in ((source, of), (bucket, name))]
        condition = self._headers.get("x-goog-if-generation-match")
        query = "" if condition is None else f"?ifGenerationMatch={condition}"
        answer = self._ask("POST", f"/storage/v1/{places[0]}/rewriteTo/{places[1]}{query}")
        return self._inserted(bucket, answer)

    def _delete(self, bucket: str) -> Answer:
        rows = []
        for key in re.findall("<Key>(.*?)</Key>", self._body.decode()):
            place = f"b/{quote(bucket, safe='')}/o/{quote(unescape(key), safe='')}"
            status = self._ask("DELETE", f"/storage/v1/{place}").status
            is_gone = status < 300 or status == 404
            rows.append(f"<Deleted><Key>{key}</Key></Deleted>" if is_gone else f"<Error><Key>{key}</Key></Error>")
        return _xml("DeleteResult", "".join(rows))

    def _answer_upload(self, bucket: str, name: str, asked: Mapping[str, str]) -> Answer:
        uploads = self._uploads
        key = asked.get("uploadId", "")
        if self._method == "GET" and not name:
            below = uploads.below(bucket, asked.get("prefix", ""))
            rows = "".join(f"<Upload><Key>{escape(of)}</Key><UploadId>{key}</UploadId></Upload>" for of, key in below)
            return _xml("ListMultipartUploadsResult", f"<IsTruncated>false</IsTruncated>{rows}")
        if self._method == "POST" and "uploads" in asked:
            if self._ask("GET", f"/storage/v1/b/{quote(bucket, safe='')}").status != 200:
                return _refusal(404, "NoSuchBucket")
            key = uploads.begin(bucket, name, self._metadata())
            return _xml("InitiateMultipartUploadResult", f"{_place(bucket, name)}<UploadId>{key}</UploadId>")
        upload = uploads.find(key)
        if upload is None:
            return _refusal(404, "NoSuchUpload")
        if self._method == "PUT":
            upload.parts[int(asked["partNumber"])] = self._body
            return Answer(200, {"etag": f'"{secrets.token_hex(8)}"'}, b"")
        if self._method == "DELETE":
            uploads.forget(key)
            return Answer(204, {}, b"")
        return self._complete(bucket, name, key, upload)

    def _complete(self, bucket: str, name: str, key: str, upload: _Upload) -> Answer:
        numbers = [int(number) for number in re.findall(rb"<PartNumber>(\d+)</PartNumber>", self._body)]
        if not numbers or not set(numbers) <= set(upload.parts):
            return _refusal(400, "InvalidPart")
        answer = self._insert(bucket, name, b"".join(upload.parts[number] for number in numbers), upload.metadata)
        if answer.status != 200:
            return answer
        self._uploads.forget(key)
        etag = f"<ETag>{escape(answer.headers['etag'])}</ETag>"
        return Answer(200, answer.headers, _xml("CompleteMultipartUploadResult", _place(bucket, name) + etag).body)


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
    origin = Origin(gateway, gateway.find)
    origin.start()
    return origin.url
