"""The default process group's store, with calls that always end."""

from __future__ import annotations

import math
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Final, TypeVar

import torch.distributed as dist

from hfshard._util.threads import start_worker
from hfshard.errors import RankFailedError

_Result = TypeVar("_Result")

DEATH_SECONDS: Final = 15.0
"""A rank that is silent for longer counts as dead: a busy machine delays a thread by a second or two."""
_PIECE_BYTES: Final = 1 << 20
"""Longer values are stored in pieces: torch's server closes the connection on a value of more than 8 MiB."""
_SLICE_SECONDS: Final = 0.5
"""Waiting is counted in slices: all the time for which this process itself was stopped counts as one."""
_WHOLE: Final = b"1"
"""Begins a value that is stored as it is."""
_COMPRESSED: Final = b"z"
"""Begins a compressed value: tensor names shrink to a tenth, and one process serves them to all ranks."""
_COMPRESSED_FROM_BYTES: Final = 1 << 12
"""A smaller value is one packet, or a few."""
_IN_PIECES: Final = b"#"
"""Begins the number of pieces."""
_NONE: Final = "?"
"""A value that no key has: comparing with it reads a key, or finds it missing, in one step without waiting."""


class TimeoutStore:
    """The ranks' keys and values, in the store of the default process group.

    A call of torch's `TCPStore` blocks forever if the process that hosts the store is stopped or unreachable,
    regardless of its timeout. So a thread makes the calls, and a caller waits for it at most `answer_seconds`. No call
    here waits for a key, so that threads can share the connection.

    Args:
        original: A torch store.
        answer_seconds: How long one call may take.
        is_kept: Whether `close` leaves the connection open, for the next operation.

    Raises:
        RankFailedError: It cannot be reached. Every method raises this, and does so at once from then on.
    """

    def __init__(self, original: Any, answer_seconds: float = DEATH_SECONDS, *, is_kept: bool = False) -> None:
        self._answer_seconds = answer_seconds
        self._is_kept = is_kept
        self._keeper, self._keeping_rank = _keeper(original)
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._lost_words = ""
        self._thread = start_worker(self._serve, "hfshard-store", daemon=True)
        self._store = self._ask(lambda: self._connected(original))

    def put(self, key: str, value: bytes) -> list[str]:
        """Set a value of any length; return the keys that it takes up."""
        packed = _packed(value)
        if len(packed) <= _PIECE_BYTES:
            self._set(key, packed)
            return [key]
        pieces = [packed[start : start + _PIECE_BYTES] for start in range(0, len(packed), _PIECE_BYTES)]
        keys = [f"{key}#{number}" for number in range(len(pieces))]
        for name, piece in zip(keys, pieces, strict=True):
            self._set(name, piece)
        self._set(key, _IN_PIECES + str(len(pieces)).encode())
        return [key, *keys]

    def get(self, key: str) -> bytes | None:
        """Return the value that was put under a key; None: there is none yet."""
        return self.get_many([key])[0]

    def get_many(self, keys: Iterable[str]) -> list[bytes | None]:
        """Return the values of several keys; None for a key that has none yet."""
        names = list(keys)
        found = self._ask(lambda: [_read(self._store, name) for name in names])
        return [self._joined(name, value) for name, value in zip(names, found, strict=True)]

    def has_many(self, keys: Iterable[str]) -> list[bool]:
        """Return whether keys exist, one by one, also those of `add`."""
        names = list(keys)
        return self._ask(lambda: [bool(self._store.check([name])) for name in names])

    def swap(self, key: str, expected: str, desired: str) -> str:
        """Set a key if it has the expected value ("" if it is missing); return the value that it has then.

        Use a key either with `swap` and `holds`, or with `add` and `has_many`, or with `put` and `get`.
        """
        found: bytes = self._ask(lambda: self._store.compare_set(key, expected, desired))
        return found.decode()

    def holds(self, key: str, value: str) -> bool:
        """Return whether a key of `swap` has this value."""
        return self._ask(lambda: _read(self._store, key)) == value.encode()

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0; return its new value."""
        return int(self._ask(lambda: self._store.add(key, amount)))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete keys, if the store can; missing ones are ignored."""
        names = list(keys)
        self._ask(lambda: _delete(self._store, names))

    def delete_values(self, keys: Iterable[str]) -> None:
        """Delete keys of `put` with all that they take up; missing ones are ignored."""
        names = list(keys)
        found = self._ask(lambda: [_read(self._store, name) for name in names])
        for name, value in zip(list(names), found, strict=True):
            names += _pieces(name, value) if value is not None and value.startswith(_IN_PIECES) else []
        self.delete(names)

    def close(self) -> None:
        """Close the connection after the pending calls, unless it is kept."""
        if not self._is_kept:
            self._calls.put(None)

    @property
    def is_lost(self) -> bool:
        """True if the store no longer responds."""
        return bool(self._lost_words)

    def end(self) -> None:
        """Close the connection, kept or not."""
        self._is_kept = False
        self.close()

    def _set(self, key: str, value: bytes) -> None:
        self._ask(lambda: self._store.set(key, value))

    def _joined(self, key: str, value: bytes | None) -> bytes | None:
        if value is not None and value.startswith(_IN_PIECES):
            pieces = _pieces(key, value)
            found = self._ask(lambda: [_read(self._store, piece) for piece in pieces])
            value = b"".join(piece for piece in found if piece is not None)
        return None if value is None else _unpacked(value)

    def _connected(self, original: Any) -> Any:
        """Open another connection; a store that cannot be cloned is shared."""
        try:
            store = original.clone()
        except (AttributeError, NotImplementedError):
            return original
        store.set_timeout(timedelta(seconds=self._answer_seconds))
        return store

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            work, future = call
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised by who asks
                future.set_exception(error)
            del call, work, future
        self._store = None

    def _ask(self, work: Callable[[], _Result]) -> _Result:
        """Run some work with the store in the thread; raise RankFailedError if it does not end in time."""
        future: Future[_Result] = Future()
        if self._lost_words:
            raise self._lost(self._lost_words)
        if self._thread is None:
            return work()
        self._calls.put((work, future))
        if not _is_done_within(future, self._answer_seconds):
            raise self._lost(f"did not respond for {self._answer_seconds:g} s")
        try:
            return future.result()
        except RuntimeError as error:  # of torch: DistNetworkError, DistStoreError
            raise self._lost(f"failed ({type(error).__name__}: {error})") from error

    def _lost(self, how: str) -> RankFailedError:
        self._lost_words = how
        return RankFailedError(
            f"The process group's store {how}: {self._keeper} was killed, was stopped, or cannot be reached. Check "
            "its output, and start the job again.",
            rank=self._keeping_rank,
        )


def _packed(value: bytes) -> bytes:
    if len(value) >= _COMPRESSED_FROM_BYTES:
        compressed = zlib.compress(value, 1)
        if len(compressed) < len(value):
            return _COMPRESSED + compressed
    return _WHOLE + value


def _unpacked(packed: bytes) -> bytes:
    value = packed[1:]
    return zlib.decompress(value) if packed.startswith(_COMPRESSED) else value


def _pieces(key: str, value: bytes) -> list[str]:
    return [f"{key}#{number}" for number in range(int(value[len(_IN_PIECES) :]))]


def _is_done_within(future: Future[Any], seconds: float) -> bool:
    slices = range(math.ceil(seconds / _SLICE_SECONDS))
    return any(wait([future], timeout=_SLICE_SECONDS).done for _ in slices)


def open_group_store(answer_seconds: float = DEATH_SECONDS) -> TimeoutStore:
    """Open the store of the default process group, to be closed by the caller.

    A connection to a `TCPStore` is kept for as long as the group lives. For each new one, torch looks up the peer's
    name, on the only thread that serves all ranks; this takes 5 seconds if the name server is unreachable. A file is
    opened each time, because it is deleted when the last user closes it.

    Raises:
        RankFailedError: It cannot be reached.
    """
    original = _default_store()
    if not isinstance(_innermost(original), dist.TCPStore):  # type: ignore[attr-defined]
        return TimeoutStore(original, answer_seconds)
    key = os.getpid(), answer_seconds
    with _KEPT_LOCK:
        of, kept = _KEPT.get(key, (None, None))
        if kept is not None:
            if of is not None and of() is original and not kept.is_lost:
                return kept
            kept.end()
        store = TimeoutStore(_of_this_start(original), answer_seconds, is_kept=True)
        _KEPT[key] = weakref.ref(original), store
        return store


_KEPT: dict[tuple[int, float], tuple[weakref.ref[Any], TimeoutStore]] = {}
"""(Process, answer seconds) -> the group's store, and the connection to it."""
_KEPT_LOCK = threading.Lock()


def _of_this_start(store: Any) -> Any:
    """Return the part of a store that belongs to the latest start of the ranks.

    torchrun keeps one store for all starts (`--max-restarts`), with all that the ranks of ended starts have written.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0" or not _is_kept_by_launcher():
        return store
    return dist.PrefixStore(f"hfshard-restart-{restarts}", store)  # type: ignore[attr-defined]


def _is_kept_by_launcher() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _innermost(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _default_store() -> Any:
    """Return the store of the default process group; `torch.distributed` has no documented name for it."""
    group: Any = dist.group.WORLD
    return group.get_group_store()


def _keeper(store: Any) -> tuple[str, int | None]:
    """Describe the process that hosts a store; return its rank, too, if it has one."""
    # torch lists `TCPStore` in its documentation only
    if not isinstance(_innermost(store), dist.TCPStore):  # type: ignore[attr-defined]
        return "the process that hosts it, or its file's lock,", None
    if _is_kept_by_launcher():
        return "the launcher, which hosts it,", None
    return "rank 0, which hosts it,", 0


def _read(store: Any, key: str) -> bytes | None:
    value: bytes = store.compare_set(key, _NONE, _NONE)
    return None if value == _NONE.encode() else value


def _delete(store: Any, keys: Iterable[str]) -> None:
    for key in keys:
        try:
            store.delete_key(key)
        except NotImplementedError:
            return
