"""hf_xet's session of this process, within the memory that is allowed; its failures, and how Ctrl-C gets through."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any, Final, Literal, TypeVar

import hf_xet

from hfshard._util.text import without_url_secrets
from hfshard._util.threads import ProcessLock, cancellation, start_thread
from hfshard.stores.buckets.turns import downloads_at_once, uploads_at_once
from hfshard.stores.memory import store_memory_bytes

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

FailureKind = Literal["access", "missing", "connection", "other"]

_STATUS: Final = re.compile(r"\((\d{3}) [A-Z]")
"""How hf_xet quotes the status of an answer: "HTTP status client error (403 Forbidden)"."""

_LOOK_SECONDS: Final = 0.2
"""How often who waits for hf_xet looks whether it shall end."""


class XetFailedError(Exception):
    """hf_xet gave up; the message has no token and no signed address."""

    def __init__(self, message: str, kind: FailureKind) -> None:
        """Keep what happened, and what kind of failure it is."""
        super().__init__(message)
        self.kind: FailureKind = kind


class _Sessions:
    """hf_xet's sessions of this process, one for each limit of memory: a forked child begins its own."""

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._sessions: dict[tuple[int, int], Any] = {}

    def get(self, memory_bytes: int | None = None) -> Any:
        """The session that keeps to so many bytes; None: to those of all transfers."""
        wanted = (os.getpid(), memory_bytes or store_memory_bytes())
        with self._lock.held():
            if wanted not in self._sessions:
                self._sessions[wanted] = _new_session(wanted[1])
            return self._sessions[wanted]

    def renew(self) -> None:
        """Let what comes next have sessions of its own: one in which a call was cancelled may refuse all others."""
        with self._lock.held():
            self._sessions = {}


def _new_session(memory_bytes: int) -> Any:
    """Make a session that keeps to so many bytes, and else to hf_xet's own settings (HF_XET_...)."""
    config = hf_xet.XetConfig()
    most = session_limits(memory_bytes)
    known = most.keys() & set(config.keys())
    if known != most.keys():
        logger.warning("hf_xet does not know %s: it may take more memory.", sorted(most.keys() - known))
    limited = {name: min(most[name], config.get(name)) for name in known}
    return hf_xet.XetSession(config.with_config(limited))


def session_limits(memory_bytes: int) -> dict[str, int]:
    """The most that the settings of a session may be, by their names in hf_xet's configuration."""
    buffer = memory_bytes // 4
    uploads, downloads = uploads_at_once(memory_bytes), downloads_at_once(memory_bytes)
    return {
        "client.ac_min_upload_concurrency": 1,
        "client.ac_initial_upload_concurrency": uploads,
        "client.ac_max_upload_concurrency": uploads,
        "client.ac_min_download_concurrency": 1,
        "client.ac_initial_download_concurrency": downloads,
        "client.ac_max_download_concurrency": downloads,
        "reconstruction.download_buffer_size": buffer,
        "reconstruction.download_buffer_perfile_size": 0,
        "reconstruction.download_buffer_limit": buffer,
        "reconstruction.min_prefetch_buffer": buffer,
    }


SESSIONS: Final = _Sessions()


def interruptible(call: Callable[[], _Answer], cancel: Callable[[], object]) -> _Answer:
    """Make a call of hf_xet that Ctrl-C ends: it holds up its thread otherwise, as long as the network does.

    Args:
        call: What to do; in another thread if this is the main one, or one that works for it, where it may go on after
            Ctrl-C.
        cancel: Makes the call return soon, and do no harm until it does.

    Raises:
        InterruptedError: In a thread of `in_threads`: another item failed, or Ctrl-C came.
    """
    cancelled = cancellation()
    if cancelled is None and threading.current_thread() is not threading.main_thread():
        return call()
    future = start_thread(call, "hfshard-xet", daemon=True)
    if future is None:
        return call()
    try:
        # Not without end in the main thread either: it may not notice a signal that another thread was woken for.
        while not wait([future], _LOOK_SECONDS).done:
            if cancelled is not None and cancelled.is_set():
                raise InterruptedError("another item failed, or Ctrl-C came")
        return future.result()
    except BaseException:
        if not future.done():
            SESSIONS.renew()
            cancel()
        raise


def asked(call: Callable[[], _Answer]) -> _Answer:
    """Make a call of hf_xet; raises XetFailedError, whose message keeps secrets."""
    try:
        return call()
    except (OSError, RuntimeError, ValueError) as error:
        message = without_url_secrets(str(error)) or type(error).__name__
        kind = kind_of(error)
    raise XetFailedError(message, kind)


def kind_of(error: Exception) -> FailureKind:
    """What kind of failure an error of hf_xet is, by its class and the status that it quotes."""
    status = {int(found) for found in _STATUS.findall(str(error))}
    if isinstance(error, PermissionError) or status & {401, 403}:
        return "access"
    if isinstance(error, FileNotFoundError) or 404 in status:
        return "missing"
    if isinstance(error, ConnectionError | TimeoutError) or any(code == 429 or code >= 500 for code in status):
        return "connection"
    return "other"
