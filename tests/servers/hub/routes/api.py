"""The JSON API of the test Hub about repositories as a whole: who, create, settings, info, trees, history and refs."""

from __future__ import annotations

import hashlib
from typing import Any
from urllib.parse import parse_qs, unquote

from tests.servers.hub.hub import Hub
from tests.servers.hub.repos import Commit, RefExistsError, Repo
from tests.servers.hub.routes import accounts
from tests.servers.hub.routes.pages import page_of
from tests.servers.hub.routes.resolve import commit_of
from tests.servers.objects import Entry, lfs_pointer
from tests.servers.wire import Exchange, HubError

# huggingface_hub asks for it once a day and home directory, whatever it is about to do.
NO_HARNESSES: dict[str, Any] = {"standardEnvVars": [], "harnesses": {}}


def whoami(hub: Hub, exchange: Exchange) -> None:
    """Answer whose token it is."""
    user = accounts.signed_in(exchange)
    token = {"displayName": exchange.record.token, "role": user.role, "createdAt": "2026-01-01T00:00:00.000Z"}
    exchange.reply_json(
        {
            "type": "user",
            "id": hashlib.sha1(user.name.encode()).hexdigest()[:24],
            "name": user.name,
            "fullname": user.name.capitalize(),
            "email": f"{user.name}@example.org",
            "orgs": [{"type": "org", "name": name, "roleInOrg": user.role} for name in user.organizations],
            "auth": {"type": "access_token", "accessToken": token},
        }
    )


def create_repo(hub: Hub, exchange: Exchange) -> None:
    """Make a model repository."""
    user, request = accounts.signed_in(exchange), exchange.body.json()
    _check_is_model(request)
    repo_id = f"{request.get('organization') or user.name}/{request.get('name')}"
    accounts.check_write(user, repo_id.split("/")[0])
    private = bool(request.get("private")) or request.get("visibility") == "private"
    answer = {"url": f"{hub.api_origin}/{repo_id}", "name": repo_id, "id": _id(repo_id)}
    if hub.store.create(repo_id, private=private, gated=False, author=user.name) is None:
        exchange.reply_json({"error": f"You already created this model repo: {repo_id}", **answer}, 409)
    else:
        exchange.reply_json(answer)


def delete_repo(hub: Hub, exchange: Exchange) -> None:
    """Delete a repository."""
    user, request = accounts.signed_in(exchange), exchange.body.json()
    _check_is_model(request)
    repo_id = f"{request.get('organization') or user.name}/{request.get('name')}"
    accounts.writable(hub.store, exchange, repo_id)
    hub.store.delete(repo_id)
    exchange.reply(200, b"OK")


def _check_is_model(request: dict[str, Any]) -> None:
    if request.get("type", "model") not in (None, "model"):
        raise HubError(400, "This test server holds models only.")


def _id(repo_id: str) -> str:
    return hashlib.sha1(repo_id.encode()).hexdigest()[:24]


def validate_yaml(hub: Hub, exchange: Exchange) -> None:
    """Accept the metadata of any README."""
    exchange.body.json()
    exchange.reply_json({"errors": [], "warnings": []})


def harnesses(hub: Hub, exchange: Exchange) -> None:
    """Answer which programs drive clients: none that anyone knows of."""
    exchange.reply_json(NO_HARNESSES)


def info(hub: Hub, exchange: Exchange, repo_id: str, revision: str = "main") -> None:
    """Answer what a repository is and which files a revision has."""
    repo = accounts.readable(hub.store, exchange, repo_id)
    commit = commit_of(repo, revision)
    has_blobs = exchange.flag("blobs")
    facts: dict[str, Any] = {
        "author": repo_id.split("/")[0],
        "sha": commit.oid,
        "lastModified": commit.date,
        "createdAt": repo.created,
        "private": repo.private,
        "gated": "manual" if repo.gated else False,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": [],
        "usedStorage": sum(entry.size for entry in commit.files.values()),
        "siblings": [_sibling(path, entry, has_blobs) for path, entry in sorted(commit.files.items())],
    }
    if wanted := exchange.query_list("expand"):
        facts = {name: fact for name, fact in facts.items() if name in wanted}
    names = {"_id": _id(repo_id), "id": repo_id, "modelId": repo_id}
    exchange.reply_json(names | facts, headers={"X-Repo-Commit": commit.oid})


def _sibling(path: str, entry: Entry, has_blobs: bool) -> dict[str, Any]:
    answer: dict[str, Any] = {"rfilename": path}
    if has_blobs:
        answer |= {"blobId": entry.oid, "size": entry.size}
    if has_blobs and entry.is_lfs:
        answer["lfs"] = {"sha256": entry.sha256, "size": entry.size, "pointerSize": _pointer_bytes(entry)}
    return answer


def _pointer_bytes(entry: Entry) -> int:
    return len(lfs_pointer(entry.sha256, entry.size))


def tree(hub: Hub, exchange: Exchange, repo_id: str, revision: str, path: str = "") -> None:
    """List the files and folders of a revision, page by page."""
    repo = accounts.readable(hub.store, exchange, repo_id)
    commit, folder = commit_of(repo, revision), unquote(path).strip("/")
    listing = _listing(commit)
    if folder and listing.get(folder, 0) is not None:
        raise HubError(404, f"{folder} does not exist on {unquote(revision)!r}", "EntryNotFound")
    prefix = f"{folder}/" if folder else ""
    names = [name for name in sorted(listing) if name.startswith(prefix)]
    if not exchange.flag("recursive"):
        names = [name for name in names if "/" not in name[len(prefix) :]]
    page, headers = page_of(hub, exchange, names, ("recursive", "expand", "limit"))
    headers["X-Repo-Commit"] = commit.oid
    exchange.reply_json(_describe(hub, commit, listing, page, exchange.flag("expand")), headers=headers)


def paths_info(hub: Hub, exchange: Exchange, repo_id: str, revision: str) -> None:
    """Describe those of the asked paths that are there."""
    repo = accounts.readable(hub.store, exchange, repo_id)
    commit = commit_of(repo, revision)
    if "json" in exchange.headers.get("Content-Type", ""):
        request = exchange.body.json()
        paths, is_expanded = list(request.get("paths", [])), bool(request.get("expand"))
    else:
        form = parse_qs(exchange.body.read().decode())
        paths, is_expanded = form.get("paths", []), form.get("expand", [""])[0].lower() in ("1", "true")
    listing = _listing(commit)
    exchange.reply_json(_describe(hub, commit, listing, [path for path in paths if path in listing], is_expanded))


def _listing(commit: Commit) -> dict[str, Entry | None]:
    """Map every file to its entry, and every folder to None."""
    listing: dict[str, Entry | None] = dict(commit.files)
    for path in commit.files:
        while path := path.rpartition("/")[0]:
            listing[path] = None
    return listing


def _describe(
    hub: Hub, commit: Commit, listing: dict[str, Entry | None], paths: list[str], is_expanded: bool
) -> list[dict[str, Any]]:
    answers = []
    for path in paths:
        entry = listing[path]
        if entry is None:
            inside = sorted(f"{name} {one.oid}" for name, one in commit.files.items() if name.startswith(f"{path}/"))
            oid = hashlib.sha1("\n".join(inside).encode()).hexdigest()
            answer: dict[str, Any] = {"type": "directory", "oid": oid, "size": 0, "path": path}
        else:
            answer = {"type": "file", "oid": entry.oid, "size": entry.size, "path": path}
            if entry.is_lfs:
                answer["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": _pointer_bytes(entry)}
            if (recipe := hub.recipe_of(entry)) is not None:
                answer["xetHash"] = recipe.hash
        if is_expanded:
            # The last commit of the revision, not of the file: a test server needs no blame.
            answer["lastCommit"] = {"id": commit.oid, "title": commit.title, "date": commit.date}
        answers.append(answer)
    return answers


def commits(hub: Hub, exchange: Exchange, repo_id: str, revision: str) -> None:
    """List the history of a revision, newest first, page by page."""
    repo = accounts.readable(hub.store, exchange, repo_id)
    history = repo.commits(commit_of(repo, revision).oid)
    number = int(exchange.query("p") or 0)
    page, headers = history[number * hub.page_size :][: hub.page_size], {"X-Total-Count": str(len(history))}
    if (number + 1) * hub.page_size < len(history):
        headers["Link"] = f'<{hub.api_origin}{exchange.path}?p={number + 1}>; rel="next"'
    answers = [
        {
            "id": one.oid,
            "title": one.title,
            "message": one.description,
            "authors": [{"user": one.author}],
            "date": one.date,
            "parents": list(one.parents),
        }
        for one in page
    ]
    exchange.reply_json(answers, headers=headers)


def refs(hub: Hub, exchange: Exchange, repo_id: str) -> None:
    """List branches, tags and (asked with include_prs) pull requests."""
    repo = accounts.readable(hub.store, exchange, repo_id)
    answer: dict[str, Any] = {
        "branches": [_ref(name, f"refs/heads/{name}", oid) for name, oid in repo.branches.items()],
        "converts": [],
        "tags": [_ref(name, f"refs/tags/{name}", oid) for name, oid in repo.tags.items()],
    }
    if exchange.flag("include_prs"):
        pulls = {f"refs/pr/{one.num}": one.head for one in repo.pull_requests}
        answer["pullRequests"] = [_ref(name, name, head) for name, head in pulls.items()]
    exchange.reply_json(answer)


def _ref(name: str, ref: str, oid: str) -> dict[str, str]:
    return {"name": name, "ref": ref, "targetCommit": oid}


def create_branch(hub: Hub, exchange: Exchange, repo_id: str, name: str) -> None:
    """Make a branch at `startingPoint`, or at main."""
    repo, _ = accounts.writable(hub.store, exchange, repo_id)
    start = str(exchange.body.json().get("startingPoint") or "main")
    _add_ref(repo, "branches", unquote(name), commit_of(repo, start).oid)
    exchange.reply_json({"success": True}, 201)


def create_tag(hub: Hub, exchange: Exchange, repo_id: str, name: str) -> None:
    """Tag the revision that the URL names."""
    repo, _ = accounts.writable(hub.store, exchange, repo_id)
    _add_ref(repo, "tags", str(exchange.body.json().get("tag")), commit_of(repo, name).oid)
    exchange.reply_json({"success": True}, 201)


def _add_ref(repo: Repo, refs: str, name: str, oid: str) -> None:
    try:
        repo.set_ref(refs, name, oid)
    except RefExistsError:
        raise HubError(409, f"Reference already exists: {name}") from None


def discussions(hub: Hub, exchange: Exchange, repo_id: str) -> None:
    """List pull requests, page by page: there are no other discussions."""
    repo = accounts.readable(hub.store, exchange, repo_id)
    found = [one for one in reversed(repo.pull_requests) if exchange.query("status") in ("", "all", one.status)]
    start = int(exchange.query("p") or 0) * hub.page_size
    page = [
        {
            "num": one.num,
            "title": one.title,
            "author": {"name": one.author},
            "createdAt": one.date,
            "status": one.status,
            "repo": {"name": repo.repo_id, "type": "model"},
            "isPullRequest": True,
        }
        for one in found[start : start + hub.page_size]
    ]
    exchange.reply_json({"discussions": page, "count": len(found), "start": start})


def xet_token(hub: Hub, exchange: Exchange, repo_id: str, scope: str) -> None:
    """Give a token for Xet's store, or say that there is none, as a Hub without it does."""
    if not hub.has_xet:
        raise HubError(404, "Sorry, we can't find the page you are looking for.")
    if scope == "write":
        accounts.writable(hub.store, exchange, repo_id)
    else:
        accounts.downloadable(hub.store, exchange, repo_id)
    hub.reply_xet_token(exchange, scope)
