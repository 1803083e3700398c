"""Tokens for Xet storage: the Hub gives them out for one bucket or repo, to read or to write, and for some minutes."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import quote

from huggingface_hub import constants, get_session
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

from hfshard.stores.retry import stall_seconds

_OK: Final = 200

TokenKind = Literal["read", "write"]
"""What a token permits."""

_RENEWED_SECONDS: Final = 120.0
"""A token is not used when it ends this soon: hf_xet asks for another one 30 seconds before it does."""


@dataclass(frozen=True, slots=True)
class XetToken:
    """What opens the Xet storage of a bucket or a repo."""

    endpoint: str
    secret: str = field(repr=False)
    ends: int
    """Seconds since 1970."""


class XetTokens:
    """The tokens of one bucket or repo: asked for when they are needed, and kept while they hold; for all threads.

    The addresses are huggingface_hub's own, which has them in a private function (`xet_connection_info_refresh_url`).
    """

    def __init__(self, url: str, token: str | bool | None = None) -> None:
        """Ask nothing yet.

        Args:
            url: Of the Hub's call that gives them: see `bucket_token_url` and `repo_token_url`.
            token: Of the user, as in huggingface_hub.
        """
        self._url, self._user = url, token
        self._lock = threading.Lock()
        self._kept: XetToken | None = None

    def current(self) -> XetToken:
        """A token that holds for a while.

        Raises:
            HfHubHTTPError: The Hub refuses.
            ValueError, KeyError, TypeError: The answer is not that of a Hub.
        """
        with self._lock:
            if self._kept is None or self._kept.ends < time.time() + _RENEWED_SECONDS:
                response = http_backoff("GET", self._url, **self._options())
                hf_raise_for_status(response)
                self._kept = _token_of(response.json())
            return self._kept

    def try_once(self) -> bool:
        """Ask for a token, once; False where the Hub gives none, as one without Xet does."""
        response = get_session().get(self._url, **self._options())
        if response.status_code != _OK:
            return False
        with self._lock:
            self._kept = _token_of(response.json())
        return True

    def _options(self) -> dict[str, Any]:
        return {"headers": build_hf_headers(token=self._user), "timeout": stall_seconds() or 1}

    def forget(self) -> None:
        """Ask for a new token the next time: the storage does not take this one."""
        with self._lock:
            self._kept = None

    def arguments(self) -> dict[str, Any]:
        """What hf_xet's calls take: a token, and how to get the next one; raises as `current`.

        The user's token goes to the Hub only, never to the storage.
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
    """Where the Hub gives tokens for a bucket."""
    return f"{constants.ENDPOINT}/api/buckets/{bucket}/xet-{kind}-token"


def repo_token_url(repo_id: str, kind: TokenKind, revision: str) -> str:
    """Where the Hub gives tokens for a branch or commit of a model's repo."""
    return f"{constants.ENDPOINT}/api/models/{repo_id}/xet-{kind}-token/{quote(revision, safe='')}"
