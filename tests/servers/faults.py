"""Faults on demand: what the test Hub server does wrong, to which requests and how often."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

KINDS = ("drop", "status", "slow", "corrupt", "truncate", "expired", "lost_answer", "race", "partial", "late")

# A test that forgets to open its gate ends with an error of its own instead of hanging for ever.
MAX_GATE_SECONDS = 110.0


@dataclass(slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong; faults are tried in the order of `HubServer.fail` and at most one hits a request.

    Kinds:
        drop: The connection closes after `after_bytes` body bytes (0: before anything is answered).
        truncate: The answer's body ends after `after_bytes` bytes of those that Content-Length declares.
        status: The request body is read, then `status` is answered (with Retry-After, if `retry_after` is set).
        slow: The server waits for `gate` after `after_bytes` body bytes. A client that is killed while the server
            waits has got exactly `after_bytes`, and the log says so.
        corrupt: One bit of the byte at `offset` of the answer's body is flipped.
        expired: The storage URL is dead from now on and answers 403; a new resolve gives a fresh one.
        lost_answer: The request is carried out, then the connection closes without an answer.
        race: `action` runs in the server before the request is handled.
        partial: Of a bucket's batch only the first `operations` are carried out. Then `status` is answered; 200: with
            the others listed as failed; 0: the connection closes.
        late: Of a proxy only: the request is kept, and answered by `status`; it is carried out by the proxy's
            `release`, or after `late_seconds`.
    """

    match: str
    """Regular expression, searched in `METHOD kind path`, as in `"PUT lfs_put /"`."""
    kind: str
    times: int = 1
    """How many requests it hits."""
    skip: int = 0
    """How many matching requests pass unharmed first."""
    status: int = 503
    retry_after: float | None = None
    """Seconds."""
    after_bytes: int = 0
    how: str = "fin"
    """How a connection ends: `"fin"` (an ordinary close), `"rst"` (a reset) or `"silence"` (the client ends it)."""
    direction: str | None = None
    """Which body `after_bytes` counts: `"up"` or `"down"`; None: up if the request has a body."""
    offset: int = 0
    operations: int = 0
    late_seconds: float | None = None
    """After which a late request is carried out; None: when the proxy is told to."""
    gate: threading.Event | None = None
    action: Callable[[], object] | None = None
    """Of a race; what ends a connection does it just before."""
    reached: threading.Event = field(default_factory=threading.Event)
    """Set when the fault has taken hold of a request (and, at a gate, when the server waits there)."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Unknown kind of fault {self.kind!r}: it is one of {', '.join(KINDS)}.")
        if self.how not in ("fin", "rst", "silence"):
            raise ValueError(f"A connection ends by 'fin', 'rst' or 'silence', not {self.how!r}.")
        if self.kind == "race" and self.action is None:
            raise ValueError("A race needs an action.")

    def limit(self, direction: str, has_body: bool) -> int | None:
        """Say after how many body bytes in this direction the fault acts; None: it does not act there."""
        if self.kind == "truncate":
            return self.after_bytes if direction == "down" else None
        mine = self.direction or ("up" if has_body else "down")
        return self.after_bytes if self.kind in ("drop", "slow") and mine == direction else None

    def wait(self) -> None:
        """Wait at the gate, if there is one."""
        self.reached.set()
        if self.gate is not None and not self.gate.wait(MAX_GATE_SECONDS):
            raise RuntimeError(f"The gate of the fault on {self.match!r} was not opened in {MAX_GATE_SECONDS:g} s.")


class Faults:
    """The faults still to come; safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[Fault] = []

    def add(self, fault: Fault) -> None:
        """Put a fault at the end of the queue."""
        with self._lock:
            self._faults.append(fault)

    def clear(self) -> None:
        """Forget every fault, and let everyone waiting at a gate go."""
        with self._lock:
            for fault in self._faults:
                if fault.gate is not None:
                    fault.gate.set()
            self._faults.clear()

    def take(self, text: str) -> Fault | None:
        """Find the fault that hits the request `METHOD kind path` and use it up by one."""
        with self._lock:
            for fault in self._faults:
                if fault.times <= 0 or not re.search(fault.match, text):
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault
        return None
