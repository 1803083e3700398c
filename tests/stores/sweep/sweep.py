"""The sweep: each request of a save into a store is counted, then broken in every way, and what is left is judged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.crash.saves.judge import FAILURES, Baseline, Judgement, judge_readers, same
from tests.helpers import forkserver
from tests.helpers.forkserver import Child
from tests.stores.services import running
from tests.stores.services.fault_proxy import FaultProxy
from tests.stores.sweep import child
from tests.stores.sweep.child import Verdicts
from tests.stores.sweep.places import StorePlace, alike
from tests.stores.sweep.table import transitions

ALWAYS = 10**6
SECONDS = 120.0
"""Of a save: hf_xet tries again by itself for more than one minute where everything is down."""
HUNG = "hung"


@dataclass(frozen=True, slots=True)
class Kind:
    """A way in which a request ends.

    Attributes:
        fault: The arguments of `Fault`.
        signal: What the process that saves gets, just before the connection ends, or before the request is passed on.
        heals: What fails is tried again, and the save succeeds.
        settings: Of the process that saves.
        not_in: Services with which it can't be done: huggingface_hub waits for ever for an answer of the Hub's own.
    """

    fault: Mapping[str, Any]
    signal: int | None = None
    heals: bool = True
    settings: Mapping[str, str] = field(default_factory=dict)
    not_in: tuple[str, ...] = ()


_SOON = {"HFSHARD_STORE_RETRY_SECONDS": "0.5"}
_IMPATIENT = {"HFSHARD_STORE_TIMEOUT": "1"}
KINDS: Mapping[str, Kind] = {
    "kill": Kind({"kind": "drop"}, signal.SIGKILL, heals=False),
    "kill-done": Kind({"kind": "lost_answer"}, signal.SIGKILL, heals=False),
    "int": Kind({"kind": "race"}, signal.SIGINT, heals=False),
    "500": Kind({"kind": "status", "status": 500}),
    "503": Kind({"kind": "status", "status": 503, "retry_after": 1}),
    "429": Kind({"kind": "status", "status": 429, "retry_after": 1}),
    "reset": Kind({"kind": "drop", "how": "rst"}),
    "cut": Kind({"kind": "drop", "after_bytes": 1, "direction": "up", "how": "rst"}),
    "cut-answer": Kind({"kind": "truncate", "after_bytes": 1}),
    "lost": Kind({"kind": "lost_answer", "how": "rst"}),
    "silent": Kind({"kind": "drop", "how": "silence"}, settings=_IMPATIENT, not_in=("hf",)),
    "lost-silent": Kind({"kind": "lost_answer", "how": "silence"}, settings=_IMPATIENT, not_in=("hf",)),
    "refused": Kind({"kind": "status", "status": 403}, heals=False, settings=_SOON),
    "down": Kind({"kind": "drop", "times": ALWAYS}, heals=False, settings=_SOON),
    "lost-down": Kind({"kind": "lost_answer"}, heals=False, settings=_SOON),
}


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one fault."""

    scheme: str
    transition: str
    kind: str
    at: int
    """Which request, from 0."""
    request: str
    """What it was."""
    report: str
    """What the save said; empty if it was killed."""
    judgement: Judgement

    @property
    def is_failure(self) -> bool:
        """Whether the sweep has found something."""
        return self.judgement.category in FAILURES

    def __str__(self) -> str:
        problems = "; ".join(f"{category}: {text}" for category, text in self.judgement.problems)
        at = f"{self.scheme} {self.transition} {self.kind}@{self.at} ({self.request})"
        return f"{at}: {self.judgement.category}. {self.report}. {problems}"


@dataclass(frozen=True, slots=True)
class _Examined:
    found: Verdicts
    after: Verdicts
    failed: str
    litter: str
    unfinished: list[str]


class Sweep:
    """The faults of one transition in one service.

    Args:
        scheme: The service's.
        name: The transition's.
    """

    def __init__(self, scheme: str, name: str) -> None:
        self.scheme = scheme
        self.name = name
        self.transition = transitions()[name]
        self._place = StorePlace(scheme, running.url_of(scheme), "sweep")
        self._examined: dict[Any, _Examined] = {}
        built = self._place.with_objects({})
        _finish(forkserver.call(child.build, built, name, **_STREAMS))
        self.old = built.objects()
        old = self._examine(built, is_last=True).found
        done = self._place.with_objects(self.old)
        with FaultProxy(done.url, scheme) as proxy:
            report = _finish(forkserver.call(child.save, done, proxy.url, name, {}, **_STREAMS))
            self.requests = [f"{request.kind} {request.path.partition('?')[0]}" for request in proxy.requests()]
        after = self._examine(done, is_last=True)
        self.baseline = Baseline(old, after.found, {})
        self.problems = [] if report == "saved" else [f"the save: {report}"]
        self.problems += _not_whole(after)

    def break_at(self, name: str, at: int) -> Result:
        """Break one request, and judge."""
        kind = KINDS[name]
        place = self._place.with_objects(self.old)
        with FaultProxy(place.url, self.scheme) as proxy:
            started: list[Child] = []
            is_known = threading.Event()

            def act() -> None:
                is_known.wait(SECONDS)
                if kind.signal is not None:
                    os.kill(started[0].pid, kind.signal)

            first = {"skip": at, "action": act, **kind.fault}
            proxy.fail(**first)
            if name == "lost-down":
                proxy.fail("drop", skip=at, times=ALWAYS)
            started.append(forkserver.call(child.save, place, proxy.url, self.name, dict(kind.settings), **_STREAMS))
            is_known.set()
            try:
                report = _finish(started[0], may_be_killed=kind.signal == signal.SIGKILL)
            except subprocess.TimeoutExpired:
                report = HUNG
            request = next((str(one.kind) for one in proxy.requests()[at:]), "none")
        return Result(self.scheme, self.name, name, at, request, report, self._judge(place, kind, report))

    def _judge(self, place: StorePlace, kind: Kind, report: str) -> Judgement:
        seen = self._examine(place)
        found = Judgement()
        found.readers = {label: str(verdict) for label, verdict in seen.found.items()}
        quiet = judge_readers(self.transition, self.baseline, seen.found, found)
        is_new = all(same(verdict, self.baseline.after[label]) for label, verdict in seen.found.items())
        if report == HUNG:
            found.problems.append(("hung", "the save did not end"))
        if report.startswith("unclear"):
            found.problems.append(("wrong", report))
        if report == "saved" and not is_new:
            found.problems.append(("wrong", "the save returned, and not all readers find the new checkpoint"))
        if kind.heals and report != "saved":
            found.problems.append(("unloadable", f"the save gave up: {report}"))
        if seen.failed:
            found.problems.append(("unloadable", f"the next save failed: {seen.failed}"))
        new = self.transition.next.content.generation
        for label, verdict in seen.after.items():
            is_asked = self.baseline.after[label].kind == "whole" and label.partition("[")[2] == self._infix
            if is_asked and (verdict.kind, verdict.generation) != ("whole", new):
                found.problems.append(("wrong", f"after the next save, {label}: {verdict}"))
        found.problems += [("litter", text) for text in _left(seen)]
        return found.settle(quiet)

    @property
    def _infix(self) -> str:
        variant = self.transition.new.variant
        return f"{variant}]" if variant else ""

    def _examine(self, place: StorePlace, is_last: bool = False) -> _Examined:
        """Ask all readers in a process of its own, or remember a place with the same objects."""
        unfinished = place.bucket.unfinished(place.prefix)
        key = (is_last, len(unfinished), alike(place.objects()))
        if key not in self._examined:
            self._examined[key] = _examined(
                _finish(forkserver.call(child.examine, place, self.name, is_last, **_STREAMS))
            )
        place.clear()
        return self._examined[key]


_STREAMS: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def _finish(process: Child, may_be_killed: bool = False) -> str:
    """What a process printed.

    Raises:
        RuntimeError: It ended in another way than it should.
    """
    with process:
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        out = process.stdout.read() if process.stdout else ""
        words = process.stderr.read() if process.stderr else ""
    if code != 0 and not (may_be_killed and code == -signal.SIGKILL):
        raise RuntimeError(f"A process of the sweep ended with {code}: {out} {words}")
    return out


def _examined(text: str) -> _Examined:
    found = json.loads(text)
    return _Examined(
        child.verdicts_of(found["found"]),
        child.verdicts_of(found["after"]),
        found.get("failed", ""),
        found["litter"],
        found["unfinished"],
    )


def _left(seen: _Examined) -> list[str]:
    left = [f"after a save: {seen.litter}"] if seen.litter else []
    return left + [f"an unfinished upload of {key}" for key in seen.unfinished]


def _not_whole(seen: _Examined) -> list[str]:
    # huggingface_hub's mixin reads model.safetensors alone, which a checkpoint in a store seldom has.
    odd = {label: each for label, each in seen.found.items() if each.kind != "whole" and label != "hub-mixin"}
    return [f"after the save, {label}: {each}" for label, each in odd.items()] + _left(seen)
