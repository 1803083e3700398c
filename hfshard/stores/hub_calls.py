"""Shared parts of huggingface_hub calls: tokens kept out of messages, retries of transient failures, tokens for Xet."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import quote

from huggingface_hub import constants, get_session, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

from hfshard._util.text import without_url_secrets
from hfshard.errors import HfshardError
from hfshard.stores.retry import Retry, idle_timeout, retry_after

ATTEMPTS: Final = 5
"""Number of times that a request is sent if its failure is transient."""
_FIRST_WAIT_SECONDS: Final = 0.5
_RETRIED: Final = frozenset({408, 429, 500, 502, 503, 504})

_TOKEN_VARIABLES: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_ENDPOINT_USER: Final = re.compile(r"(?<=://).*@", re.DOTALL)
_SHOWN_CHARACTERS: Final = 4
"""Characters of a token in messages: enough to recognize it, too few to use it."""
_SHOWN_FROM: Final = 16
"""Shortest token, in characters, of which any are shown; the Hub's have 37."""


def transport_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of huggingface_hub's HTTP library for a failed connection that may succeed on a retry."""
    library = http_library()
    return (library.TimeoutException, library.NetworkError, library.RemoteProtocolError, library.ProxyError)


def answer_errors() -> tuple[type[Exception], ...]:
    """Return all exceptions of huggingface_hub's HTTP library, including those for an invalid response or address.

    A proxy can cause these: a redirect loop, a body that cannot be unpacked, an address that no host can have.
    """
    library = http_library()
    return (library.RequestError, library.InvalidURL, UnicodeError)


def http_library() -> Any:
    """Return huggingface_hub's HTTP library: httpx, or httpx2 from huggingface_hub 2.0 on."""
    package = next(kind.__module__.split(".")[0] for kind in type(get_session()).__mro__ if "httpx" in kind.__module__)
    return sys.modules[package]


def describe_token(token: str | bool | None) -> str:
    """Describe the token that a call with this argument uses, without revealing it."""
    if isinstance(token, str):
        return f"the token {_masked(token)} that was passed"
    if token is False:
        return "no token, because token=False was passed"
    found = get_token()
    if found is None:
        return "no token, because none is saved or in HF_TOKEN"
    shown = _masked(found)
    for variable in _TOKEN_VARIABLES:
        if _clean(os.environ.get(variable, "")) == found:
            return f"the token {shown} from the environment variable {variable}"
    return f"the token {shown} saved in '{constants.HF_TOKEN_PATH}'"


def check_settings(token: str | bool | None, access_error: type[HfshardError]) -> None:
    """Reject a token or HF_ENDPOINT that no request can have, before a message quotes it.

    huggingface_hub removes newlines from the environment's tokens, and nothing else.

    Raises:
        HfshardError: An `access_error`: the token or HF_ENDPOINT is not valid.
    """
    if isinstance(token, str) and (_is_no_token(token) or token != token.strip()):
        raise access_error(
            "The token that was passed is empty, or has blanks, a newline or other characters that no token has. "
            "Strip it where you read it."
        )
    if token is not False and not isinstance(token, str):
        variable = next((name for name in _TOKEN_VARIABLES if os.environ.get(name)), None)
        if variable is not None and (kept := _clean(os.environ[variable])) and _is_no_token(kept):
            raise access_error(
                f"The environment variable {variable} has a control character or a non-ASCII letter, which no token "
                "has. Set it to the plain token."
            )
    endpoint = constants.ENDPOINT
    if any(sign.isspace() or not sign.isprintable() for sign in endpoint) or "://" not in endpoint:
        raise access_error(
            "The environment variable HF_ENDPOINT is not a valid URL: it has blanks or a newline, or no http:// or "
            "https:// before its host. Set it to one such as https://huggingface.co before Python starts."
        )


def _is_no_token(token: str) -> bool:
    return not (token and token.isascii() and token.isprintable())


def _clean(token: str) -> str:
    """Clean a token of the environment as huggingface_hub does."""
    return token.replace("\r", "").replace("\n", "").strip()


def _masked(token: str) -> str:
    return f"'…{token[-_SHOWN_CHARACTERS:]}'" if len(token) >= _SHOWN_FROM else "'…'"


def shown_endpoint() -> str:
    """Return the Hub's endpoint for messages, without the user and password that a mirror's can have."""
    return _ENDPOINT_USER.sub("", constants.ENDPOINT)


def without_secrets(text: str, token: str | bool | None) -> str:
    """Mask a call's token wherever a text, such as a server's response, quotes it, and the secrets in its URLs."""
    used = token if isinstance(token, str) else None if token is False else get_token()
    text = without_url_secrets(text)
    return re.sub(rf"(?<![\w-]){re.escape(used)}(?![\w-])", "…", text) if used else text


def hide_secrets(error: BaseException) -> None:
    """Remove URLs' secrets from another library's error and its causes, which tracebacks show above hfshard's."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if not isinstance(found, HfshardError):
            found.args = tuple(without_url_secrets(part) if isinstance(part, str) else part for part in found.args)
        found = found.__cause__ or found.__context__


def offline_variable() -> str:
    """Return the environment variable that turned offline mode on: huggingface_hub's or transformers'."""
    of_transformers, of_hub = ("TRANSFORMERS_OFFLINE", "HF_HUB_OFFLINE")
    is_on = {
        name: os.environ.get(name, "").strip().upper() in constants.ENV_VARS_TRUE_VALUES
        for name in (of_transformers, of_hub)
    }
    return of_transformers if is_on[of_transformers] and not is_on[of_hub] else of_hub


def is_transient_error(error: BaseException) -> bool:
    """Return whether a request may succeed on a retry: the server was busy, or the connection failed."""
    if isinstance(error, HfHubHTTPError):
        return status_of(error) in _RETRIED
    return isinstance(error, transport_errors())


def hub_retry(what: str = "", attempts: int = ATTEMPTS, cancelled: threading.Event | None = None) -> Retry:
    """Create the retry of a request to the Hub; see `Retry` for the arguments."""
    return Retry(what, attempts=attempts, first_seconds=_FIRST_WAIT_SECONDS, cancelled=cancelled)


def seconds_asked(error: BaseException | None) -> float | None:
    """Return the seconds that the Hub's response asks clients to wait; None if there is none, or it does not say."""
    return retry_after(error.response) if isinstance(error, HfHubHTTPError) else None


def status_of(error: HfHubHTTPError) -> int:
    """Return the HTTP status of an error's response."""
    return int(error.response.status_code)


# Tokens for Xet storage. The Hub issues each for one bucket or repo, to read or to write, for some minutes.

_OK: Final = 200

TokenKind = Literal["read", "write"]
"""Access that a token permits."""

_RENEWED_SECONDS: Final = 120.0
"""A token that expires within this time is replaced: hf_xet asks for another one 30 seconds before the expiry."""


@dataclass(frozen=True, slots=True)
class XetToken:
    """Access to the Xet storage of a bucket or repo."""

    endpoint: str
    secret: str = field(repr=False)
    ends: int
    """Expiry, in seconds since 1970."""


class XetTokens:
    """Tokens of one bucket or repo, requested when needed and cached while valid; shared by all threads.

    The URLs are those of huggingface_hub's private function `xet_connection_info_refresh_url`.
    """

    def __init__(self, url: str, token: str | bool | None = None) -> None:
        """Store the URL of the Hub's call that issues tokens, and the user's token, without sending a request."""
        self._url, self._user = url, token
        self._lock = threading.Lock()
        self._kept: XetToken | None = None

    def current(self) -> XetToken:
        """Return a token that does not expire soon.

        Raises:
            HfHubHTTPError: The Hub refuses.
            ValueError, KeyError, TypeError: The response is not a Hub's.
        """
        with self._lock:
            if self._kept is None or self._kept.ends < time.time() + _RENEWED_SECONDS:
                response = http_backoff("GET", self._url, **self._options())
                hf_raise_for_status(response)
                self._kept = _token_of(response.json())
            return self._kept

    def try_once(self) -> bool:
        """Request a token once; return False if the Hub issues none, such as one without Xet."""
        response = get_session().get(self._url, **self._options())
        if response.status_code != _OK:
            return False
        with self._lock:
            self._kept = _token_of(response.json())
        return True

    def _options(self) -> dict[str, Any]:
        return {"headers": build_hf_headers(token=self._user), "timeout": idle_timeout() or 1}

    def forget(self) -> None:
        """Discard the token, which the storage does not accept, so that the next call requests a new one."""
        with self._lock:
            self._kept = None

    def arguments(self) -> dict[str, Any]:
        """Build the arguments of hf_xet's calls: a token, and how to get the next one; raises as `current` does.

        The user's token is sent to the Hub only, never to the storage.
        """
        token, headers = self.current(), build_hf_headers(token=self._user)
        return {
            "endpoint": token.endpoint,
            "token": token.secret,
            "token_expiry_unix_secs": token.ends,
            "token_refresh_url": self._url,
            "token_refresh_headers": headers,
            "custom_headers": {name: value for name, value in headers.items() if name.lower() != "authorization"},
        }


def _token_of(answer: Any) -> XetToken:
    return XetToken(str(answer["casUrl"]), str(answer["accessToken"]), int(answer["exp"]))


def bucket_token_url(bucket: str, kind: TokenKind) -> str:
    """Return the URL at which the Hub issues tokens for a bucket."""
    return f"{constants.ENDPOINT}/api/buckets/{bucket}/xet-{kind}-token"


def repo_token_url(repo_id: str, kind: TokenKind, revision: str) -> str:
    """Return the URL at which the Hub issues tokens for a branch or commit of a model's repo."""
    return f"{constants.ENDPOINT}/api/models/{repo_id}/xet-{kind}-token/{quote(revision, safe='')}"
