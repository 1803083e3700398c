"""The sweep of stores: each request of a save is counted, then broken in every way, and what is left is judged."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from tests.helpers import processes
from tests.helpers.processes import Child
from tests.servers.stores import running
from tests.servers.stores.fault_proxy import FaultProxy
from tests.servers.stores.kinds import SERVICES
from tests.sweeps import store_child
from tests.sweeps.child import Call
from tests.sweeps.directory import FAILURES, Baseline, judge_readers, same
from tests.sweeps.directory_models import Content
from tests.sweeps.directory_readers import Verdict
from tests.sweeps.directory_transitions import Save, Transition, all_transitions
from tests.sweeps.engine import Judgement, Outcome, Point, Recorded, Suite, sweep
from tests.sweeps.store_child import PIPES, Examined, finish
from tests.sweeps.store_places import INDEX, StorePlace, alike, number_and_id, plain_objects

_OF_DIRECTORIES = (
    "fresh->sharded", "bystanders->single", "bystanders->sharded", "single->single+config", "single->sharded",
    "single->sharded+config", "sharded->single", "sharded->single+config", "sharded->sharded",
    "sharded->sharded+config", "sharded->fewer", "sharded->more+config", "bin->sharded", "bin->single+config",
    "sharded-bin->sharded+config", "upstream-sharded->sharded", "upstream-sharded->sharded+config",
    "upstream-sharded->single", "upstream-single->sharded", "upstream-single->sharded+config", "mess->sharded",
    "mess->single+config", "identical-sharded", "single->sharded+keys", "sharded->sharded+shapes",
    "single->sharded+fewer-keys", "variant-sharded-beside-sharded", "variant-half-beside-sharded",
    "variant-over-variant", "default-beside-variant", "strays-beside-sharded->sharded+config", "bare-fresh->sharded",
    "bare-single->sharded", "bare-sharded->sharded", "gpt2-sharded->sharded", "strangers", "net-fresh->sharded",
    "net-sharded->sharded+config", "net-sharded->sharded-config", "reshard-single->sharded",
    "reshard-sharded->single",
)  # fmt: skip

LARGE = "large->large"
"""One shard of 9.4 MB, which is sent in two parts."""

KEPT: Final = "sharded->sharded+kept"
"""Of its shards, all but the last have the tensors that they had: they are copied on the server."""
_KEPT_TENSORS: Final = 20


@cache
def transitions() -> Mapping[str, Transition]:
    """Name -> transition."""
    known = {transition.name: transition for transition in all_transitions()}
    large = [Content(generation, own_config=True, layers=0, hidden=1536) for generation in (1, 2)]
    old, new = (Save(content, "whole") for content in large)
    kept_old, kept_new = (Save(Content(generation, kept=_KEPT_TENSORS), "three") for generation in (1, 2))
    return {name: known[name] for name in _OF_DIRECTORIES} | {
        LARGE: Transition(LARGE, (old,), new),
        KEPT: Transition(KEPT, (kept_old,), kept_new),
    }


ALWAYS = 10**6
SECONDS = 120.0
"""Of a save: hf_xet tries again by itself for more than one minute where everything is down."""
HUNG = "hung"
FINE = ("ok-old", "ok-new", "ok-split", "clear-error", "window", "lone-shard", "late-copy")
"""Categories that do not fail the sweep. All readers find the old checkpoint, or the new one; or some this, some that;
or there was none before, and an error says so. `window`: between the requests that replace plain objects, stock readers
of a synced copy find a config next to other weights. `lone-shard`: there is one shard and no index, and huggingface_hub
takes that. `late-copy`: a plain copy came after the next save, and stock readers find it."""
CONFIG, SINGLE = "config.json", "model.safetensors"
SPLIT_BRAIN = re.compile(r"weights g\d+ beside a config of .*")


@dataclass(frozen=True, slots=True)
class Kind:
    """A way in which a request ends.

    Attributes:
        fault: The arguments of `Fault`.
        signal: What the process that saves gets, just before the connection ends, or before the request is passed on.
        heals: What fails is tried again, and the save succeeds.
        hits: The requests that it means something for: all, those that change something, puts, or deletes.
        is_late: The request is carried out when the save has ended: "before" or "after" the next one.
        is_alone: The same request is refused from then on.
        settings: Of the process that saves.
        not_in: Services with which it can't be done: huggingface_hub waits for ever for an answer of the Hub's own.
    """

    fault: Mapping[str, Any]
    signal: int | None = None
    heals: bool = True
    settings: Mapping[str, str] = field(default_factory=dict)
    not_in: tuple[str, ...] = ()
    hits: str = "all"
    is_late: str = ""
    is_alone: bool = False

    def is_for(self, request: str) -> bool:
        """Whether it means something for a kind of requests."""
        return {
            "all": True,
            "changes": request not in _READS,
            "puts": request not in _READS and "delete" not in request,
            "deletes": "delete" in request or request == "bucket_batch",
        }[self.hits]


_READS = ("list", "uploads", "head", "get", "bucket_tree", "bucket_get", "bucket_head", "bucket_paths", "bucket_info",
          "xet_token", "reconstruction", "xorb_get", "chunk_query", "whoami", "telemetry", "bridge_get")  # fmt: skip
_SOON = {"HFSHARD_STORE_RETRY_SECONDS": "0.5"}
_QUICK = {"HFSHARD_STORE_RETRY_SECONDS": "8"}
_LATE = {"kind": "late", "status": 504}
_IMPATIENT = {"HFSHARD_STORE_TIMEOUT": "1"}
KINDS: Mapping[str, Kind] = {
    "kill": Kind({"kind": "drop"}, signal.SIGKILL, heals=False),
    "kill-done": Kind({"kind": "lost_answer"}, signal.SIGKILL, heals=False, hits="changes"),
    "lost": Kind({"kind": "lost_answer", "how": "rst"}, settings=_QUICK),
    "503": Kind({"kind": "status", "status": 503}, settings=_QUICK),
    "late-put": Kind(_LATE, settings=_QUICK, hits="puts", is_late="before"),
    "late-put-after": Kind(_LATE, settings=_QUICK, hits="puts", is_late="after"),
    "late-delete": Kind(_LATE, settings=_QUICK, hits="deletes", is_late="before"),
    "late-delete-after": Kind(_LATE, settings=_QUICK, hits="deletes", is_late="after"),
    "late-alone": Kind(_LATE, heals=False, settings=_SOON, hits="changes", is_late="before", is_alone=True),
    "late-alone-after": Kind(_LATE, heals=False, settings=_SOON, hits="changes", is_late="after", is_alone=True),
    "int": Kind({"kind": "race"}, signal.SIGINT, heals=False),
    "500": Kind({"kind": "status", "status": 500}),
    "429": Kind({"kind": "status", "status": 429, "retry_after": 1}),
    "reset": Kind({"kind": "drop", "how": "rst"}),
    "cut": Kind({"kind": "drop", "after_bytes": 1, "direction": "up", "how": "rst"}),
    "cut-answer": Kind({"kind": "truncate", "after_bytes": 1}),
    "silent": Kind({"kind": "drop", "how": "silence"}, settings=_IMPATIENT, not_in=("hf",)),
    "lost-silent": Kind({"kind": "lost_answer", "how": "silence"}, settings=_IMPATIENT, not_in=("hf",)),
    "refused": Kind({"kind": "status", "status": 403}, heals=False, settings=_SOON),
    "down": Kind({"kind": "drop", "times": ALWAYS}, heals=False, settings=_SOON),
    "lost-down": Kind({"kind": "lost_answer"}, heals=False, settings=_SOON),
}
USUAL = ("kill", "kill-done", "lost", "503", "late-put", "late-put-after", "late-delete", "late-delete-after",
         "late-alone", "late-alone-after")  # fmt: skip
"""Those that `scripts/store_sweep` tries unless it is told others."""


@dataclass(frozen=True, slots=True)
class StoreBaseline(Baseline):
    """What a transition looks like when nothing is broken, and the objects before and after it."""

    old: Mapping[str, bytes]
    new: Mapping[str, bytes]

    def is_between(self, left: Mapping[str, bytes]) -> bool:
        """Whether some of the plain objects are new, and some are not."""
        plain = alike(plain_objects(left))
        return plain not in (alike(plain_objects(self.old)), alike(plain_objects(self.new)))

    def is_config_ahead(self, left: Mapping[str, bytes]) -> bool:
        """Whether the plain config is new, and the plain weights are old: the two are put one after the other."""

        def is_like(objects: Mapping[str, bytes], *names: str) -> bool:
            there, here = ({name: one[name] for name in names if name in one} for one in (objects, left))
            return alike(there) == alike(here)

        old, new, here = (json.loads(one.get(CONFIG, b"null")) for one in (self.old, self.new, left))
        is_new = here == new != old
        return is_new and is_like(self.old, INDEX, SINGLE) and not is_like(self.new, INDEX, SINGLE)


StoreRecorded = Recorded[Transition, StoreBaseline]
StorePoint = Point[Transition, StoreBaseline]


class StoreSuite(Suite[Transition, StoreBaseline]):
    """The faults of saves into one service.

    Args:
        scheme: The service's.
    """

    name = "stores"
    kinds = tuple(KINDS)
    fine = FINE
    failures = FAILURES

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme
        self._place = StorePlace(scheme, running.url_of(scheme), "sweep")
        self._examined: dict[Any, Examined] = {}

    def transitions(self) -> tuple[Transition, ...]:
        """Every transition."""
        return tuple(transitions().values())

    def warm(self, place: Path) -> None:
        """Nothing: the processes that save are forks of one that has imported everything."""

    def record(self, transition: Transition, place: Path) -> StoreRecorded:
        """Save once, and look at the place before and after; `calls` are the requests."""
        built = self._build(transition)
        old = built.objects()
        before = self._examine(transition, built, is_last=True).found
        done = self._begin(transition, old)
        with FaultProxy(done.url, self.scheme, is_plain=True) as proxy:
            report = self._save(transition, done, proxy.url)
            asked = [(str(one.kind), one.path.partition("?")[0]) for one in proxy.requests()]
        requests = tuple(Call(0, kind, at, path) for at, (kind, path) in enumerate(asked))
        new = done.objects()
        after = self._examine(transition, done, is_last=True)
        problems = [] if report == "saved" else [f"the save: {report}"]
        problems += _not_whole(after)
        baseline = StoreBaseline(before, after.found, {}, old, new)
        return Recorded(transition, place, baseline, requests, place, tuple(problems))

    def points(self, recorded: StoreRecorded, kinds: Sequence[str]) -> list[StorePoint]:
        """All that there is to break by these kinds."""
        some = {name: KINDS[name] for name in kinds if self.scheme not in KINDS[name].not_in}
        calls = list(enumerate(recorded.calls))
        return [Point(recorded, at, name) for name, one in some.items() for at, call in calls if one.is_for(call.name)]

    def stop(self, point: StorePoint, place: Path) -> Outcome:
        """Break one request, and judge."""
        kind, at, transition = KINDS[point.kind], point.ordinal, point.recorded.transition
        there = self._begin(transition, point.recorded.baseline.old)
        with FaultProxy(there.url, self.scheme) as proxy:
            started: list[Child] = []
            is_known = threading.Event()

            def act() -> None:
                is_known.wait(SECONDS)
                if kind.signal is not None:
                    with suppress(ProcessLookupError):  # it has given up waiting meanwhile, and ended
                        os.kill(started[0].pid, kind.signal)
                if kind.is_alone:
                    target = proxy.requests()[at]
                    path = re.escape(target.path.partition("?")[0])
                    proxy.fail("status", f"^{target.method} {target.kind} {path}", status=503, times=ALWAYS)

            first = {"skip": at, "action": act, **kind.fault}
            proxy.fail(**first)
            if point.kind == "lost-down":
                proxy.fail("drop", skip=at, times=ALWAYS)
            arguments = (there, proxy.url, transition, dict(kind.settings))
            started.append(processes.call(store_child.save, *arguments, **PIPES))
            is_known.set()
            try:
                report = finish(started[0], SECONDS, may_be_killed=kind.signal == signal.SIGKILL)
            except subprocess.TimeoutExpired:
                report = HUNG
            request = next((str(one.kind) for one in proxy.requests()[at:]), "none")
            proxy.faults.clear()
            judgement = self._judge(point.recorded, there, proxy, kind, report)
        return Outcome(point, judgement, f"met {request}", report)

    def _judge(
        self, recorded: StoreRecorded, place: StorePlace, proxy: FaultProxy, kind: Kind, report: str
    ) -> Judgement:
        found = Judgement()
        left = place.objects()
        if kind.is_late:
            copy = self._place.with_objects(left)
            _judge_found(recorded, self._examine(recorded.transition, copy), left, kind, report, found)
            if kind.is_late == "after":
                return self._judge_late(recorded, place, proxy, found)
            proxy.release()
            left = place.objects()
        seen = self._examine(recorded.transition, place)
        _judge_found(recorded, seen, left, kind, report, found)
        _judge_next(recorded, seen, found)
        return found.settle(FAILURES, found.category)

    def _judge_late(self, recorded: StoreRecorded, place: StorePlace, proxy: FaultProxy, found: Judgement) -> Judgement:
        """Save again, and then carry out what is late: it changes nothing but plain copies."""
        report = self._save(recorded.transition, place, place.url, is_next=True)
        if report != "saved":
            found.add("unloadable", f"the next save failed: {report}")
        between = place.objects()
        proxy.release()
        objects = place.objects()
        late = {name for name in objects if objects[name] != between.get(name)}
        late_copies = {name for name in late if number_and_id(name) is None}
        lost = between.keys() - objects.keys()
        if lost:
            found.add("wrong", f"a late request deleted {sorted(lost)}")
        unwanted = {f"+{name}" for name in late}
        seen = self._examine(recorded.transition, place)
        for label, verdict in seen.found.items():
            if _is_next(recorded, label, verdict):
                continue
            if late_copies and not _reads_store(label):
                found.category = "late-copy"
            else:
                found.add("wrong", f"after what was late, {label}: {verdict}")
        if set(seen.litter_found.split()) - unwanted and "+" in seen.litter_found:
            known = _examined_names(seen.litter_found, late)
            if known:
                found.add("litter", f"after what was late: {known}")
        seen = replace(seen, unfinished=[])  # of an upload that was begun late; the next save changes nothing here
        _judge_next(recorded, seen, found)
        return found.settle(FAILURES, found.category)

    def _build(self, transition: Transition) -> StorePlace:
        place = self._place.with_objects({})
        finish(processes.call(store_child.build, place, transition, **PIPES), SECONDS)
        return place

    def _begin(self, transition: Transition, old: Mapping[str, bytes]) -> StorePlace:
        """A new place that has what the transition starts from; with the ETags of old where these matter."""
        is_copied = transition.name in (KEPT, "identical-sharded")
        return self._build(transition) if is_copied and self.scheme != "s3" else self._place.with_objects(old)

    def _save(self, transition: Transition, place: StorePlace, url: str, is_next: bool = False) -> str:
        return finish(processes.call(store_child.save, place, url, transition, {}, is_next, **PIPES), SECONDS)

    def _examine(self, transition: Transition, place: StorePlace, is_last: bool = False) -> Examined:
        """Ask all readers in a process of its own, or remember a place with the same objects."""
        unfinished = place.bucket.unfinished(place.prefix)
        key = (transition.name, is_last, len(unfinished), alike(place.objects()))
        if key not in self._examined:
            words = finish(processes.call(store_child.examine, place, transition, is_last, **PIPES), SECONDS)
            self._examined[key] = Examined.from_json(words)
        place.clear()
        return self._examined[key]


def _examined_names(litter: str, late: set[str]) -> list[str]:
    """What is litter beside the late objects, whatever their random digits."""
    usual = {(number_and_id(name) or (name,))[:2] for name in late}
    return [one for one in litter.split() if (number_and_id(one[1:]) or (one[1:],))[:2] not in usual]


def _judge_found(
    recorded: StoreRecorded, seen: Examined, left: Mapping[str, bytes], kind: Kind, report: str, found: Judgement
) -> None:
    """Judge what each reader finds after the save, and set the category if nothing is wrong."""
    baseline = recorded.baseline
    is_between = baseline.is_between(left)

    def excuse(label: str, verdict: Verdict) -> str:
        return "" if _reads_store(label) else _excuse(baseline, label, verdict, left, is_between)

    sides = judge_readers(recorded.transition, baseline, seen.found, found, excuse)
    for label, verdict in seen.found.items():
        if verdict.note and not is_between:
            found.add("wrong", f"{label}: {verdict.note}")
    excuses = sides & {"window", "lone-shard"}
    found.category = min(excuses or sides) if len(excuses or sides) == 1 else "ok-split"
    # Where deletes are refused, what another tool had uploaded still outranks the plain index: the save warns.
    is_new = all(
        same(verdict, baseline.after[label])
        for label, verdict in seen.found.items()
        if _reads_store(label) or not kind.is_alone
    )
    if report == HUNG:
        found.add("hung", "the save did not end")
    if report.startswith("unclear"):
        found.add("wrong", report)
    if report == "saved" and not is_new:
        found.add("wrong", "the save returned, and not all readers find the new checkpoint")
    if report == "saved" and seen.litter_found and not (kind.is_alone or kind.hits == "deletes" or not kind.heals):
        found.add("litter", f"the save returned, and left {seen.litter_found}")
    if kind.heals and report != "saved":
        found.add("unloadable", f"the save gave up: {report}")
    found.readers = {label: str(verdict) for label, verdict in seen.found.items()}


def _excuse(baseline: StoreBaseline, label: str, verdict: Verdict, left: Mapping[str, bytes], is_between: bool) -> str:
    """Return the category of what a stock reader may find beside the old and the new; empty where it may not."""
    has_index = INDEX in left
    files = [name for name in left if name.endswith(".safetensors") and "/" not in name]
    if baseline.is_config_ahead(left):
        return "window"
    if verdict.kind == "error":
        # huggingface_hub refuses several *.safetensors without an index, as they are beside a single file.
        is_refused = label.startswith("hub") and not has_index
        return "window" if verdict.is_clear and (is_between or is_refused) else ""
    if label.startswith("hub") and len(files) == 1 and not has_index:
        return "lone-shard"
    return "window" if is_between and SPLIT_BRAIN.fullmatch(verdict.detail) else ""


def _judge_next(recorded: StoreRecorded, seen: Examined, found: Judgement) -> None:
    """Judge what the next save has left."""
    if seen.failed:
        found.add("unloadable", f"the next save failed: {seen.failed}")
    for label, verdict in seen.after.items():
        if not _is_next(recorded, label, verdict):
            found.add("wrong", f"after the next save, {label}: {verdict}")
    found.problems += [("litter", text) for text in _left(seen)]


def _is_next(recorded: StoreRecorded, label: str, verdict: Verdict) -> bool:
    """Whether a reader finds the next save, if it is to find it at all."""
    transition = recorded.transition
    infix = f"{transition.new.variant}]" if transition.new.variant else ""
    is_asked = recorded.baseline.after[label].kind == "whole" and label.partition("[")[2] == infix
    return not is_asked or (verdict.kind, verdict.generation) == ("whole", transition.next.content.generation)


def _reads_store(label: str) -> bool:
    """Whether a reader of the sweep is hfshard's own, which reads the store."""
    return label.startswith("hfshard") and label != "hfshard of a copy"


def _left(seen: Examined) -> list[str]:
    left = [f"after a save: {seen.litter}"] if seen.litter else []
    return left + [f"an unfinished upload of {key}" for key in seen.unfinished]


def _not_whole(seen: Examined) -> list[str]:
    # huggingface_hub's mixin reads model.safetensors alone, which a checkpoint in a store seldom has.
    odd = {label: each for label, each in seen.found.items() if each.kind != "whole" and label != "hub-mixin"}
    return [f"after the save, {label}: {each}" for label, each in odd.items()] + _left(seen)


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep, and print a table; 1 if something was found."""
    asked = _parser().parse_args(arguments)
    lacking = {scheme: lacks for scheme in asked.service if (lacks := SERVICES[scheme].lacks())}
    for scheme, lacks in lacking.items():
        print(f"{scheme}: {lacks}", file=sys.stderr)
    begin = time.monotonic()
    draw = random.Random(asked.seed)
    names = [name for name in transitions() if any(part in name for part in asked.transition)]
    cases = [(scheme, name) for scheme in asked.service if scheme not in lacking for name in names]
    share, shares = map(int, asked.share.split("/"))
    cases = cases[share - 1 :: shares]
    if asked.sample:
        draw.shuffle(cases)
    print(f"| service | transition | requests | {' | '.join((*FINE, *FAILURES))} |")
    print(f"|---|---|---{'|---' * len((*FINE, *FAILURES))}|")
    total: Counter[str] = Counter()
    for scheme, name in cases:
        if time.monotonic() - begin > asked.seconds:
            print(f"out of time: {scheme} {name} and what follows was not swept", file=sys.stderr)
            break
        total += _sweep(scheme, name, asked, draw)
    print(f"| all | | | {_cells(total)} |")
    return int(any(total[category] for category in FAILURES))


def _sweep(scheme: str, name: str, asked: argparse.Namespace, draw: random.Random) -> Counter[str]:
    """Sweep one transition; prints its row, and each finding to stderr."""
    suite = StoreSuite(scheme)

    def choose(points: Sequence[StorePoint]) -> list[StorePoint]:
        return draw.sample(points, min(asked.sample, len(points))) if asked.sample else list(points)

    def progress(done: int, count: int, outcomes: Sequence[Outcome]) -> None:
        for outcome in suite.failed(outcomes):
            print(f"{scheme}: {outcome}", file=sys.stderr, flush=True)

    [recorded], outcomes = sweep(suite, [transitions()[name]], asked.kind, choose=choose, progress=progress)
    for problem in recorded.problems:
        print(f"{scheme} {name}: {problem}", file=sys.stderr, flush=True)
    counts = Counter(outcome.category for outcome in outcomes)
    counts["wrong"] += len(recorded.problems)
    print(f"| {scheme} | {name} | {len(recorded.calls)} | {_cells(counts)} |", flush=True)
    return counts


def _cells(counts: Counter[str]) -> str:
    return " | ".join(str(counts[category]) for category in (*FINE, *FAILURES))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/store_sweep", description=__doc__)
    parser.add_argument("--service", nargs="+", default=list(SERVICES), choices=list(SERVICES))
    parser.add_argument("--transition", nargs="+", default=[""], metavar="PART", help="those with this in their names")
    parser.add_argument("--kind", nargs="+", default=list(USUAL), choices=list(KINDS))
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="so many points of each transition")
    parser.add_argument("--share", default="1/1", metavar="K/N", help="every N-th transition, from the K-th")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no transition after so long")
    return parser
