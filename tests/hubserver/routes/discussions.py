"""Discussions and pull requests of the test Hub, as far as clients list, open and close them."""

from __future__ import annotations

from typing import Any

from tests.hubserver.hub import Hub
from tests.hubserver.repos import PullRequest, Repo
from tests.hubserver.routes import accounts
from tests.hubserver.wire import Exchange, HubError


def list_all(hub: Hub, exchange: Exchange, repo_id: str) -> None:
    """List pull requests and discussions, page by page."""
    repo = accounts.readable(hub.store, exchange, repo_id)
    kind, status = exchange.query("type"), exchange.query("status")
    found = [
        one
        for one in reversed(repo.pull_requests)
        if kind in ("", "all", "pull_request" if one.is_pull_request else "discussion")
        and status in ("", "all", one.status)
    ]
    start = int(exchange.query("p") or 0) * hub.page_size
    page = [_describe(repo, one) for one in found[start : start + hub.page_size]]
    exchange.reply_json({"discussions": page, "count": len(found), "start": start})


def create(hub: Hub, exchange: Exchange, repo_id: str) -> None:
    """Open a pull request without commits, or a discussion."""
    repo, user = accounts.writable(hub.store, exchange, repo_id)
    request = exchange.body.json()
    is_pull_request = bool(request.get("pullRequest"))
    title, description = str(request.get("title")), str(request.get("description") or "")
    number = repo.open_pull_request(title, description, user.name, "main", None, is_pull_request)
    exchange.reply_json({"num": number, "pullRequest": is_pull_request})


def details(hub: Hub, exchange: Exchange, repo_id: str, number: str) -> None:
    """Describe one of them."""
    repo = accounts.readable(hub.store, exchange, repo_id)
    if not 0 < int(number) <= len(repo.pull_requests):
        raise HubError(404, f"Discussion {number} does not exist")
    one = repo.pull_requests[int(number) - 1]
    answer = _describe(repo, one) | {"events": [], "diff": ""}
    if one.is_pull_request:
        answer |= {"changes": {"base": f"refs/heads/{one.base}"}, "filesWithConflicts": []}
    exchange.reply_json(answer)


def _describe(repo: Repo, one: PullRequest) -> dict[str, Any]:
    return {
        "num": one.num,
        "title": one.title,
        "author": {"name": one.author},
        "createdAt": one.date,
        "status": one.status,
        "repo": {"name": repo.repo_id, "type": "model"},
        "isPullRequest": one.is_pull_request,
    }
