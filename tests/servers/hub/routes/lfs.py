"""LFS of the test Hub: git-lfs batch, PUT in one piece or in parts, completion and verification."""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
from typing import Any
from urllib.parse import unquote

from tests.servers.hub.hub import Hub
from tests.servers.hub.repos import Repo
from tests.servers.hub.routes import accounts
from tests.servers.hub.routes.resolve import commit_of
from tests.servers.objects import Objects, pieces_of
from tests.servers.wire import Exchange, HubError, StorageError

_SHA256 = re.compile(r"[0-9a-f]{64}")
LFS_JSON = {"Content-Type": "application/vnd.git-lfs+json"}


def batch(hub: Hub, exchange: Exchange, repo_id: str) -> None:
    """Answer which objects are to be uploaded or downloaded, and where."""
    request = exchange.body.json()
    if request.get("operation") == "download":
        repo = accounts.downloadable(hub.store, exchange, repo_id)
        wanted = [(str(one["oid"]), int(one["size"])) for one in request.get("objects", [])]
        found = [_download(hub, repo, oid, size) for oid, size in wanted]
        exchange.reply_json({"transfer": "basic", "objects": found}, headers=LFS_JSON)
        return
    repo, _ = accounts.writable(hub.store, exchange, repo_id)
    if request.get("operation") != "upload":
        raise HubError(400, "The operation is 'upload' or 'download'.")
    if "ref" in request:
        commit_of(repo, str(request["ref"]["name"]))
    wanted = [(str(one["oid"]), int(one["size"])) for one in request.get("objects", [])]
    is_multipart = "multipart" in request.get("transfers", ["basic"])
    objects = [_instructions(hub, repo, oid, size, is_multipart) for oid, size in wanted]
    transfer = "multipart" if any("chunk_size" in str(one.get("actions")) for one in objects) else "basic"
    exchange.reply_json({"transfer": transfer, "objects": objects}, headers=LFS_JSON)


def _instructions(hub: Hub, repo: Repo, oid: str, size: int, may_split: bool) -> dict[str, Any]:
    answer: dict[str, Any] = {"oid": oid, "size": size}
    if not _SHA256.fullmatch(oid):
        return {**answer, "error": {"code": 422, "message": "Invalid oid"}}
    answer["authenticated"] = True
    if repo.objects.has(oid):
        return answer
    path = f"/{repo.repo_id}/{oid}"
    verify = {"href": f"{hub.api_origin}/{repo.repo_id}.git/info/lfs/objects/verify", "header": {}}
    if hub.multipart_bytes is None or size <= hub.multipart_bytes or not may_split:
        upload: dict[str, Any] = {"href": hub.sign(path, "PUT", size=str(size))}
        return {**answer, "actions": {"upload": upload, "verify": verify}}
    upload_id = secrets.token_hex(16)
    header = {"chunk_size": str(hub.multipart_bytes)}
    for number, start in enumerate(range(0, size, hub.multipart_bytes), start=1):
        length = min(hub.multipart_bytes, size - start)
        values = {"uploadId": upload_id, "partNumber": str(number), "size": str(length)}
        header[str(number)] = hub.sign(path, "PUT", **values)
    complete = f"/api/complete_multipart/{repo.repo_id}/{oid}"
    href = hub.signer.sign(hub.api_origin, complete, "POST", uploadId=upload_id, size=str(size))
    return {**answer, "actions": {"upload": {"href": href, "header": header}, "verify": verify}}


def _download(hub: Hub, repo: Repo, oid: str, size: int) -> dict[str, Any]:
    answer: dict[str, Any] = {"oid": oid, "size": size, "authenticated": True}
    if not _SHA256.fullmatch(oid) or not repo.objects.has(oid):
        return {**answer, "error": {"code": 404, "message": "Object does not exist"}}
    return {**answer, "actions": {"download": {"href": hub.sign(f"/{repo.repo_id}/{oid}", "GET")}}}


def storage_put(hub: Hub, exchange: Exchange, repo_id: str, sha256: str) -> None:
    """Take an object, or one part of it."""
    hub.signer.check(exchange)
    repo = hub.store.get(repo_id)
    if repo is None:
        raise StorageError(404, "NoSuchBucket", "The specified bucket does not exist.")
    size, upload_id = int(exchange.query("size")), exchange.query("uploadId")
    try:
        if upload_id:
            parts = Objects(hub.uploads / upload_id)
            part = parts.add(exchange.body.pieces(), size=size)
            parts.path(part).replace(parts.path(exchange.query("partNumber")))
            etag = part_etag(upload_id, exchange.query("partNumber"), part)
        else:
            repo.objects.add(exchange.body.pieces(), sha256, size)
            etag = sha256
    except ValueError as error:
        raise StorageError(400, "BadDigest", str(error)) from None
    exchange.reply(200, b"", {"ETag": f'"{etag}"'})


def part_etag(upload_id: str, number: str, sha256: str) -> str:
    """Name what one part of an upload holds."""
    return hashlib.md5(f"{upload_id}/{number}/{sha256}".encode()).hexdigest()


def complete(hub: Hub, exchange: Exchange, repo_id: str, sha256: str) -> None:
    """Join the parts of an object."""
    hub.signer.check(exchange)
    repo = hub.store.get(repo_id)
    upload_id, size, request = exchange.query("uploadId"), int(exchange.query("size")), exchange.body.json()
    parts = Objects(hub.uploads / upload_id)
    if repo is None or request.get("oid") != sha256:
        raise HubError(400, "The completion names another object than the upload.")
    if not repo.objects.has(sha256):
        for number, part in enumerate(request.get("parts", []), start=1):
            path = parts.path(str(number))
            digest = hashlib.sha256()
            for piece in pieces_of(path) if path.is_file() else ():
                digest.update(piece)
            if part != {"partNumber": number, "etag": f'"{part_etag(upload_id, str(number), digest.hexdigest())}"'}:
                raise HubError(400, f"Part {number} is missing or its ETag is wrong.")
        numbers = range(1, len(request.get("parts", [])) + 1)
        try:
            repo.objects.add((piece for one in numbers for piece in pieces_of(parts.path(str(one)))), sha256, size)
        except ValueError as error:
            raise HubError(400, str(error)) from None
    shutil.rmtree(parts.directory, ignore_errors=True)
    exchange.reply_json({"success": True})


def verify(hub: Hub, exchange: Exchange, repo_id: str) -> None:
    """Answer whether an object has arrived."""
    repo, _ = accounts.writable(hub.store, exchange, unquote(repo_id))
    request = exchange.body.json()
    oid = str(request.get("oid"))
    if not _SHA256.fullmatch(oid) or not repo.objects.has(oid):
        raise HubError(404, f"LFS object {oid} is not stored")
    if repo.objects.path(oid).stat().st_size != request.get("size"):
        raise HubError(400, f"LFS object {oid} has another size")
    exchange.reply_json({"success": True}, headers=LFS_JSON)
