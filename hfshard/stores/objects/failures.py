"""What obstore's exceptions say, in numbers and words that can be compared and shown."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotModifiedError,
    PreconditionError,
)

from hfshard._util.text import without_url_secrets

OBSTORE_ERRORS: Final = (BaseError, FileNotFoundError)
"""What obstore raises when a request fails."""

_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>\s*([A-Za-z0-9]+)\s*</Code>|\(code: ([A-Za-z0-9]+)\)")
"""In an answer, or of one of many objects to delete."""
_MESSAGE: Final = re.compile(r"<Message>([^\n<]{1,300})")
_TRANSPORT: Final = re.compile(r"kind: (Connect|Request|Timeout|Interrupted|Unknown|Decode)\b")
_SECRET: Final = re.compile(r"(?i)\b(sig|signature|token|key|secret|credential)s?\s*[=:]\s*\S+|\?\S+")
_DEBUG: Final = "\n\nDebug source:\n"
"""Where obstore begins to print the error once more, in Rust."""

_TRANSIENT: Final = frozenset({408, 429, 500, 502, 503, 504})
_SLOW_DOWN: Final = frozenset({429, 503})
_BUSY: Final = frozenset({"SlowDown", "ServiceUnavailable", "InternalError", "ServerBusy", "RequestTimeout"})
"""Codes that come with other statuses too: S3 calls a body that came too slowly a bad request."""
_COLLISIONS: Final = frozenset({"ConditionalRequestConflict", "OperationAborted"})
"""Codes of S3 for two requests at the same moment: neither was refused for its condition."""
_CLOCK: Final = ("RequestTimeTooSkewed", "RequestExpired", "Request date header too old", "in a reasonable timeframe")
"""Words of S3, of Azure and of Google's token service."""
_UNKNOWN_REQUEST: Final = frozenset(
    {"NotImplemented", "UnsupportedHeader", "UnsupportedQueryParameter", "UnsupportedHttpVerb"}
)
"""Codes of S3 and Google, and of Azure, for a request or a header that the service does not know."""
_NOT_IMPLEMENTED: Final = 501
_REGION: Final = re.compile(r"<Region>([a-z0-9-]{1,63})</Region>")
_CHECKSUM: Final = re.compile(r"(?i)checksum|crc-?64")
"""What answers about the algorithm say, such as "Header 'x-amz-checksum-algorithm' ... not implemented" (R2),
"Unsupported header 'x-amz-checksum-...'" (B2) and "Invalid checksum provided" (older versions of MinIO)."""
_MISMATCH: Final = re.compile(r"(?i)match|digest")
"""What they say, or their codes, where the bytes did not have the checksum that was sent."""
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
"""How obstore says that it could not get credentials."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that failed."""

    status: int | None = None
    """The HTTP status; None: there was no answer, or none that could be read."""
    code: str = ""
    """The service's own word for it, such as "AccessDenied"; empty where it gave none."""
    message: str = ""
    """The service's own sentence, or the client's where nothing was sent; without secrets, and perhaps empty."""
    transport: str = ""
    """How the connection failed, such as "Connect" or "Timeout"; empty where it did not."""
    differs: bool = False
    """A condition of the request does not hold."""
    missing: bool = False
    """There is no such object, upload or bucket."""
    no_credentials: bool = False
    """The client could not get credentials to send with it."""
    wrong_region: bool = False
    region: str = ""
    """Where the bucket is, if the service said it."""
    clock_is_off: bool = False
    """The service does not believe the time that the request names."""

    @property
    def no_bucket(self) -> bool:
        """Whether the bucket is what is missing."""
        return self.code in _NO_BUCKET

    @property
    def may_be_elsewhere(self) -> bool:
        """Whether another region may have the bucket; the answer to a HEAD has no words, and is a bad request then."""
        return self.wrong_region or (self.status == 400 and not self.code and not self.message)

    @property
    def is_unknown_request(self) -> bool:
        """Whether the service does not know the request, or a header of it: it will not know it later either."""
        return self.status == _NOT_IMPLEMENTED or self.code in _UNKNOWN_REQUEST

    @property
    def is_unknown_checksum(self) -> bool:
        """Whether the service does not know the checksum that a request has."""
        if not (self.is_unknown_request or self.status == 400):
            return False
        return _CHECKSUM.search(self.message) is not None and not _MISMATCH.search(f"{self.code} {self.message}")

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed a little later."""
        if self.differs or self.missing or self.no_credentials or self.wrong_region or self.is_unknown_request:
            return False
        return bool(self.transport) or self.status in _TRANSIENT or self.code in _BUSY | _COLLISIONS

    @property
    def is_slow_down(self) -> bool:
        """Whether the service asks to be left alone for a while."""
        return self.status in _SLOW_DOWN

    @property
    def may_be_done(self) -> bool:
        """Whether the service may have done what it was asked: there was no answer that says no."""
        if self.status is None:
            return self.transport not in {"", "Connect"}
        return (self.status >= 500 and not self.is_unknown_request) or self.status == 408


def read_failure(error: BaseException) -> Failure:
    """Tell what an exception of obstore says.

    Args:
        error: One of `OBSTORE_ERRORS`.
    """
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
