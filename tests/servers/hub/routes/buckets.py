"""The Hub's calls about buckets: create, info, delete, move, list, describe, change in batches, and resolve."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from tests.servers.bucket.buckets import Bucket, BucketEntry
from tests.servers.hub.hub import Hub
from tests.servers.hub.repos import check_path, hub_time, now
from tests.servers.hub.routes import accounts
from tests.servers.hub.routes.pages import page_of
from tests.servers.wire import Exchange, HangUpError, HubError

# Clients send no more operations at once.
MAX_OPERATIONS = 1000
OK = 200


def create(hub: Hub, exchange: Exchange, bucket_id: str) -> None:
    """Make a bucket."""
    user, request = accounts.signed_in(exchange), exchange.body.json()
    namespace, name = bucket_id.split("/")
    bucket_id = f"{user.name if namespace == 'me' else namespace}/{name}"
    accounts.check_write(user, bucket_id.split("/")[0])
    answer = {"url": f"{hub.api_origin}/buckets/{bucket_id}", "name": bucket_id, "id": bucket_id}
    private = bool(request.get("private")) or request.get("visibility") == "private"
    if hub.buckets.create(bucket_id, private) is None:
        exchange.reply_json({"error": f"You already created this bucket: {bucket_id}", **answer}, 409)
    else:
        exchange.reply_json(answer)


def info(hub: Hub, exchange: Exchange, bucket_id: str) -> None:
    """Describe a bucket."""
    exchange.reply_json(_describe(accounts.readable(hub.buckets, exchange, bucket_id)))


def _describe(bucket: Bucket) -> dict[str, Any]:
    with bucket.lock:
        return {
            "_id": hashlib.sha1(bucket.bucket_id.encode()).hexdigest()[:24],
            "id": bucket.bucket_id,
            "private": bucket.private,
            "createdAt": bucket.created,
            "size": sum(entry.size for entry in bucket.files.values()),
            "totalFiles": len(bucket.files),
        }


def tree(hub: Hub, exchange: Exchange, bucket_id: str, path: str = "") -> None:
    """List the files whose names begin with a text, page by page; folders stand for what is in them if asked so."""
    bucket, prefix = accounts.readable(hub.buckets, exchange, bucket_id), unquote(path)
    with bucket.lock:
        files = {name: entry for name, entry in bucket.files.items() if name.startswith(prefix)}
    listing: dict[str, dict[str, Any]] = {}
    for name, entry in files.items():
        folder = None if exchange.flag("recursive") else _folder(name, prefix)
        if folder is None:
            listing[name] = _file(name, entry)
        else:
            uploaded = max(entry.uploaded, listing.get(folder, {}).get("uploadedAt", ""))
            listing[folder] = {"type": "directory", "path": folder, "uploadedAt": uploaded}
    page, headers = page_of(hub, exchange, sorted(listing), ("recursive", "limit"))
    exchange.reply_json([listing[name] for name in page], headers=headers)


def _folder(name: str, prefix: str) -> str | None:
    """Below a prefix that is a folder's whole name, what is in the folder is listed."""
    begin = len(prefix) + (1 if name[len(prefix) :].startswith("/") and prefix else 0)
    end = name.find("/", begin)
    return None if end < 0 else name[:end]


def _file(name: str, entry: BucketEntry) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "type": "file", "path": name, "size": entry.size, "xetHash": entry.xet_hash,
        "mtime": hub_time(entry.mtime / 1000), "uploadedAt": entry.uploaded,
    }  # fmt: skip
    if entry.content_type is not None:
        answer["contentType"] = entry.content_type
    return answer


def paths_info(hub: Hub, exchange: Exchange, bucket_id: str) -> None:
    """Describe those of the asked files that are there."""
    bucket = accounts.readable(hub.buckets, exchange, bucket_id)
    paths = [str(path) for path in exchange.body.json().get("paths", [])]
    with bucket.lock:
        found = [_file(path, bucket.files[path]) for path in paths if path in bucket.files]
    exchange.reply_json(found)


def batch(hub: Hub, exchange: Exchange, bucket_id: str) -> None:
    """Carry out operations one after another; those that fail are listed, the others hold all the same.

    A fault of the kind "partial" ends it after some.
    """
    bucket, _ = accounts.writable(hub.buckets, exchange, bucket_id)
    operations = [json.loads(line) for line in exchange.body.read().splitlines() if line.strip()]
    if len(operations) > MAX_OPERATIONS:
        raise HubError(413, f"A batch holds at most {MAX_OPERATIONS} operations; this one has {len(operations)}.")
    fault = exchange.fault if exchange.fault is not None and exchange.fault.kind == "partial" else None
    done = len(operations) if fault is None else fault.operations
    failed = []
    with bucket.lock:
        for operation in operations[:done]:
            try:
                _OPERATIONS[str(operation.get("type"))](hub, bucket, operation)
            except (KeyError, ValueError) as error:
                failed.append({"path": str(operation.get("path")), "error": str(error)})
    if fault is not None:
        fault.reached.set()
        if fault.status == 0:
            raise HangUpError
        if fault.status != OK:
            raise HubError(fault.status, "A fault of the test server")
    failed += [{"path": str(one.get("path")), "error": "A fault of the test server"} for one in operations[done:]]
    status = 422 if operations and len(failed) == len(operations) else OK
    answer = {"success": not failed, "processed": len(operations), "failed": failed}
    exchange.reply_json({**answer, "succeeded": len(operations) - len(failed)}, status)


def _add(hub: Hub, bucket: Bucket, operation: dict[str, Any]) -> None:
    path, xet_hash = check_path(str(operation["path"])), str(operation["xetHash"])
    recipe = hub.cas.recipe(xet_hash)
    if recipe is None:
        raise ValueError(f"No file with the Xet hash {xet_hash} was uploaded")
    mtime = int(operation.get("mtime") or 0)
    bucket.put(path, BucketEntry(xet_hash, recipe.size, mtime, now(), operation.get("contentType")))


def _copy(hub: Hub, bucket: Bucket, operation: dict[str, Any]) -> None:
    source_id, xet_hash = str(operation["sourceRepoId"]), str(operation["xetHash"])
    source = hub.buckets.get(source_id) if operation["sourceRepoType"] == "bucket" else None
    if source is None or all(one.xet_hash != xet_hash for one in source.files.values()):
        raise ValueError(f"{source_id} has no file with the Xet hash {xet_hash}")
    _add(hub, bucket, operation)


def _delete(hub: Hub, bucket: Bucket, operation: dict[str, Any]) -> None:
    # To delete what is gone is no error.
    bucket.put(str(operation["path"]), None)


_OPERATIONS: dict[str, Callable[[Hub, Bucket, dict[str, Any]], None]] = {
    "addFile": _add,
    "copyFile": _copy,
    "deleteFile": _delete,
}


def xet_token(hub: Hub, exchange: Exchange, bucket_id: str, scope: str) -> None:
    """Give a token for Xet's store."""
    if scope == "write":
        accounts.writable(hub.buckets, exchange, bucket_id)
    else:
        accounts.readable(hub.buckets, exchange, bucket_id)
    hub.reply_xet_token(exchange, scope)


def resolve(hub: Hub, exchange: Exchange, bucket_id: str, path: str) -> None:
    """Answer HEAD and GET of a file: where its bytes are, for Xet's clients and for others."""
    bucket = accounts.readable(hub.buckets, exchange, bucket_id)
    with bucket.lock:
        entry = bucket.files.get(unquote(path))
    if entry is None:
        raise HubError(404, "Entry not found", "EntryNotFound")
    headers = {
        "ETag": f'"{entry.xet_hash}"',
        "X-Linked-Etag": f'"{entry.xet_hash}"',
        "X-Linked-Size": str(entry.size),
        "X-Xet-Hash": entry.xet_hash,
        "Link": f'<{hub.api_origin}/api/buckets/{bucket_id}/xet-read-token>; rel="xet-auth"',
        "Location": hub.sign(f"/xet-bridge/{entry.xet_hash}", "GET"),
        "Content-Type": "text/plain",
    }
    exchange.reply(302, b"Found", headers)
