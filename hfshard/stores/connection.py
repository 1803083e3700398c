"""Clients of one bucket: properties of its service, the meaning of its failures, and retries."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeVar

from obstore.exceptions import AlreadyExistsError, BaseError, NotModifiedError, PreconditionError

from hfshard._util.text import without_url_secrets
from hfshard._util.threads import ForkSafeLock, result_unless_cancelled, start_worker
from hfshard.errors import StoreAccessError, StoreConnectionError, StoreError, StoreNotFoundError
from hfshard.stores.retry import Retry, idle_timeout, initial_backoff, retry_seconds

if TYPE_CHECKING:
    from obstore.store import AzureStore, BackoffConfig, ClientConfig, GCSStore, RetryConfig, S3Store

    Client = S3Store | GCSStore | AzureStore


_FORBIDDEN: Final = frozenset({"AccessDenied", "AuthorizationFailure", "AuthorizationPermissionMismatch"})
_EXPIRED: Final = frozenset({"ExpiredToken", "TokenRefreshRequired"})
_UNKNOWN_KEY: Final = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthenticationFailed", "InvalidAuthenticationInfo"}
)
_CONNECT: Final = timedelta(seconds=10)
_WHOLE_DAY: Final = timedelta(days=1)
_RETRIES: Final = 10
"""The most retries of a part."""
_UPLOAD_STALLS: Final = 10
"""Time limit of a part, as a multiple of the stall time: 256 MiB in flight at 4 Mbit/s take nine minutes."""


@dataclass(frozen=True, slots=True)
class Service:
    """Properties of a kind of store."""

    title: str
    deletes_together: int
    """The most objects that one request deletes."""
    log_in: str
    """Advice for a user without credentials."""
    identity_hint: str
    """Command that shows whose credentials are in use."""
    permissions: str
    """Permissions that saving, loading and cleaning up need."""
    make_bucket: str
    """Command that creates a bucket; {0} is its address, {1} its name."""
    other_checksums: str = ""
    """Advice for a service that does not know the checksum of requests; empty if requests have none."""


@dataclass(slots=True)
class Connection:
    """Clients of one bucket. Threads share them; forked children cannot use them."""

    service: Service
    address: str
    """The bucket's address, for messages."""
    quick: Client = field(repr=False)
    """Client for everything but uploads: it does not retry, and gives up when the service is silent."""
    uploads: Client = field(repr=False)
    """Client for large bodies: it retries parts, and has no stall limit while one is sent."""
    sweep: Callable[[str, Callable[[str], bool]], int] | None = field(repr=False)
    """Abort the unfinished uploads below a prefix whose names are selected; None: the service does so, or it is
    impossible."""
    bucket: str
    copy_pinned: Callable[[str, str, int, str], str | None] | None = field(default=None, repr=False)
    """Copy an object if it still has an ETag. Takes key, ETag, size and the copy's key; returns the copy's ETag, or
    None if the object has another one. None for services whose copies by obstore are compared afterwards."""
    delete_together: Callable[[list[str]], bool] | None = field(default=None, repr=False)
    """Delete several objects by one request; False: not all of them, or unknown. None: the clients delete them."""
    elsewhere: Callable[[str], Connection | None] | None = field(default=None, repr=False)
    """Find the bucket's own region, given it or "", and connect there; returns None if it is the current one. Set until
    its first call, for services whose buckets must be addressed in their own region."""
    _moves: int = field(default=0, repr=False)
    """Number of times that the clients were replaced by those for another region."""
    _moving: ForkSafeLock = field(default_factory=lambda: ForkSafeLock(), repr=False)

    def follower(self) -> Callable[[Failure], bool]:
        """Return a function for a request that begins now: after a failure, it decides whether to try another region.

        It looks up the bucket's region the first time that the region may be why a request failed.
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
        """Reject a request in a forked child of a process that has used a store, since it would hang.

        The threads of obstore's runtime are not in the child, and it cannot start new ones. A child of a process that
        has sent no request, even if it has opened stores, can continue.

        Raises:
            StoreError: An ancestor of this process has sent requests.
        """
        global _user
        if _user is None:
            _user = os.getpid()
        elif _user != os.getpid():
            raise StoreError(
                f"Cannot reach {self.address} from a process that was forked from one that had used a store: it "
                "lacks the client's threads. Start such processes with 'spawn' or 'forkserver'."
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
    """Create `Connection.quick` and `Connection.uploads`, each by calling `make` with its settings.

    Args:
        make, service, address: The constructor, and the bucket's service and address.
        allow_http: Whether the endpoint that the user has set is unencrypted.
        authority: Certificates to trust in addition to the system's.

    Raises:
        StoreAccessError: obstore rejects the settings.
    """
    stall = timedelta(seconds=idle_timeout() or 1)
    common: ClientConfig = {"allow_http": allow_http, "connect_timeout": min(stall, _CONNECT)}
    if authority is not None:
        common["root_certificate"] = authority
    backoff: BackoffConfig = {
        "init_backoff": timedelta(seconds=initial_backoff()),
        "max_backoff": timedelta(seconds=_LONGEST_WAIT),
    }
    retries: RetryConfig = {
        "max_retries": _RETRIES,
        "retry_timeout": timedelta(seconds=retry_seconds()),
        "backoff": backoff,
    }
    try:
        quick = make({**common, "timeout": _WHOLE_DAY, "read_timeout": stall}, {"max_retries": 0})
        uploads = make({**common, "timeout": _UPLOAD_STALLS * stall}, retries)
    except (BaseError, ValueError):  # without its message, which may contain a key
        raise StoreAccessError(
            f"Cannot use the settings for {address}: a key, an endpoint or a certificate is not valid. "
            f"{service.log_in}",
            path=address,
        ) from None
    return quick, uploads


def refusal(service: Service, bucket: str, where: str, failure: Failure) -> StoreError:
    """Build the error for a request that failed permanently, with advice on what to do.

    Args:
        service, bucket, where: The service, the bucket's address, and that of the requested object or folder.
        failure: The failure; neither a missing object nor a condition that does not hold.
    """
    if failure.no_bucket:
        return StoreNotFoundError(
            f"There is no {bucket}, or it is not visible with these credentials. Check the name, or create it with "
            f"'{service.make_bucket.format(bucket, bucket.partition('://')[2])}'.",
            path=where,
        )
    if failure.clock_is_off:
        return StoreAccessError(
            f"{service.title} refused the request for {where}: this machine's clock is too far off. Set it, for "
            "example with 'timedatectl set-ntp true'.",
            path=where,
        )
    if failure.no_credentials:
        return StoreAccessError(f"There are no credentials for {where}. {service.log_in}", path=where)
    if failure.code in _EXPIRED:
        return StoreAccessError(f"The credentials for {where} have expired. {service.log_in}", path=where)
    said = ", ".join(str(word) for word in (failure.status, failure.code, failure.message) if word)
    if failure.code in _UNKNOWN_KEY or failure.status == 401:
        return StoreAccessError(
            f"{service.title} did not accept the credentials for {where} ({said}). Check whose they are with "
            f"'{service.identity_hint}'. {service.log_in}",
            path=where,
        )
    if failure.status == 403 or failure.code in _FORBIDDEN:
        return StoreAccessError(
            f"{service.title} denied the request for {where} ({said}). Loading and saving require "
            f"{service.permissions}; '{service.identity_hint}' shows whose credentials were used.",
            path=where,
        )
    if failure.wrong_region:
        own = failure.region or "its own ('aws s3api head-bucket' shows it)"
        return StoreError(f"{bucket} is in another region. Set AWS_REGION to {own}.", path=where)
    if failure.transport:
        how = {"Connect": "could not be reached", "Timeout": "stopped responding"}.get(
            failure.transport, "dropped the connection"
        )
        return StoreConnectionError(
            f"{service.title} {how} during a request for {where}. Check the network and endpoint, then try again.",
            path=where,
        )
    if failure.is_unknown_checksum and service.other_checksums:
        return StoreError(
            f"The service of {where} does not support the checksum that hfshard sends ({said}). "
            f"{service.other_checksums}",
            path=where,
        )
    if failure.is_unknown_request:
        return StoreError(
            f"The service of {where} does not support this request ({said}), so retrying will not help. Check that "
            f"its endpoint supports {service.title}; then update the service, or use another one.",
            path=where,
        )
    advice = "Rename or remove it" if "with invalid path" in failure.message else "Try again later"
    return StoreError(f"{service.title} failed for {where}: {said}. {advice}.", path=where)


# The contents of obstore's exceptions, as numbers and words that can be compared and shown.


OBSTORE_ERRORS: Final = (BaseError, FileNotFoundError)
"""Exceptions that obstore raises when a request fails."""

_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>\s*([A-Za-z0-9]+)\s*</Code>|\(code: ([A-Za-z0-9]+)\)")
"""The code in a response, or of one of many objects to delete."""
_MESSAGE: Final = re.compile(r"<Message>([^\n<]{1,300})")
_TRANSPORT: Final = re.compile(r"kind: (Connect|Request|Timeout|Interrupted|Unknown|Decode)\b")
_SECRET: Final = re.compile(r"(?i)\b(sig|signature|token|key|secret|credential)s?\s*[=:]\s*\S+|\?\S+")
_DEBUG: Final = "\n\nDebug source:\n"
"""Start of obstore's second print of the error, in Rust's debug format."""

_TRANSIENT: Final = frozenset({408, 429, 500, 502, 503, 504})
_SLOW_DOWN: Final = frozenset({429, 503})
_BUSY: Final = frozenset({"SlowDown", "ServiceUnavailable", "InternalError", "ServerBusy", "RequestTimeout"})
"""Codes that also come with other statuses: to S3, a body that arrives too slowly is a bad request."""
_COLLISIONS: Final = frozenset({"ConditionalRequestConflict", "OperationAborted"})
"""S3's codes for two simultaneous requests, neither of which was refused for its condition."""
_CLOCK: Final = ("RequestTimeTooSkewed", "RequestExpired", "Request date header too old", "in a reasonable timeframe")
"""Words used by S3, Azure and Google's token service."""
_UNKNOWN_REQUEST: Final = frozenset(
    {"NotImplemented", "UnsupportedHeader", "UnsupportedQueryParameter", "UnsupportedHttpVerb"}
)
"""Codes that S3, Google and Azure use for a request or header that the service does not know."""
_NOT_IMPLEMENTED: Final = 501
_REGION: Final = re.compile(r"<Region>([a-z0-9-]{1,63})</Region>")
_CHECKSUM: Final = re.compile(r"(?i)checksum|crc-?64")
"""Words of responses about the algorithm, such as "Header 'x-amz-checksum-algorithm' ... not implemented" (R2),
"Unsupported header 'x-amz-checksum-...'" (B2) and "Invalid checksum provided" (older versions of MinIO)."""
_MISMATCH: Final = re.compile(r"(?i)match|digest")
"""Words of the messages or codes for bytes that do not have the checksum that was sent."""
_NO_BUCKET: Final = frozenset({"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"})
_OTHER_REGION: Final = frozenset(
    {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
)
_NO_TOKEN: Final = (
    "Error performing token request",
    "'az account get-access-token' command failed",
    "Error reading federated token file",
    "External AWS credential provider",
    "External GCP credential provider",
)
"""obstore's messages for credentials that it could not get."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Details of a failed request."""

    status: int | None = None
    """The HTTP status; None if there was no response, or no readable one."""
    code: str = ""
    """The service's own code, such as "AccessDenied"; empty if it gave none."""
    message: str = ""
    """The service's message, or the client's if nothing was sent; without secrets, and can be empty."""
    transport: str = ""
    """Kind of connection failure, such as "Connect" or "Timeout"; empty if the connection did not fail."""
    differs: bool = False
    """A condition of the request does not hold."""
    missing: bool = False
    """There is no such object, upload or bucket."""
    no_credentials: bool = False
    """The client could not get credentials to send with it."""
    wrong_region: bool = False
    region: str = ""
    """The bucket's region, if the service named it."""
    clock_is_off: bool = False
    """The service rejects the request's time."""

    @property
    def no_bucket(self) -> bool:
        """Return whether it is the bucket that is missing."""
        return self.code in _NO_BUCKET

    @property
    def may_be_elsewhere(self) -> bool:
        """Return whether another region may have the bucket; a HEAD then fails with 400 and no message."""
        return self.wrong_region or (self.status == 400 and not self.code and not self.message)

    @property
    def is_unknown_request(self) -> bool:
        """Return whether the service does not know the request or one of its headers, so that a retry cannot help."""
        return self.status == _NOT_IMPLEMENTED or self.code in _UNKNOWN_REQUEST

    @property
    def is_unknown_checksum(self) -> bool:
        """Return whether the service does not know the request's checksum algorithm."""
        if not (self.is_unknown_request or self.status == 400):
            return False
        return _CHECKSUM.search(self.message) is not None and not _MISMATCH.search(f"{self.code} {self.message}")

    @property
    def is_transient(self) -> bool:
        """Return whether the same request may succeed a little later."""
        if self.differs or self.missing or self.no_credentials or self.wrong_region or self.is_unknown_request:
            return False
        return bool(self.transport) or self.status in _TRANSIENT or self.code in _BUSY | _COLLISIONS

    @property
    def is_slow_down(self) -> bool:
        """Return whether the service asks for a pause."""
        return self.status in _SLOW_DOWN

    @property
    def may_be_done(self) -> bool:
        """Return whether the service may have carried out the request: no response says that it did not."""
        if self.status is None:
            return self.transport not in {"", "Connect"}
        return (self.status >= 500 and not self.is_unknown_request) or self.status == 408


def read_failure(error: BaseException) -> Failure:
    """Parse an exception of obstore: one of `OBSTORE_ERRORS`."""
    shown, _, debug = str(error).partition(_DEBUG)
    status = _STATUS.search(shown)
    code = _first(_CODE, shown)
    transport = _TRANSPORT.search(debug)
    said = _first(_MESSAGE, shown) or ("" if status else shown.partition("\n")[0])
    return Failure(
        status=int(status.group(1)) if status else None,
        code=code,
        message=_SECRET.sub("***", without_url_secrets(said)).strip(" ."),
        transport=transport.group(1) if transport and not status else "",
        differs=isinstance(error, AlreadyExistsError | PreconditionError | NotModifiedError)
        and code not in _COLLISIONS,
        missing=isinstance(error, FileNotFoundError) or code in _NO_BUCKET,
        no_credentials=any(words in shown for words in _NO_TOKEN) and not (status and int(status.group(1)) >= 500),
        clock_is_off=any(words in shown for words in _CLOCK),
        region=_first(_REGION, shown),
        wrong_region=code in _OTHER_REGION or "incorrectly configured region" in shown,
    )


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return next(filter(None, found.groups()), "") if found else ""


# Retries: after which failures, how soon and for how long; and abandoning a request that may never end.


_QUICK: Final = 0.2
"""Factor of the first wait: a broken connection is retried sooner than a service that asks for a pause."""
_LONGEST_WAIT: Final = 15.0
"""Also of the client that retries by itself."""
_JITTER: Final = 0.2
"""Ranks that fail together do not retry together."""
_UNREACHED_SECONDS: Final = 15.0
"""Retry limit for a service that cannot be connected to; shorter than that for one that fails."""

_Answer = TypeVar("_Answer")


def ask(request: Callable[[], _Answer]) -> _Answer:
    """Send a request that changes nothing in the store, without delaying Ctrl-C or another thread's failure.

    obstore lets no signal through while it waits for a silent service. So another thread waits, and is abandoned once
    its response is no longer wanted.

    Raises:
        InterruptedError: This thread's work was cancelled; see `sleep_unless_cancelled`.
        Everything that the request raises.
    """
    answer = start_worker(request, "hfshard-request", daemon=True)
    if answer is None:
        return request()
    try:
        return result_unless_cancelled(answer)
    finally:
        del answer  # its error's traceback holds this frame


class RequestRetry(Retry):
    """Retry of one request to a store: after which failures, how soon, and for how long."""

    def __init__(self, follow: Callable[[Failure], bool] = lambda failure: False) -> None:
        """Start the clock; `follow` decides after a failure whether to try another region, as `Connection.follower`."""
        super().__init__(longest_seconds=_LONGEST_WAIT, jitter=_JITTER)
        self._follow = follow

    def wait_after(self, failure: Failure) -> bool:
        """Wait until the request should be retried; return False at once if it should not.

        Raises:
            InterruptedError: This thread's work was cancelled; see `sleep_unless_cancelled`.
        """
        if self._follow(failure):
            return True
        if not failure.is_transient:
            return False
        limit = retry_seconds()
        return self.wait(
            first_seconds=initial_backoff() * (1 if failure.is_slow_down else _QUICK),
            budget_seconds=min(limit, _UNREACHED_SECONDS) if failure.transport == "Connect" else limit,
        )


# Settings and credentials of the environment, without the newline that ends a mounted secret.


def read_variable(name: str) -> str:
    """Read an environment variable, stripped of blanks and newlines at its ends; empty if it is not set.

    Raises:
        StoreAccessError: The value has a control character, on which the client panics.
    """
    text = os.environ.get(name, "").strip()
    check_text(text, f"The environment variable {name}")
    return text


def check_text(text: str, source: str) -> None:
    """Reject text that no request header can have; `source` is the beginning of the message, which shows no secret.

    Raises:
        StoreAccessError: The text has a control character.
    """
    at = next((at for at, sign in enumerate(text) if not sign.isprintable()), None)
    if at is not None:
        raise StoreAccessError(
            f"{source} has the control character {text[at]!r} (character {at + 1} of {len(text)}), which no request "
            "can contain. Set it to the plain value, without newlines."
        )


def client_settings(variables: Mapping[str, str]) -> dict[str, str]:
    """Build settings from variables (-> setting) that obstore would otherwise read with the blanks at their ends.

    Raises:
        StoreAccessError: A variable has a control character, or nothing but blanks.
    """
    settings = {}
    for name, setting in variables.items():
        text = read_variable(name)
        if text != os.environ.get(name, ""):
            if not text:
                raise StoreAccessError(f"The environment variable {name} has only blanks. Set it, or unset it.")
            settings[setting] = text
    return settings


class PlainVariables(Mapping[str, str]):
    """The environment as `read_variable` reads it, for libraries that accept one; read on access."""

    def __getitem__(self, name: str) -> str:
        if name not in os.environ:
            raise KeyError(name)
        return read_variable(name)

    def __iter__(self) -> Iterator[str]:
        return iter(os.environ)

    def __len__(self) -> int:
        return len(os.environ)
