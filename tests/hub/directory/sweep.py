"""Stop changes of a directory hub at each of their file-changing system calls, and see what a reader then finds.

Run: python -m tests.hub.directory.sweep [--kinds kill,enospc,eio,int,unsupported] [--scenario NAME] [--sample N]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hfshard.hub.directory import locked_hub as directory_writing
from hfshard.hub.directory.hub import DirectoryHub
from hfshard.hub.directory.manifest import CommitManifest, commit_id
from hfshard.storage.disk.byte_source import ByteSource, BytesSource
from tests.crash.tracer import Call, Run, hidden_writes, traced

INJECTIONS = {
    "kill": "signal=KILL:when={k}",
    "int": "signal=INT:when={k}",
    "enospc": "error=ENOSPC:when={k}",
    "eio": "error=EIO:when={k}",
    "unsupported": "error=EOPNOTSUPP:when={k}+",
}
"""What happens at a call, in strace's words."""
HAS_FALLBACK = frozenset({"rename", "link", "fsync", "flock", "fchmod"})
"""Calls that some file systems do not know: then a push does without."""

Files = dict[str, bytes]
Refs = dict[str, Files]

FIRST: Files = {"config.json": b"{}", "a.bin": b"a" * 9000, "b.bin": b"b" * 70, "old.bin": b"o", "sub/x.txt": b"x"}
SECOND: Files = {"config.json": b"{}", "a.bin": b"a" * 9000, "b.bin": b"B" * 70, "sub/x.txt": b"x", "sub/y/z": b"new"}


@dataclass(frozen=True, slots=True)
class Scenario:
    """A change of a hub.

    Attributes:
        name: For the report.
        prepare: Makes what is there before, at a path.
        act: The change that is stopped.
        old: What readers find at every ref before it.
        new: After it.
    """

    name: str
    prepare: Callable[[str], object]
    act: Callable[[str], object]
    old: Refs
    new: Refs


def push(root: str, files: Mapping[str, bytes | None], message: str, **options: object) -> str:
    """Commit on top of what the branch is at."""
    hub = DirectoryHub.create(root)
    revision = str(options.pop("revision", "main"))
    tree = hub.tree(revision)
    parent = tree.commit or None if tree is not None else hub.resolve()
    changes: dict[str, ByteSource | None] = {
        path: None if raw is None else BytesSource(raw) if path != "b.bin" else Unhashed(raw)
        for path, raw in files.items()
    }
    return hub.commit(changes, parent=parent, revision=revision, message=message, **options).commit  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Unhashed:
    """Contents whose hash nobody knows before they are copied."""

    raw: bytes
    sha256: None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.raw)

    def open(self) -> io.BufferedIOBase:
        """A reader over the bytes."""
        return io.BytesIO(self.raw)


def push_first(root: str) -> str:
    return push(root, FIRST, "first")


def push_second(root: str, **options: object) -> str:
    changed: dict[str, bytes | None] = {path: SECOND[path] for path in ("b.bin", "sub/y/z")}
    return push(root, {**changed, "old.bin": None}, "second", **options)


def both(root: str) -> None:
    push_first(root)
    push_second(root)


def with_branch(root: str) -> None:
    push_first(root)
    DirectoryHub.open(root).branch("dev/x")


def with_lost_commits(root: str) -> None:
    """Two commits that nothing leads to, on top of the first one."""
    push_first(root)
    hub = DirectoryHub.open(root)
    hub.branch("dev/x")
    push_second(root, revision="dev/x")
    push(root, {"b.bin": b"third" * 999}, "third", revision="dev/x")
    hub.delete("dev/x")


def delete_lost_commit(root: str) -> None:
    hub = DirectoryHub.open(root)
    hub.delete(next(revision.commit for revision in hub.revisions() if revision.message == "third"))


SCENARIOS = [
    Scenario("first", lambda root: None, push_first, {}, {"main": FIRST}),
    Scenario("second", push_first, push_second, {"main": FIRST}, {"main": SECOND}),
    Scenario("back-to-known", both, lambda root: push(root, FIRST, "back"), {"main": SECOND}, {"main": SECOND | FIRST}),
    Scenario(
        "to-new-branch",
        push_first,
        lambda root: push_second(root, revision="dev/x"),
        {"main": FIRST},
        {"main": FIRST, "dev/x": SECOND},
    ),
    Scenario(
        "pull-request",
        push_first,
        lambda root: push_second(root, create_pr=True),
        {"main": FIRST},
        {"main": FIRST, "refs/pr/1": SECOND},
    ),
    Scenario("known-commit", with_lost_commits, push_second, {"main": FIRST}, {"main": SECOND}),
    Scenario(
        "branch",
        push_first,
        lambda root: DirectoryHub.open(root).branch("dev/x"),
        {"main": FIRST},
        {"main": FIRST, "dev/x": FIRST},
    ),
    Scenario(
        "tag",
        push_first,
        lambda root: DirectoryHub.open(root).tag("v1"),
        {"main": FIRST},
        {"main": FIRST, "v1": FIRST},
    ),
    Scenario(
        "delete-branch",
        with_branch,
        lambda root: DirectoryHub.open(root).delete("dev/x"),
        {"main": FIRST, "dev/x": FIRST},
        {"main": FIRST},
    ),
    Scenario("delete-commit", with_lost_commits, delete_lost_commit, {"main": FIRST}, {"main": FIRST}),
    Scenario(
        "prune", with_lost_commits, lambda root: DirectoryHub.open(root).prune(), {"main": FIRST}, {"main": FIRST}
    ),
]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A scenario, recorded."""

    scenario: Scenario
    template: Path
    calls: tuple[Call, ...]
    old_commits: frozenset[str]
    new_commits: frozenset[str]


@dataclass(frozen=True, slots=True)
class Point:
    """One way to stop one change."""

    prepared: Prepared
    ordinal: int
    kind: str

    @property
    def label(self) -> str:
        """For the report."""
        call = self.prepared.calls[self.ordinal]
        return f"{self.prepared.scenario.name} {self.kind} at {self.ordinal}: {call.name}({call.text[:150]}"


def seen(root: str) -> Refs:
    """What readers find at every ref; every commit is checked, whether a ref leads to it or not."""
    if not DirectoryHub.is_hub(root):
        return {}
    hub = DirectoryHub.open(root)
    found: Refs = {}
    for revision in hub.revisions():
        assert not revision.is_damaged, revision
        hub.verify(revision.name)
        folder = Path(hub.snapshot(revision.name))
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        if revision.kind != "commit":
            found[revision.name] = files
    return found


def commits(root: str) -> frozenset[str]:
    """The ids of all commits."""
    if not DirectoryHub.is_hub(root):
        return frozenset()
    return frozenset(one.commit for one in DirectoryHub.open(root).revisions() if one.kind == "commit")


def litter(root: str) -> list[str]:
    """What lies in a hub at rest that has no business there."""
    top = set(os.listdir(root)) - {"commits", "snapshots", "refs", "hfshard-hub.json"}
    ids = {name.removesuffix(".json") for name in os.listdir(f"{root}/commits")}
    lost = set(os.listdir(f"{root}/snapshots")) ^ ids
    empty = [base for base, folders, files in os.walk(f"{root}/refs/heads") if not folders and not files]
    return sorted([*top, *lost, *empty])


def prepare(scenario: Scenario, place: Path) -> Prepared:
    """Record the whole change, and check that it does what it says."""
    template, trial = place / f"{scenario.name}-template", place / f"{scenario.name}-trial"
    template.mkdir()
    scenario.prepare(str(template / "hub"))
    shutil.copytree(template, trial)
    root = str(trial / "hub")
    before = commits(root)
    run = traced(lambda: _do(scenario, root), place / "trace")
    assert run.status == "saved", (scenario.name, run.report)
    assert not run.report, (scenario.name, run.report)
    assert not hidden_writes(run.calls, trial)
    assert seen(str(template / "hub")) == scenario.old, scenario.name
    assert seen(root) == scenario.new, scenario.name
    assert litter(root) == [], (scenario.name, litter(root))
    calls = tuple(call for call in run.calls if call.changes(trial))
    return Prepared(scenario, template, calls, before, commits(root))


def _do(scenario: Scenario, root: str) -> None:
    scenario.act(root)


def points_of(prepared: Prepared, kinds: list[str]) -> list[Point]:
    """Every way to stop a change; a call that some file systems do not know is missing from its first use on."""
    points = []
    for kind in kinds:
        names: set[str] = set()
        for ordinal, call in enumerate(prepared.calls):
            if kind == "unsupported" and (call.name not in HAS_FALLBACK or call.name in names):
                continue
            names.add(call.name)
            points.append(Point(prepared, ordinal, kind))
    return points


def stop(set_ref: Point, place: Path) -> Run:
    """Stop a change at a point, and check what is left.

    Raises:
        AssertionError: It is not what it must be.
    """
    scenario, call = set_ref.prepared.scenario, set_ref.prepared.calls[set_ref.ordinal]
    work = Path(tempfile.mkdtemp(dir=place))
    try:
        copy = work / "copy"
        # Hard links stay what they are.
        subprocess.run(["cp", "-a", str(set_ref.prepared.template), str(copy)], check=True)
        root = str(copy / "hub")
        inject = f"{call.name}:{INJECTIONS[set_ref.kind].format(k=call.k)}"
        run = traced(lambda: _do(scenario, root), work / "trace", inject)
        _check(set_ref, run, root)
        return run
    finally:
        shutil.rmtree(work)


def _check(set_ref: Point, run: Run, root: str) -> None:
    scenario, prepared = set_ref.prepared.scenario, set_ref.prepared
    allowed = {"kill": {"killed"}, "unsupported": {"saved"}}.get(set_ref.kind, {"raised", "saved"})
    assert run.status in allowed, (run.status, run.report)
    found = seen(root)
    assert found in (scenario.old, scenario.new), found
    if run.status == "saved":
        assert found == scenario.new, (found, run.report)
    if run.status == "raised":
        assert run.report.split(":")[0] in ("OSError", "KeyboardInterrupt", "CommitUnfinishedError"), run.report
    before_next = commits(root)
    is_new = found == scenario.new
    assert before_next <= prepared.old_commits | prepared.new_commits
    pushed = push(root, {"next": b"next"}, "next")
    assert seen(root)["main"] == found.get("main", {}) | {"next": b"next"}
    assert litter(root) == [], litter(root)
    left = commits(root) - {pushed}
    if scenario.old != scenario.new:
        assert left == (prepared.new_commits if is_new else prepared.old_commits), (is_new, left)
    else:  # commits that nothing led to are being removed
        assert prepared.new_commits <= left <= prepared.old_commits


def publish_too_early(self: directory_writing.HubWriter, manifest: CommitManifest, ref: str) -> str:
    """A push as it must not be: the ref is written where readers see it, and before the files are in place."""
    raw = manifest.to_json()
    commit = commit_id(raw)
    for folder in ("commits", "snapshots", os.path.dirname(ref)):
        os.makedirs(os.path.join(self.root, folder), exist_ok=True)
    Path(self.root, "commits", f"{commit}.json").write_bytes(raw)
    Path(self.root, ref).write_text(commit)
    os.rename(self.staged_files, os.path.join(self.root, "snapshots", commit))
    return commit


def main(arguments: list[str] | None = None) -> int:
    """Run the sweep; 0 where nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default="kill,enospc,eio,int,unsupported")
    parser.add_argument("--scenario", action="append", choices=[one.name for one in SCENARIOS])
    parser.add_argument("--sample", type=int, help="so many points, drawn evenly by a fixed seed")
    parser.add_argument("--broken", action="store_true", help="with a push that commits too early: the sweep must fail")
    parser.add_argument("--place", default="/dev/shm" if os.path.isdir("/dev/shm") else None)
    options = parser.parse_args(arguments)
    logging.getLogger("hfshard").addHandler(logging.NullHandler())
    if options.broken:
        directory_writing.HubWriter.commit_staged = publish_too_early  # type: ignore[method-assign]
    make_staging = time.monotonic()
    failed: list[str] = []
    statuses: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(dir=options.place) as name:
        place = Path(name)
        push_first(str(place / "warm"))  # so that no child imports a module in the middle
        chosen = [one for one in SCENARIOS if options.scenario is None or one.name in options.scenario]
        prepared = [prepare(scenario, place) for scenario in chosen]
        points = [set_ref for one in prepared for set_ref in points_of(one, options.kinds.split(","))]
        if options.sample is not None and options.sample < len(points):
            points = random.Random(0).sample(points, options.sample)
        for set_ref in points:
            try:
                statuses[f"{set_ref.kind} {stop(set_ref, place).status}"] += 1
            except Exception:
                failed.append(f"{set_ref.label}\n{traceback.format_exc(limit=-2)}")
    with contextlib.suppress(BrokenPipeError):
        print("\n".join(failed[:8]))
        print(", ".join(f"{one.scenario.name} {len(one.calls)} calls" for one in prepared))
        print(dict(sorted(statuses.items())))
        print(f"{len(points)} points, {len(failed)} failed, {time.monotonic() - make_staging:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
