"""The sweep of directory hubs: readers find the commits of before or of after a change, and the next push succeeds."""

from __future__ import annotations

import os
import subprocess
import traceback
from dataclasses import dataclass
from pathlib import Path

from hfshard.hub.directory import hub_writer
from hfshard.hub.directory.commit_graph import CommitManifest, commit_id
from hfshard.hub.directory.directory_hub import DirectoryHub
from tests.crash.directory_hub.transitions import LOST, TRANSITIONS, Refs, Transition, push, push_first
from tests.crash.points import Outcome, Point
from tests.crash.suite import Suite
from tests.crash.tracer import Run
from tests.hub.directory.helpers import litter

ENDS = {"kill": {"killed"}, "unsupported": {"saved"}}
"""How the process may end, by kind."""

RAISES_OR_SAVES = {"raised", "saved"}
"""For the other kinds."""

ERRORS = ("FileError", "OSError", "KeyboardInterrupt", "CommitUnfinishedError")
"""What it may raise."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What was there before and after a change."""

    old_commits: frozenset[str]
    new_commits: frozenset[str]
    kept: frozenset[tuple[str, int]]
    """Files and sizes that neither the change nor the next push may remove."""


class DirectoryHubSuite(Suite[Transition, Baseline]):
    """Pushes, branches, tags and removals; the target "hasty" commits too early, and must fail."""

    name = "directory-hub"
    kinds = ("kill", "enospc", "eio", "int", "unsupported")
    fine = ("old", "new")
    failures = ("wrong", "missed")
    inside = "hub"

    def transitions(self) -> tuple[Transition, ...]:
        """Every transition."""
        return TRANSITIONS

    def warm(self, place: Path) -> None:
        """Push once."""
        if self.target == "hasty":
            hub_writer.HubWriter.commit_staged = commit_too_early  # type: ignore[method-assign]
        push_first(str(place / "warm"))

    def build(self, transition: Transition, root: Path) -> Path:
        """Do all that was done before."""
        directory = root / self.inside
        transition.prepare(str(directory))
        return directory

    def copy(self, directory: Path, root: Path) -> Path:
        """Copy; hard links stay what they are."""
        copy = root / self.inside
        if directory.exists():
            subprocess.run(["cp", "-a", str(directory), str(copy)], check=True)
        return copy

    def perform(self, transition: Transition, directory: Path) -> None:
        """The change."""
        transition.act(str(directory))

    def baseline(self, transition: Transition, before: Path, after: Path, run: Run) -> tuple[Baseline, tuple[str, ...]]:
        """What readers find at every ref."""
        problems = []
        if run.report:
            problems.append(f"it warned: {run.report}")
        for place, refs, when in ((before, transition.old, "before"), (after, transition.new, "after")):
            if (found := refs_in(str(place))) != refs:
                problems.append(f"{when} the change: {found}")
        if not transition.is_partial and (left := litter(str(after))):
            problems.append(f"litter after the change: {left}")
        kept = kept_files(str(before)).items() if transition.keeps_commits else ()
        return Baseline(commits(str(before)), commits(str(after)), frozenset(kept)), tuple(problems)

    def judge(self, point: Point[Transition, Baseline], run: Run, directory: Path) -> Outcome:
        """Read every ref and commit, then push once more."""
        try:
            return Outcome(point, _check(point, run, str(directory)))
        except Exception:  # an assertion or not, the trace is the finding
            return Outcome(point, "wrong", [traceback.format_exc(limit=-2)])


def refs_in(root: str) -> Refs:
    """What readers find at every ref; every commit is checked, whether a ref leads to it or not.

    A commit without a manifest was so before: that nothing of it is removed is looked at by itself.
    """
    if not DirectoryHub.is_hub(root):
        return {}
    hub = DirectoryHub.open(root)
    found: Refs = {}
    verified = set()
    for revision in hub.revisions():
        if revision.is_damaged:
            assert "has no manifest" in revision.problem, revision
            if revision.kind != "commit":
                found[revision.name] = LOST
            continue
        if revision.commit not in verified:  # a ref's is that of a commit
            hub.verify(revision.name)
            verified.add(revision.commit)
        folder = Path(hub.snapshot(revision.name))
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        if revision.kind != "commit":
            found[revision.name] = files
    return found


def commits(root: str) -> frozenset[str]:
    """The ids of all commits."""
    if not DirectoryHub.is_hub(root):
        return frozenset()
    found = DirectoryHub.open(root).revisions()
    return frozenset(one.commit for one in found if one.kind == "commit" and not one.is_damaged)


def kept_files(root: str) -> dict[str, int]:
    """Path in the hub -> size of everything that belongs to commits."""
    paths = [path for folder in ("commits", "snapshots") for path in Path(root, folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(root)): path.stat().st_size for path in paths}


def _check(point: Point[Transition, Baseline], run: Run, root: str) -> str:
    """Return "old" or "new".

    Raises:
        AssertionError: It is neither, or the next push does not put all in order.
    """
    transition, baseline = point.recorded.transition, point.recorded.baseline
    assert run.status in ENDS.get(point.kind, RAISES_OR_SAVES), (run.status, run.report)
    found = refs_in(root)
    assert found in (transition.old, transition.new, transition.mended), found
    if run.status == "saved":
        assert found == transition.new, (found, run.report)
    if run.status == "raised":
        assert run.report.split(":")[0] in ERRORS, run.report
    assert commits(root) <= baseline.old_commits | baseline.new_commits

    branch = transition.whole_branch
    pushed = push(root, {"next": b"next"}, "next", revision=branch)

    assert not baseline.kept - kept_files(root).items(), baseline.kept - kept_files(root).items()
    is_new = found == transition.new
    assert refs_in(root)[branch] == found.get(branch, {}) | {"next": b"next"}
    assert transition.is_partial or litter(root) == [], litter(root)
    left = commits(root) - {pushed}
    if transition.old != transition.new:
        are_all_there = is_new or found == transition.mended
        assert left == (baseline.new_commits if are_all_there else baseline.old_commits), (is_new, left)
    else:  # commits that nothing led to are being removed
        assert baseline.new_commits <= left <= baseline.old_commits
    return "new" if is_new else "old"


def commit_too_early(self: hub_writer.HubWriter, manifest: CommitManifest, ref: str) -> str:
    """Commit as it must not be done: the ref is written where readers see it, and before the files are in place."""
    raw = manifest.to_json()
    commit = commit_id(raw)
    for folder in ("commits", "snapshots", os.path.dirname(ref)):
        os.makedirs(os.path.join(self.root, folder), exist_ok=True)
    Path(self.root, "commits", f"{commit}.json").write_bytes(raw)
    Path(self.root, ref).write_text(commit)
    os.rename(self.staged_files, os.path.join(self.root, "snapshots", commit))
    return commit
