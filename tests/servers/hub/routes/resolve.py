"""Downloads of the test Hub: resolve on the API origin, the bytes of LFS files on the storage origin."""

from __future__ import annotations

import re
from urllib.parse import unquote

from tests.servers.hub.hub import Hub
from tests.servers.hub.repos import Commit, Repo, RevisionNotFoundError
from tests.servers.hub.routes import accounts
from tests.servers.objects import pieces_of
from tests.servers.wire import Exchange, HubError, StorageError

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


def commit_of(repo: Repo, revision: str) -> Commit:
    """Find the commit that a (quoted) revision names.

    Raises:
        HubError: 404 RevisionNotFound.
    """
    try:
        return repo.commit_at(unquote(revision))
    except RevisionNotFoundError:
        raise HubError(404, f"Invalid rev id: {unquote(revision)}", "RevisionNotFound") from None


def resolve(hub: Hub, exchange: Exchange, repo_id: str, revision: str, path: str) -> None:
    """Answer HEAD and GET of /{repo_id}/resolve/{revision}/{path}."""
    repo = accounts.downloadable(hub.store, exchange, unquote(repo_id))
    commit = commit_of(repo, revision)
    entry = commit.files.get(unquote(path))
    headers = {"X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes", "ETag": ""}
    if entry is None:
        raise HubError(404, "Entry not found", "EntryNotFound", X_Repo_Commit=commit.oid)
    headers["ETag"] = f'"{entry.etag}"'
    if entry.is_lfs:
        headers |= {"X-Linked-Size": str(entry.size), "X-Linked-Etag": f'"{entry.etag}"'}
        if (recipe := hub.recipe_of(entry)) is not None:
            headers["X-Xet-Hash"] = recipe.hash
            route = f"{hub.api_origin}/api/models/{repo.repo_id}/xet-read-token/{commit.oid}"
            headers["Link"] = f'<{route}>; rel="xet-auth"'
        headers["Location"] = hub.sign(f"/{repo.repo_id}/{entry.sha256}", "GET")
        exchange.reply(302, b"Found", {"Content-Type": "text/plain", **headers})
    else:
        _send_file(exchange, repo, entry.sha256, entry.size, headers)


def storage_get(hub: Hub, exchange: Exchange, repo_id: str, sha256: str) -> None:
    """Answer HEAD and GET of a signed URL of an LFS file."""
    hub.signer.check(exchange)
    repo = hub.store.get(repo_id)
    if repo is None or not repo.objects.has(sha256):
        raise StorageError(404, "NoSuchKey", "The specified key does not exist.")
    size = repo.objects.path(sha256).stat().st_size
    _send_file(exchange, repo, sha256, size, {"Accept-Ranges": "bytes", "ETag": f'"{sha256}"'})


def range_of(exchange: Exchange, size: int) -> tuple[int, int, int, dict[str, str]]:
    """Find the asked range of so many bytes: where it starts and stops, the answer's status and its headers.

    Raises:
        HubError: 416: There is none such.
    """
    match = _RANGE.fullmatch(exchange.record.range or "")
    if match is None or not any(match.groups()):
        return 0, size, 200, {}
    first, last = match.groups()
    start = int(first) if first else max(0, size - int(last))
    stop = min(size, int(last) + 1) if first and last else size
    if start >= size or start >= stop:
        message = f"Range {exchange.record.range} of {size} bytes is not satisfiable"
        raise HubError(416, message, Content_Range=f"bytes */{size}")
    return start, stop, 206, {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}


def _send_file(exchange: Exchange, repo: Repo, sha256: str, size: int, headers: dict[str, str]) -> None:
    start, stop, status, of_range = range_of(exchange, size)
    headers = {"Content-Type": "application/octet-stream", **headers, **of_range}
    pieces = pieces_of(repo.objects.path(sha256), start, stop - start)
    exchange.stream(status, pieces, stop - start, headers)
