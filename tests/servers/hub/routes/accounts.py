"""Who may do what on the test Hub: tokens, users, and the answers to those who may not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from tests.servers.hub.repos import Repo, RepoStore
from tests.servers.wire import Exchange, HubError


@dataclass(frozen=True, slots=True)
class User:
    """The owner of a token."""

    name: str
    role: str
    """The token's role: `"write"` or `"read"`."""
    organizations: tuple[str, ...] = ()

    def owns(self, namespace: str) -> bool:
        """Say whether repositories of this namespace are theirs."""
        return namespace == self.name or namespace in self.organizations


TOKENS = {
    "hf_write": User("alice", "write", ("org",)),
    "hf_read": User("bob", "read"),
    # A member of the organization whose token only reads: sees private repositories, writes nothing.
    "hf_member": User("carol", "read", ("org",)),
}

INVALID_TOKEN = "Invalid username or password."
NEED_WRITE = "You must use a write token to upload to a repository."


def user_of(exchange: Exchange) -> User | None:
    """Find who sent the request; None: anonymous.

    Raises:
        HubError: 401: nobody has this token.
    """
    token = exchange.record.token
    if token is None:
        return None
    if token not in TOKENS:
        raise HubError(401, INVALID_TOKEN, WWW_Authenticate='Bearer realm="Authentication required", charset="UTF-8"')
    return TOKENS[token]


def signed_in(exchange: Exchange) -> User:
    """Find who sent the request.

    Raises:
        HubError: 401: nobody did, or nobody has this token.
    """
    user = user_of(exchange)
    if user is None:
        raise HubError(401, INVALID_TOKEN)
    return user


class Owned(Protocol):
    """A repository or a bucket."""

    private: bool


Found = TypeVar("Found", bound=Owned, covariant=True)


class Store(Protocol[Found]):
    """Repositories or buckets."""

    def get(self, name: str, /) -> Found | None:
        """Find one by its ID."""


def readable(store: Store[Found], exchange: Exchange, name: str) -> Found:
    """Find a repository or a bucket for someone who only looks.

    Raises:
        HubError: 404: no such repository that they may see (401 to the anonymous, as on the Hub).
    """
    user, found = user_of(exchange), store.get(name)
    if found is not None and (not found.private or (user is not None and user.owns(name.split("/")[0]))):
        return found
    if user is None:
        # The real Hub sends no code with its 401, and clients guess "no such repository" from the https URL.
        raise HubError(401, INVALID_TOKEN, "RepoNotFound")
    raise HubError(404, "Repository not found", "RepoNotFound")


def downloadable(store: RepoStore, exchange: Exchange, repo_id: str) -> Repo:
    """Find a repository for someone who wants its files.

    Raises:
        HubError: As `readable`; 403 (401 to the anonymous): it is gated.
    """
    repo, user = readable(store, exchange, repo_id), user_of(exchange)
    if not repo.gated or (user is not None and user.owns(repo_id.split("/")[0])):
        return repo
    if user is None:
        rest = "You must have access to it and be authenticated to access it. Please log in."
        raise HubError(401, f"Access to model {repo_id} is restricted. {rest}", "GatedRepo")
    rest = "and you are not in the authorized list. Visit the model's page to ask for access."
    raise HubError(403, f"Access to model {repo_id} is restricted {rest}", "GatedRepo")


def writable(store: Store[Found], exchange: Exchange, name: str) -> tuple[Found, User]:
    """Find a repository or a bucket for someone who wants to change it.

    Raises:
        HubError: As `readable`; 401: anonymous; 403: their token or they may not write.
    """
    found = readable(store, exchange, name)
    user = signed_in(exchange)
    check_write(user, name.split("/")[0])
    return found, user


def check_write(user: User, namespace: str) -> None:
    """Refuse a token that may not write to a namespace.

    Raises:
        HubError: 403.
    """
    if user.role != "write":
        raise HubError(403, NEED_WRITE)
    if not user.owns(namespace):
        raise HubError(403, f"You don't have the rights to create or change a model under the namespace {namespace!r}.")
