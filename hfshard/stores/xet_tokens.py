"""Tokens for Xet storage. The Hub issues each for one bucket or repo, to read or to write, for some minutes."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import quote

from huggingface_hub import constants, get_session
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

from hfshard.stores.retry import idle_timeout

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
