"""A bucket and the clients that reach it, with what holds for its service; and the errors in that service's words."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from obstore.exceptions import BaseError

from hfshard._util.threads import ProcessLock
from hfshard.errors import StoreAccessError, StoreConnectionError, StoreError, StoreNotFoundError
from hfshard.stores.objects.failures import Failure
from hfshard.stores.patience import first_wait, retry_seconds, stall_seconds

if TYPE_CHECKING:
    from obstore.store import AzureStore, BackoffConfig, ClientConfig, GCSStore, RetryConfig, S3Store

    Client = S3Store | GCSStore | AzureStore

_FORBIDDEN: Final = frozenset({"AccessDenied", "AuthorizationFailure", "AuthorizationPermissionMismatch"})
_EXPIRED: Final = frozenset({"ExpiredToken", "TokenRefreshRequired"})
_UNKNOWN_KEY: Final = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthenticationFailed", "InvalidAuthenticationInfo"}
)
_LONGEST_BACKOFF: Final = timedelta(seconds=15)
_CONNECT: Final = timedelta(seconds=10)
_WHOLE_DAY: Final = timedelta(days=1)
_RETRIES: Final = 10
"""Of a part, at most."""
_UPLOAD_STALLS: Final = 10
"""A part may take this many stalls: 256 MiB under way on a line of 4 Mbit/s take nine minutes."""


@dataclass(frozen=True, slots=True)
class Service:
    """What holds for a kind of store."""

    title: str
    deletes_together: int
    """How many objects one request deletes."""
    log_in: str
    """What to do where there are no credentials."""
    who_am_i: str
    """The command that shows whose credentials they are."""
    permissions: str
    """What saving, loading and cleaning up need."""
    make_bucket: str
    """The command that makes a bucket; {0} is its address, {1} its name."""
    other_checksums: str = ""
    """What to set for a service that does not know the checksum of requests; empty where they have none."""


@dataclass(slots=True)
class Connection:
    """The clients of one bucket; threads share them, forked children can't."""

    service: Service
    address: str
    """Of the bucket, for messages."""
    quick: Client = field(repr=False)
    """For all but uploads: it does not try again, and gives up when the service is silent."""
    uploads: Client = field(repr=False)
    """For bodies that take long: it tries parts again, and knows no silence while one is sent."""
    sweep: Callable[[str, Callable[[str], bool]], int] | None = field(repr=False)
    """Aborts the unfinished uploads below a prefix whose names are to go; None: the service does it, or nobody can."""
    bucket: str
    copy_pinned: Callable[[str, str, int, str], str | None] | None = field(default=None, repr=False)
    """Copies an object that still has an ETag: key, ETag, bytes, and the key of the copy, whose ETag it returns; None:
    it has another one. None for services whose copies by obstore are compared afterwards."""
    delete_together: Callable[[list[str]], bool] | None = field(default=None, repr=False)
    """Deletes several objects by one request; False: not all of them, or nobody knows. None: the clients do so."""
    elsewhere: Callable[[str], Connection | None] | None = field(default=None, repr=False)
    """Finds the bucket's own region, given it or "", and connects there; None: it is where it was asked. Of services
    whose buckets are asked in their regions, until it was called."""
    _moves: int = field(default=0, repr=False)
    """How often the clients were replaced by those for another region."""
    _moving: ProcessLock = field(default_factory=lambda: ProcessLock(), repr=False)

    def follower(self) -> Callable[[Failure], bool]:
        """Return what tells, after a failure of a request that begins now, whether to send it to another region.

        It looks for the bucket's region the first time that this may be why a request failed.
        """
        moves = self._moves

        def follow(failure: Failure) -> bool:
            nonlocal moves
            if not failure.may_be_elsewhere:
                return False
            with self._moving.held():
                if moves == self._moves and self.elsewhere is not None:
                    self._move_to(self.elsewhere(failure.region))
                has_moved = moves != self._moves
                moves = self._moves
                return has_moved

        return follow

    def _move_to(self, other: Connection | None) -> None:
        self.elsewhere = None
        if other is not None:
            self.quick, self.uploads = other.quick, other.uploads
            self.sweep, self.copy_pinned = other.sweep, other.copy_pinned
            self._moves += 1

    def check_process(self) -> None:
        """Refuse to go on in a forked child of a process that used a store: the request would hang.

        The threads of obstore's runtime are not in the child, and it can't make new ones. A child of a process that
        has only opened stores, or not even that, goes on.

        Raises:
            StoreError: An ancestor of this process has sent requests.
        """
        global _user
        if _user is None:
            _user = os.getpid()
        elif _user != os.getpid():
            raise StoreError(
                f"{self.address} can't be reached from a process that was forked from one that had used a store: the "
                "client's threads are not in it. Start such processes by 'spawn' or 'forkserver'."
            )


_user: int | None = None
"""The process that has sent requests, or an ancestor of this one that has."""


def make_clients(
    make: Callable[[ClientConfig, RetryConfig], Client],
    service: Service,
    address: str,
    *,
    allow_http: bool,
    authority: bytes | None = None,
) -> tuple[Client, Client]:
    """Make `Connection.quick` and `Connection.uploads`.

    Args:
        make: Of a bucket, with its settings.
        service: Whose.
        address: Of the bucket.
        allow_http: Whether the endpoint that the user has set is one without encryption.
        authority: The certificates to trust, besides the system's.

    Raises:
        StoreAccessError: obstore refuses the settings.
    """
    stall = timedelta(seconds=stall_seconds() or 1)
    common: ClientConfig = {"allow_http": allow_http, "connect_timeout": min(stall, _CONNECT)}
    if authority is not None:
        common["root_certificate"] = authority
    backoff: BackoffConfig = {"init_backoff": timedelta(seconds=first_wait()), "max_backoff": _LONGEST_BACKOFF}
    retries: RetryConfig = {
        "max_retries": _RETRIES,
        "retry_timeout": timedelta(seconds=retry_seconds()),
        "backoff": backoff,
    }
    try:
        quick = make({**common, "timeout": _WHOLE_DAY, "read_timeout": stall}, {"max_retries": 0})
        uploads = make({**common, "timeout": _UPLOAD_STALLS * stall}, retries)
    except (BaseError, ValueError):  # without its words, which may hold a key
        raise StoreAccessError(
            f"The settings for {address} can't be used: a key, an endpoint or a certificate among them is not valid. "
            f"{service.log_in}",
            path=address,
        ) from None
    return quick, uploads


def refusal(service: Service, bucket: str, where: str, failure: Failure) -> StoreError:
    """The error for a request that failed for good, in words that say what to do.

    Args:
        service: Of the bucket.
        bucket: Its address.
        where: The address of the object or folder that was asked for.
        failure: Neither an object that is missing nor a condition that does not hold.
    """
    if failure.no_bucket:
        return StoreNotFoundError(
            f"There is no {bucket}, or these credentials may not see it. Check the name, or make it with "
            f"'{service.make_bucket.format(bucket, bucket.partition('://')[2])}'.",
            path=where,
        )
    if failure.clock_is_off:
        return StoreAccessError(
            f"{service.title} refuses requests for {where}: this machine's clock is too far off. Set it, such as with "
            "'timedatectl set-ntp true'.",
            path=where,
        )
    if failure.no_credentials:
        return StoreAccessError(f"There are no credentials for {where}. {service.log_in}", path=where)
    if failure.code in _EXPIRED:
        return StoreAccessError(f"The credentials for {where} have expired. {service.log_in}", path=where)
    said = ", ".join(str(word) for word in (failure.status, failure.code, failure.message) if word)
    if failure.code in _UNKNOWN_KEY or failure.status == 401:
        return StoreAccessError(
            f"{service.title} does not accept the credentials for {where} ({said}). Look whose they are with "
            f"'{service.who_am_i}'. {service.log_in}",
            path=where,
        )
    if failure.status == 403 or failure.code in _FORBIDDEN:
        return StoreAccessError(
            f"{service.title} does not permit this request for {where} ({said}). Loading and saving need "
            f"{service.permissions}; '{service.who_am_i}' shows who asked.",
            path=where,
        )
    if failure.wrong_region:
        own = failure.region or "its own ('aws s3api head-bucket' shows it)"
        return StoreError(f"{bucket} is in another region. Set AWS_REGION to {own}.", path=where)
    if failure.transport:
        how = {"Connect": "can't be reached", "Timeout": "stopped answering"}.get(failure.transport, "broke off")
        return StoreConnectionError(
            f"{service.title} {how} while it was asked for {where}. Check the network and endpoint, then try again.",
            path=where,
        )
    if failure.is_unknown_checksum and service.other_checksums:
        return StoreError(
            f"The service of {where} does not know the checksum that hfshard sends ({said}). {service.other_checksums}",
            path=where,
        )
    if failure.is_unknown_request:
        return StoreError(
            f"The service of {where} does not know this request ({said}), so that trying again does not help. Check "
            f"that its endpoint speaks {service.title}; then update the service, or use another one.",
            path=where,
        )
    advice = "Rename or remove it" if "with invalid path" in failure.message else "Try again later"
    return StoreError(f"{service.title} failed for {where}: {said}. {advice}.", path=where)
