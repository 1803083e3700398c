"""A service that says the same to every request."""

from __future__ import annotations

from contextlib import AbstractContextManager

from tests.servers.origin import serving


def answering(status: int, body: str) -> AbstractContextManager[str]:
    """Serve on loopback; gives the URL."""
    return serving(lambda exchange: exchange.reply(status, body.encode()))
