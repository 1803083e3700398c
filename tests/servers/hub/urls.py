"""Signed URLs of the storage origin that end after a while, as S3's and CloudFront's do."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import secrets
import time
from urllib.parse import urlencode

from tests.servers.wire import Exchange, StorageError

# The Hub's download URLs live for an hour.
LIFETIME_SECONDS = 3600.0


class Signer:
    """Makes and checks signatures."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._revoked: set[str] = set()
        self._numbers = itertools.count(time.time_ns())

    def sign(self, origin: str, path: str, method: str, **values: str) -> str:
        """Make a URL for one method on one path; `values` go into its query and can't be changed there."""
        expires = str(int(time.time() + LIFETIME_SECONDS))
        query = {**values, "X-Method": method, "X-Expires": expires, "X-Nonce": str(next(self._numbers))}
        return f"{origin}{path}?{urlencode(query)}&X-Signature={self._mac(path, urlencode(query))}"

    def _mac(self, path: str, query: str) -> str:
        return hmac.new(self._key, f"{path}?{query}".encode(), hashlib.sha256).hexdigest()

    def token(self, scope: str, expires: int) -> str:
        """Make a token for Xet's store, for "read" or "write"."""
        text = f"xet_{scope}_{expires}_{next(self._numbers)}"
        return f"{text}_{self._mac('token', text)}"

    def scope_of(self, token: str) -> str | None:
        """What a token is good for, until it expires; None: nothing (any more)."""
        text, _, mac = token.rpartition("_")
        if not hmac.compare_digest(mac, self._mac("token", text)):
            return None
        _, scope, expires, _ = text.split("_")
        return scope if int(expires) > time.time() else None

    def revoke(self, exchange: Exchange) -> None:
        """Let this URL be expired from now on."""
        self._revoked.add(exchange.query("X-Signature"))

    def check(self, exchange: Exchange) -> None:
        """Refuse a URL that was not signed for this, or has expired.

        Raises:
            StorageError: 403 with the XML that S3 answers.
        """
        query = exchange.record.path.partition("?")[2].rpartition("&X-Signature=")[0]
        signature, method = exchange.query("X-Signature"), exchange.query("X-Method")
        # A URL for GET is good for HEAD, too.
        is_method = exchange.record.method == method or (exchange.record.method == "HEAD" and method == "GET")
        if not hmac.compare_digest(signature, self._mac(exchange.path, query)) or not is_method:
            raise StorageError(403, "SignatureDoesNotMatch", "The request signature does not match.")
        if signature in self._revoked or float(exchange.query("X-Expires", "0")) < time.time():
            raise StorageError(403, "AccessDenied", "Request has expired")
