"""Several writers and a reader beside a service that fails: run them for minutes, and judge what they have logged."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers import processes
from tests.servers.faults import Fault, Faults
from tests.servers.stores import running
from tests.servers.stores.fault_proxy import FaultProxy
from tests.servers.stores.kinds import SERVICES
from tests.sweeps.store_child import PIPES, finish
from tests.sweeps.store_places import INDEX, StorePlace, litter, number_and_id
from tests.sweeps.stress_processes import read, write

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


SETTINGS = {"HFSHARD_STORE_RETRY_SECONDS": "16", "HFSHARD_STORE_TIMEOUT": "30"}
"""Of the processes: the sixth try is the last."""
_LOOK_SECONDS = 0.2
"""Between two listings of the monitor."""
_END_SECONDS = 200.0
"""For which a process may go on after it was told to stop: a save may be at its last try."""
Id = tuple[int, str]


@dataclass(slots=True)
class Findings:
    """What came of it."""

    saves: Counter[str] = field(default_factory=Counter)
    """By outcome."""
    loads: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    """All, and faults by kind."""
    listings: int = 0
    """Of the monitor."""
    most_saves: int = 0
    """Whose objects were there at one time."""
    most_objects: int = 0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = {"saves": self.saves, "loads": self.loads, "requests": self.requests}
        words = [f"{name}: {_words(counter)}" for name, counter in counts.items()]
        words.append(f"{self.listings} listings: at most {self.most_objects} objects, of {self.most_saves} saves")
        return "; ".join(words)


def _words(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counter.most_common())


class Stress:
    """Writers, a reader and a monitor in one place.

    Args:
        scheme: Of the service.
        writers: Processes that save.
        seconds: For which they begin saves.
        odds: Of faults.
        seed: Of faults.
        most: Saves of each writer; -1: as many as there is time for.
    """

    def __init__(self, scheme: str, writers: int, seconds: float, odds: Odds, seed: int, most: int = -1) -> None:
        self.place = StorePlace(scheme, running.url_of(scheme), "stress").with_objects({})
        self.writers, self.seconds, self.odds, self.seed, self.most = writers, seconds, odds, seed, most
        self.findings = Findings()
        self._seen: list[tuple[float, Id | None]] = []
        """Begin of a listing, and the highest index in it."""

    def run(self) -> Findings:
        """Do all of it."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            self._write_once(0, folder)
            with FaultProxy(self.place.url, self.place.scheme) as proxy:
                faults = RandomFaults(self.odds, self.seed)
                proxy.faults = faults
                self._run(proxy, folder)
                self.findings.requests = faults.counts
                proxy.release()
            self._judge(folder)
            (folder / "stop").unlink()
            self._write_once(self.writers + 1, folder)
            (last,) = _lines(folder / f"writer-{self.writers + 1}")
            if last["outcome"] != "saved":
                self.findings.problems.append(f"the last save, which nothing disturbed: {last}")
        if left := litter(self.place.objects(), {"config.json"}):
            self.findings.problems.append(f"the last save left {left}")
        if unfinished := self.place.bucket.unfinished(self.place.prefix):
            self.findings.problems.append(f"the last save left unfinished uploads of {unfinished}")
        return self.findings

    def _write_once(self, number: int, folder: Path) -> None:
        """Save once, past the faults."""
        finish(processes.call(write, self.place, self.place.url, number, folder, {}, 1, **PIPES), _END_SECONDS)

    def _run(self, proxy: FaultProxy, folder: Path) -> None:
        stop = folder / "stop"
        arguments = (self.place, proxy.url)
        started = [
            processes.call(write, *arguments, number, folder, SETTINGS, self.most, **PIPES)
            for number in range(1, self.writers + 1)
        ]
        reader = processes.call(read, *arguments, 1, folder, SETTINGS, **PIPES)
        deadline = time.monotonic() + self.seconds
        try:
            while time.monotonic() < deadline and any(one.poll() is None for one in started):
                self._look()
                time.sleep(_LOOK_SECONDS)
        finally:
            stop.touch()
        for process in (*started, reader):
            while process.poll() is None and time.monotonic() < deadline + _END_SECONDS:
                self._look()
                time.sleep(_LOOK_SECONDS)
            finish(process, 1.0)
        self._look()

    def _look(self) -> None:
        """List the place, past the faults."""
        began = time.monotonic()
        sizes = self.place.bucket.sizes(f"{self.place.prefix}/")
        found = [one for name in sizes if (one := number_and_id(name.rpartition("/")[2])) is not None]
        self._seen.append((began, max(((number, one) for usual, number, one in found if usual == INDEX), default=None)))
        self.findings.listings += 1
        self.findings.most_objects = max(self.findings.most_objects, len(sizes))
        self.findings.most_saves = max(self.findings.most_saves, len({one[1:] for one in found}))

    def _judge(self, folder: Path) -> None:
        saves = [line for path in sorted(folder.glob("writer-*")) for line in _lines(path)]
        loads = [line for path in sorted(folder.glob("reader-*")) for line in _lines(path)]
        self.findings.saves = Counter(one["outcome"] for one in saves)
        self.findings.problems += [f"a save ended in {one}" for one in saves if one["outcome"] == "unclear"]
        acknowledged = sorted((one["ended"], _id(one)) for one in saves if one["outcome"] in ("saved", "unfinished"))
        overtaken = {one["value"]: one["ended"] for one in saves if one["outcome"] == "overtaken"}
        ids = {one["value"]: _id(one) for one in saves}

        for began, highest in self._seen:
            least = _highest_before(acknowledged, began)
            if highest is None or highest < least:
                self.findings.problems.append(f"{least} was acknowledged, and later {highest} is the highest index")
        for one in loads:
            value = one.get("value")
            if "error" in one:
                self.findings.loads["failed"] += 1
                self.findings.problems.append(f"a load failed: {one['error']}")
            elif not isinstance(value, int):
                self.findings.loads["mixed"] += 1
                self.findings.problems.append(f"a load found a mixture: {value}")
            else:
                self.findings.loads["whole"] += 1
                least = _highest_before(acknowledged, one["began"])
                if ids[value] < least:
                    self.findings.problems.append(f"{least} was acknowledged, and later {ids[value]} was loaded")
                if overtaken.get(value, one["began"]) < one["began"]:
                    self.findings.problems.append(f"{ids[value]} was overtaken, and was loaded later")


def _id(line: dict[str, Any]) -> Id:
    number, one = line["id"] or (0, "")
    return number, one


def _highest_before(acknowledged: list[tuple[float, Id]], when: float) -> Id:
    return max((one for ended, one in acknowledged if ended < when), default=(0, ""))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


_SHOWN = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Stress each service, and print what came of it; 1 if something was wrong."""
    asked = _parser().parse_args(arguments)
    is_wrong = False
    for scheme in asked.service:
        if lacks := SERVICES[scheme].lacks():
            print(f"{scheme}: {lacks}", file=sys.stderr)
            continue
        odds = Odds(asked.lost, asked.refused, asked.late, asked.late_seconds)
        findings = Stress(scheme, asked.writers, 60 * asked.minutes, odds, asked.seed).run()
        print(f"{scheme}, {asked.writers} writers, {asked.minutes:g} minutes: {findings}", flush=True)
        print(f"{scheme}: {len(findings.problems)} problems", flush=True)
        for problem in findings.problems[:_SHOWN]:
            print(f"{scheme}: {problem}", file=sys.stderr, flush=True)
        is_wrong = is_wrong or bool(findings.problems)
    return int(is_wrong)


def _parser() -> argparse.ArgumentParser:
    odds = Odds()
    parser = argparse.ArgumentParser(prog="scripts/stress_stores", description=__doc__)
    parser.add_argument("--service", nargs="+", default=["s3", "hf"], choices=list(SERVICES))
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lost", type=float, default=odds.lost, help="of 1: carried out, and not answered")
    parser.add_argument("--refused", type=float, default=odds.refused, help="of 1: answered by 503")
    parser.add_argument("--late", type=float, default=odds.late, help="of 1: carried out late")
    parser.add_argument("--late-seconds", type=float, default=odds.late_seconds, help="at most")
    return parser
