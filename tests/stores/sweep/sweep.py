"""The sweep: each request of a save into a store is counted, then broken in every way, and what is left is judged."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from tests.crash.saves.judge import FAILURES, Baseline, Judgement, same
from tests.crash.saves.readers import Verdict
from tests.helpers import forkserver
from tests.helpers.forkserver import Child
from tests.stores.services import running
from tests.stores.services.fault_proxy import FaultProxy
from tests.stores.sweep import child
from tests.stores.sweep.child import Verdicts
from tests.stores.sweep.places import INDEX, StorePlace, alike, number_and_id, plain_objects
from tests.stores.sweep.table import KEPT, transitions

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
        """Whether it means something for a request."""
        word = request.partition(" ")[0]
        return {
            "all": True,
            "changes": word not in _READS,
            "puts": word not in _READS and "delete" not in word,
            "deletes": "delete" in word or word == "bucket_batch",
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
    litter_found: str
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
        built = self._build()
        self.old = built.objects()
        old = self._examine(built, is_last=True).found
        done = self._begin()
        with FaultProxy(done.url, scheme, is_plain=True) as proxy:
            report = self._save(done, proxy)
            self.requests = [f"{request.kind} {request.path.partition('?')[0]}" for request in proxy.requests()]
        self.new = done.objects()
        after = self._examine(done, is_last=True)
        self.baseline = Baseline(old, after.found, {})
        self.problems = [] if report == "saved" else [f"the save: {report}"]
        self.problems += _not_whole(after)

    def points(self, names: list[str]) -> list[tuple[str, int]]:
        """All that there is to break by these kinds."""
        kinds = {name: KINDS[name] for name in names if self.scheme not in KINDS[name].not_in}
        return [(name, at) for name, one in kinds.items() for at, r in enumerate(self.requests) if one.is_for(r)]

    def break_at(self, name: str, at: int) -> Result:
        """Break one request, and judge."""
        kind = KINDS[name]
        place = self._begin()
        with FaultProxy(place.url, self.scheme) as proxy:
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
            if name == "lost-down":
                proxy.fail("drop", skip=at, times=ALWAYS)
            started.append(forkserver.call(child.save, place, proxy.url, self.name, dict(kind.settings), **_STREAMS))
            is_known.set()
            try:
                report = _finish(started[0], may_be_killed=kind.signal == signal.SIGKILL)
            except subprocess.TimeoutExpired:
                report = HUNG
            request = next((str(one.kind) for one in proxy.requests()[at:]), "none")
            proxy.faults.clear()
            judgement = self._judge(place, proxy, kind, report)
        return Result(self.scheme, self.name, name, at, request, report, judgement)

    def _judge(self, place: StorePlace, proxy: FaultProxy, kind: Kind, report: str) -> Judgement:
        found = Judgement()
        left = place.objects()
        if kind.is_late:
            found.readers = self._judge_found(self._examine_copy(left), left, kind, report, found)
            if kind.is_late == "before":
                proxy.release()
                left = place.objects()
            else:
                return self._judge_late(place, proxy, found)
        seen = self._examine(place)
        found.readers = self._judge_found(seen, left, kind, report, found)
        self._judge_next(seen, found)
        return found.settle(found.category)

    def _judge_late(self, place: StorePlace, proxy: FaultProxy, found: Judgement) -> Judgement:
        """Save again, and then carry out what is late: it changes nothing but plain copies."""
        report = _finish(forkserver.call(child.save, place, place.url, self.name, {}, True, **_STREAMS))
        if report != "saved":
            found.problems.append(("unloadable", f"the next save failed: {report}"))
        between = place.objects()
        proxy.release()
        objects = place.objects()
        late = {name for name in objects if objects[name] != between.get(name)}
        late_copies = {name for name in late if number_and_id(name) is None}
        lost = between.keys() - objects.keys()
        if lost:
            found.problems.append(("wrong", f"a late request deleted {sorted(lost)}"))
        unwanted = {f"+{name}" for name in late}
        seen = self._examine(place)
        for label, verdict in seen.found.items():
            if self._is_next(label, verdict):
                continue
            if late_copies and not _reads_store(label):
                found.category = "late-copy"
            else:
                found.problems.append(("wrong", f"after what was late, {label}: {verdict}"))
        if set(seen.litter_found.split()) - unwanted and "+" in seen.litter_found:
            known = self._examined_names(seen.litter_found, late)
            if known:
                found.problems.append(("litter", f"after what was late: {known}"))
        seen = replace(seen, unfinished=[])  # of an upload that was begun late; the next save changes nothing here
        self._judge_next(seen, found)
        return found.settle(found.category)

    @staticmethod
    def _examined_names(litter: str, late: set[str]) -> list[str]:
        """What is litter beside the late objects, whatever their random digits."""
        usual = {(number_and_id(name) or (name,))[:2] for name in late}
        return [one for one in litter.split() if (number_and_id(one[1:]) or (one[1:],))[:2] not in usual]

    def _judge_found(
        self, seen: _Examined, left: Mapping[str, bytes], kind: Kind, report: str, found: Judgement
    ) -> dict[str, str]:
        """Judge what each reader finds after the save, and set the category if nothing is wrong."""
        is_between = self._is_between(left)
        sides = set()
        for label, verdict in seen.found.items():
            old, new = self.baseline.before[label], self.baseline.after[label]
            if verdict.kind == old.kind == "error":
                if not verdict.is_clear:
                    found.problems.append(("unloadable", f"{label}: unclear {verdict}"))
                sides.add("clear-error" if not self.transition.before else "ok-old")
            elif same(verdict, new):
                sides.add("ok-new" if not same(old, new) else "either")
            elif same(verdict, old):
                sides.add("ok-old")
            elif not _reads_store(label) and (excuse := self._excuse(label, verdict, left, is_between)):
                sides.add(excuse)
            else:
                category = "unloadable" if verdict.kind == "error" else "wrong"
                found.problems.append((category, f"{label}: {verdict}, before {old}, after {new}"))
            if verdict.note and not is_between:
                found.problems.append(("wrong", f"{label}: {verdict.note}"))
        sides = sides - {"either"} if sides != {"either"} else {"ok-new"}
        excuses = sides & {"window", "lone-shard"}
        found.category = min(excuses or sides) if len(excuses or sides) == 1 else "ok-split"
        # Where deletes are refused, what another tool had uploaded still outranks the plain index: the save warns.
        is_new = all(
            same(verdict, self.baseline.after[label])
            for label, verdict in seen.found.items()
            if _reads_store(label) or not kind.is_alone
        )
        if report == HUNG:
            found.problems.append(("hung", "the save did not end"))
        if report.startswith("unclear"):
            found.problems.append(("wrong", report))
        if report == "saved" and not is_new:
            found.problems.append(("wrong", "the save returned, and not all readers find the new checkpoint"))
        if report == "saved" and seen.litter_found and not (kind.is_alone or kind.hits == "deletes" or not kind.heals):
            found.problems.append(("litter", f"the save returned, and left {seen.litter_found}"))
        if kind.heals and report != "saved":
            found.problems.append(("unloadable", f"the save gave up: {report}"))
        return {label: str(verdict) for label, verdict in seen.found.items()}

    def _judge_next(self, seen: _Examined, found: Judgement) -> None:
        """Judge what the next save has left."""
        if seen.failed:
            found.problems.append(("unloadable", f"the next save failed: {seen.failed}"))
        for label, verdict in seen.after.items():
            if not self._is_next(label, verdict):
                found.problems.append(("wrong", f"after the next save, {label}: {verdict}"))
        found.problems += [("litter", text) for text in _left(seen)]

    def _is_next(self, label: str, verdict: Verdict) -> bool:
        """Whether a reader finds the next save, if it is to find it at all."""
        is_asked = self.baseline.after[label].kind == "whole" and label.partition("[")[2] == self._infix
        new = self.transition.next.content.generation
        return not is_asked or (verdict.kind, verdict.generation) == ("whole", new)

    def _is_between(self, left: Mapping[str, bytes]) -> bool:
        """Whether some of the plain objects are new, and some are not."""
        plain = alike(plain_objects(left))
        return plain not in (alike(plain_objects(self.old)), alike(plain_objects(self.new)))

    def _is_config_ahead(self, left: Mapping[str, bytes]) -> bool:
        """Whether the plain config is new, and the plain weights are old: the two are put one after the other."""

        def is_like(objects: Mapping[str, bytes], *names: str) -> bool:
            there, here = ({name: one[name] for name in names if name in one} for one in (objects, left))
            return alike(there) == alike(here)

        old, new, here = (json.loads(one.get(CONFIG, b"null")) for one in (self.old, self.new, left))
        is_new = here == new != old
        return is_new and is_like(self.old, INDEX, SINGLE) and not is_like(self.new, INDEX, SINGLE)

    def _excuse(self, label: str, verdict: Verdict, left: Mapping[str, bytes], is_between: bool) -> str:
        """Return the category of what a stock reader may find beside the old and the new; empty where it may not."""
        has_index = INDEX in left
        files = [name for name in left if name.endswith(".safetensors") and "/" not in name]
        if self._is_config_ahead(left):
            return "window"
        if verdict.kind == "error":
            # huggingface_hub refuses several *.safetensors without an index, as they are beside a single file.
            is_refused = label.startswith("hub") and not has_index
            return "window" if verdict.is_clear and (is_between or is_refused) else ""
        if label.startswith("hub") and len(files) == 1 and not has_index:
            return "lone-shard"
        return "window" if is_between and SPLIT_BRAIN.fullmatch(verdict.detail) else ""

    @property
    def _infix(self) -> str:
        variant = self.transition.new.variant
        return f"{variant}]" if variant else ""

    def _build(self) -> StorePlace:
        place = self._place.with_objects({})
        _finish(forkserver.call(child.build, place, self.name, **_STREAMS))
        return place

    def _begin(self) -> StorePlace:
        """A new place that has what the transition starts from; with the ETags of old where these matter."""
        is_copied = self.name in (KEPT, "identical-sharded")
        return self._build() if is_copied and self.scheme != "s3" else self._place.with_objects(self.old)

    def _save(self, place: StorePlace, proxy: FaultProxy) -> str:
        return _finish(forkserver.call(child.save, place, proxy.url, self.name, {}, **_STREAMS))

    def _examine_copy(self, objects: Mapping[str, bytes]) -> _Examined:
        return self._examine(self._place.with_objects(objects))

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


def _reads_store(label: str) -> bool:
    """Whether a reader of the sweep is hfshard's own, which reads the store."""
    return label.startswith("hfshard") and label != "hfshard of a copy"


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
        found["litter_found"],
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
