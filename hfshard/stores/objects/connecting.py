"""One connection for each bucket and its settings in a process."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from typing import Final

from hfshard.stores.objects import azure, gcs, s3
from hfshard.stores.objects.connection import Connection

_VARIABLES: Final = ("AWS_", "AZURE_", "GOOGLE_", "STORAGE_EMULATOR_HOST", "CLOUDSDK_", "HFSHARD_STORE_", "HOME")
"""The beginnings of the names of environment variables that may change a connection."""

_CONNECT: Final[dict[str, Callable[[str], Connection]]] = {
    "s3": s3.connect,
    "gs": gcs.connect,
    "az": azure.connect,
}

_lock = threading.Lock()
_CONNECTIONS: Final[dict[tuple[str, str, str], Connection]] = {}


def connection_to(scheme: str, bucket: str) -> Connection:
    """The connection to a bucket, made when it is first asked for with the environment as it is.

    Raises:
        StoreAccessError: There are no credentials.
    """
    key = (scheme, bucket, _environment())
    with _lock:
        if key not in _CONNECTIONS:
            _CONNECTIONS[key] = _CONNECT[scheme](bucket)
        return _CONNECTIONS[key]


def _forget() -> None:
    """Begin anew in a forked child: another thread of the parent may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _CONNECTIONS.clear()


os.register_at_fork(after_in_child=_forget)


def _environment() -> str:
    """A digest of the variables: they hold secrets."""
    digest = hashlib.sha256()
    for name in sorted(os.environ):
        if name.startswith(_VARIABLES):
            digest.update(f"{name}\0{os.environ[name]}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()
