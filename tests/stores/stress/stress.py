"""Several writers and a reader beside a service that fails: run them, and judge what they have logged."""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers import forkserver
from tests.helpers.forkserver import Child
from tests.stores.services import running
from tests.stores.services.fault_proxy import FaultProxy
from tests.stores.stress.faults import Odds, RandomFaults
from tests.stores.stress.processes import read, write
from tests.stores.sweep.places import StorePlace, litter, number_and_id

SETTINGS = {"HFSHARD_STORE_RETRY_SECONDS": "16", "HFSHARD_STORE_TIMEOUT": "30"}
"""Of the processes: the sixth try is the last."""
_LOOK_SECONDS = 0.2
"""Between two listings of the monitor."""
_END_SECONDS = 200.0
"""For which a process may go on after it was told to stop: a save may be at its last try."""
_INDEX = "model.safetensors.index.json"

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
            _finish(forkserver.call(write, self.place, self.place.url, 0, folder, {}, 1), _END_SECONDS)
            with FaultProxy(self.place.url, self.place.scheme) as proxy:
                faults = RandomFaults(self.odds, self.seed)
                proxy.faults = faults
                self._run(proxy, folder)
                self.findings.requests = faults.counts
                proxy.release()
            self._judge(folder)
            (folder / "stop").unlink()
            _finish(forkserver.call(write, self.place, self.place.url, self.writers + 1, folder, {}, 1), _END_SECONDS)
            (last,) = _lines(folder / f"writer-{self.writers + 1}")
            if last["outcome"] != "saved":
                self.findings.problems.append(f"the last save, which nothing disturbed: {last}")
        if left := litter(self.place.objects(), {"config.json"}):
            self.findings.problems.append(f"the last save left {left}")
        if unfinished := self.place.bucket.unfinished(self.place.prefix):
            self.findings.problems.append(f"the last save left unfinished uploads of {unfinished}")
        return self.findings

    def _run(self, proxy: FaultProxy, folder: Path) -> None:
        stop = folder / "stop"
        arguments = (self.place, proxy.url)
        processes = [
            forkserver.call(write, *arguments, number, folder, SETTINGS, self.most)
            for number in range(1, self.writers + 1)
        ]
        reader = forkserver.call(read, *arguments, 1, folder, SETTINGS)
        deadline = time.monotonic() + self.seconds
        try:
            while time.monotonic() < deadline and any(one.poll() is None for one in processes):
                self._look()
                time.sleep(_LOOK_SECONDS)
        finally:
            stop.touch()
        for process in (*processes, reader):
            while process.poll() is None and time.monotonic() < deadline + _END_SECONDS:
                self._look()
                time.sleep(_LOOK_SECONDS)
            _finish(process, 0)
        self._look()

    def _look(self) -> None:
        """List the place, past the faults."""
        began = time.monotonic()
        sizes = self.place.bucket.sizes(f"{self.place.prefix}/")
        found = [one for name in sizes if (one := number_and_id(name.rpartition("/")[2])) is not None]
        self._seen.append(
            (began, max(((number, one) for usual, number, one in found if usual == _INDEX), default=None))
        )
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


def _finish(process: Child, seconds: float) -> None:
    with process:
        assert process.wait(max(seconds, 1.0)) == 0, f"a process ended with {process.returncode}"
