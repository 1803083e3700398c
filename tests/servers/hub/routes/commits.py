"""Hub commits over the wire: preupload, and the NDJSON that becomes one commit."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any
from urllib.parse import unquote

from tests.servers.hub.hub import Hub
from tests.servers.hub.repos import Commit, Repo, StaleParentError, check_path
from tests.servers.hub.routes import accounts
from tests.servers.hub.routes.resolve import commit_of
from tests.servers.objects import Entry, lfs_entry
from tests.servers.wire import Exchange, HubError

STALE = "A commit has happened since. Please refresh and try again."
# A regular file of 10 MB in base64, and room: a line that is longer belongs into LFS.
MAX_LINE_BYTES = 16 * 1024 * 1024
# The Hub refuses a preupload of more files than clients ask at once.
MAX_PREUPLOAD_FILES = 256


def preupload(hub: Hub, exchange: Exchange, repo_id: str, revision: str) -> None:
    """Answer which files are to go through LFS, which are ignored, and what is there now."""
    repo, _ = accounts.writable(hub.store, exchange, repo_id)
    commit, request = commit_of(repo, revision), exchange.body.json()
    ignore = request.get("gitIgnore")
    if ignore is None and ".gitignore" in commit.files:
        ignore = repo.objects.path(commit.files[".gitignore"].sha256).read_text()
    patterns = [line.strip() for line in (ignore or "").splitlines() if line.strip() and line[0] != "#"]
    if len(request.get("files", [])) > MAX_PREUPLOAD_FILES:
        raise HubError(400, f"More than {MAX_PREUPLOAD_FILES} files in a preupload")
    answers = []
    for file in request.get("files", []):
        path, size = str(file["path"]), int(file["size"])
        current = commit.files.get(path)
        answers.append(
            {
                "path": path,
                "uploadMode": hub.upload_mode(path, size),
                "shouldIgnore": any(_is_ignored(path, pattern) for pattern in patterns),
                "oid": current.etag if current is not None else None,
            }
        )
    exchange.reply_json({"files": answers, "commitOid": commit.oid})


def _is_ignored(path: str, pattern: str) -> bool:
    names = path.split("/")
    return fnmatch(path, pattern) or any(fnmatch(name, pattern.strip("/")) for name in names)


def commit(hub: Hub, exchange: Exchange, repo_id: str, revision: str) -> None:
    """Make one Hub commit, on a branch, on a pull request, or as a new pull request."""
    repo, user = accounts.writable(hub.store, exchange, repo_id)
    name, header = unquote(revision), {}
    base = commit_of(repo, revision)
    changes: dict[str, Entry | None] = {}
    operations = 0
    for key, value in _operations(exchange):
        if key == "header":
            header = value
            _check_parent(repo, name, header.get("parentCommit"))
            continue
        operations += 1
        if operations > hub.max_commit_files:
            raise HubError(400, f"A commit holds at most {hub.max_commit_files} operations; this one has more.")
        _apply(hub, repo, base, changes, key, value)
    if not header.get("summary"):
        raise HubError(400, "The commit has no header with a summary")
    _check_no_file_is_a_folder(
        {path for path in base.files if path not in changes} | {p for p, e in changes.items() if e}
    )
    if name.removeprefix("refs/heads/") not in repo.branches and not name.startswith("refs/pr/"):
        raise HubError(400, f"{name} is not a branch; a commit goes on a branch or a pull request.")
    title, description = str(header["summary"]), str(header.get("description") or "")
    is_new = exchange.flag("create_pr")
    try:
        oid, number = repo.add_commit(name, changes, title, description, user.name, header.get("parentCommit"), is_new)
    except StaleParentError:
        raise HubError(412, STALE) from None
    answer: dict[str, Any] = {
        "success": True,
        "commitOid": oid,
        "commitUrl": f"{hub.api_origin}/{repo_id}/commit/{oid}",
        "hookOutput": "",
    }
    if number is not None:
        answer["pullRequestUrl"] = f"{hub.api_origin}/{repo_id}/discussions/{number}"
    exchange.reply_json(answer)


def _operations(exchange: Exchange) -> Iterator[tuple[str, dict[str, Any]]]:
    rest = b""
    for piece in exchange.body.pieces():
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise HubError(413, "A file in the commit is too large; upload it through LFS.")
        yield from map(_operation, filter(None, lines))
    if rest.strip():
        yield _operation(rest)


def _operation(line: bytes) -> tuple[str, dict[str, Any]]:
    try:
        data = json.loads(line)
        return data["key"], dict(data["value"])
    except (ValueError, KeyError, TypeError):
        raise HubError(400, "A line of the commit is not an operation") from None


def _check_parent(repo: Repo, name: str, parent: str | None) -> None:
    # Said early, before any file is stored; the commit itself checks again, under the lock.
    if parent is not None and repo.resolve(name) != parent:
        raise HubError(412, STALE)


def _apply(
    hub: Hub, repo: Repo, base: Commit, changes: dict[str, Entry | None], key: str, value: dict[str, Any]
) -> None:
    try:
        path = check_path(str(value["path"]).rstrip("/") if key == "deletedFolder" else str(value["path"]))
    except (KeyError, ValueError) as error:
        raise HubError(400, str(error)) from None
    if key == "file":
        changes[path] = repo.objects.add_regular(_content(value))
    elif key == "lfsFile":
        oid = str(value.get("oid"))
        if not repo.objects.has(oid):
            _take_from_xet(hub, repo, oid)
        if value.get("algo") != "sha256" or not repo.objects.has(oid):
            raise HubError(400, f"LFS pointer of {path} points to {oid}, which is not stored: upload it first.")
        size = repo.objects.path(oid).stat().st_size
        if value.get("size", size) != size:
            raise HubError(400, f"LFS pointer of {path} says {value['size']} bytes; {size} are stored.")
        changes[path] = lfs_entry(oid, size)
    elif key == "deletedFile":
        if changes.get(path, base.files.get(path)) is None:
            raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        changes[path] = None
    elif key == "deletedFolder":
        inside = [one for one in {**base.files, **changes} if one.startswith(f"{path}/")]
        if not inside:
            raise HubError(404, f"A folder with this name doesn't exist: {path}", "EntryNotFound")
        changes.update(dict.fromkeys(inside))
    else:
        raise HubError(400, f"Unknown operation {key!r}")


def _take_from_xet(hub: Hub, repo: Repo, sha256: str) -> None:
    recipe = hub.cas.by_sha256(sha256) if hub.has_xet else None
    if recipe is None:
        return
    try:
        repo.objects.add(hub.cas.pieces(recipe, 0, recipe.size), sha256, recipe.size)
    except ValueError as error:
        raise HubError(400, str(error)) from None


def _content(value: dict[str, Any]) -> bytes:
    content = str(value.get("content", ""))
    if value.get("encoding") != "base64":
        return content.encode()
    try:
        return base64.b64decode(content, validate=True)
    except ValueError:
        raise HubError(400, "The content of a file is not base64") from None


def _check_no_file_is_a_folder(paths: set[str]) -> None:
    for path in paths:
        while path := path.rpartition("/")[0]:
            if path in paths:
                raise HubError(400, f"{path} can't be a file and a folder")
