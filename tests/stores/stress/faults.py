"""Faults drawn by chance: lost answers, refusals, and requests that are carried out much later."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import dataclass

from tests.hubserver.faults import Fault, Faults

_READS = ("GET", "HEAD")


@dataclass(frozen=True, slots=True)
class Odds:
    """How often a request fails, of 1."""

    lost: float = 0.05
    """Carried out, and not answered."""
    refused: float = 0.05
    """503."""
    late: float = 0.02
    """Answered by 504 at once, and carried out later; only of requests that change something."""
    late_seconds: float = 20.0
    """At most."""


class RandomFaults(Faults):
    """Faults as a seed draws them, for each request anew; safe for threads."""

    def __init__(self, odds: Odds, seed: int) -> None:
        super().__init__()
        self._odds = odds
        self._random = random.Random(seed)
        self._draws = threading.Lock()
        self.counts: Counter[str] = Counter()
        """Requests, and faults by kind."""

    def take(self, text: str) -> Fault | None:
        """Draw for a request `METHOD kind path`."""
        odds = self._odds
        with self._draws:
            drawn = self._random.random()
            seconds = self._random.uniform(0, odds.late_seconds)
            self.counts["requests"] += 1
        fault = None
        if drawn < odds.lost:
            fault = Fault(match="", kind="lost_answer", how="rst")
        elif drawn < odds.lost + odds.refused:
            fault = Fault(match="", kind="status", status=503)
        elif drawn < odds.lost + odds.refused + odds.late and not text.startswith(_READS):
            fault = Fault(match="", kind="late", status=504, late_seconds=seconds)
        if fault is not None:
            with self._draws:
                self.counts[fault.kind] += 1
        return fault
