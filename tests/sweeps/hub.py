"""The sweep of directory hubs: readers find the commits of before or of after a change, and the next push succeeds."""

from __future__ import annotations

import io
import os
import subprocess
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hfshard.disk.byte_source import ByteSource, BytesSource
from hfshard.hub.directory import hub_writer
from hfshard.hub.directory.commit_graph import CommitManifest, commit_id
from hfshard.hub.directory.directory_hub import DirectoryHub
from tests.hub.directory.helpers import files_at, litter
from tests.sweeps.child import Run
from tests.sweeps.engine import Judgement, Point, TracedSuite, files_below

Files = dict[str, bytes]
Refs = dict[str, Files]

FIRST: Files = {"config.json": b"{}", "a.bin": b"a" * 9000, "b.bin": b"b" * 70, "old.bin": b"o", "sub/x.txt": b"x"}
SECOND: Files = {"config.json": b"{}", "a.bin": b"a" * 9000, "b.bin": b"B" * 70, "sub/x.txt": b"x", "sub/y/z": b"new"}


@dataclass(frozen=True, slots=True)
class Transition:
    """A change of a hub.

    Attributes:
        name: As `--transition` takes it.
        prepare: Makes what is there before, at a path.
        act: The change that is stopped.
        old: What readers find at every ref before it.
        new: After it.
        is_partial: Whether something was lost before, so that some commits have a snapshot or a manifest alone.
        keeps_commits: Whether no commit is removed.
        whole_branch: The branch that can be pushed to afterwards.
        mended: What readers find too where the change first puts a lost commit in order.
    """

    name: str
    prepare: Callable[[str], object]
    act: Callable[[str], object]
    old: Refs
    new: Refs
    is_partial: bool = False
    keeps_commits: bool = True
    whole_branch: str = "main"
    mended: Refs | None = None


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
    make_branch(root)


def with_lost_commits(root: str) -> None:
    """Two commits that nothing leads to, on top of the first one."""
    push_first(root)
    hub = DirectoryHub.open(root)
    hub.branch("dev/x")
    push_second(root, revision="dev/x")
    push(root, {"b.bin": b"third" * 999}, "third", revision="dev/x")
    hub.delete("dev/x")


def nothing(root: str) -> None:
    """There is no hub yet."""


def make_branch(root: str) -> None:
    DirectoryHub.open(root).branch("dev/x")


def make_tag(root: str) -> None:
    DirectoryHub.open(root).tag("v1")


def delete_branch(root: str) -> None:
    DirectoryHub.open(root).delete("dev/x")


def prune(root: str) -> None:
    DirectoryHub.open(root).prune()


def with_lost_parent(root: str) -> None:
    """As a copy that was cut off: the manifest of the commit before main's is missing."""
    both(root)
    lose_manifest(root, "first")


def with_lost_head(root: str) -> None:
    """The same for main's own commit; dev/x is whole."""
    push_first(root)
    make_branch(root)
    push_second(root)
    lose_manifest(root, "second")


def commit_called(root: str, message: str) -> str:
    return next(one.commit for one in DirectoryHub.open(root).revisions() if one.message == message)


def delete_commit(root: str, message: str) -> None:
    DirectoryHub.open(root).delete(commit_called(root, message))


def lose_manifest(root: str, message: str) -> None:
    os.unlink(os.path.join(root, "commits", f"{commit_called(root, message)}.json"))


push_first_again = partial(push, files=FIRST, message="back")


AT_FIRST: Refs = {"main": FIRST}
AT_SECOND: Refs = {"main": SECOND}
WITH_BRANCH: Refs = {"main": FIRST, "dev/x": FIRST}
LOST: Files = {"no manifest": b""}
"""What stands for the files of a ref whose commit has lost its manifest."""

TRANSITIONS = (
    Transition("first", nothing, push_first, {}, AT_FIRST),
    Transition("second", push_first, push_second, AT_FIRST, AT_SECOND),
    Transition("back-to-known", both, push_first_again, AT_SECOND, {"main": SECOND | FIRST}),
    Transition(
        "to-new-branch", push_first, partial(push_second, revision="dev/x"), AT_FIRST, AT_FIRST | {"dev/x": SECOND}
    ),
    Transition(
        "pull-request", push_first, partial(push_second, create_pr=True), AT_FIRST, AT_FIRST | {"refs/pr/1": SECOND}
    ),
    Transition("known-commit", with_lost_commits, push_second, AT_FIRST, AT_SECOND),
    Transition("branch", push_first, make_branch, AT_FIRST, WITH_BRANCH),
    Transition("tag", push_first, make_tag, AT_FIRST, AT_FIRST | {"v1": FIRST}),
    Transition("delete-branch", with_branch, delete_branch, WITH_BRANCH, AT_FIRST),
    Transition(
        "delete-commit", with_lost_commits, partial(delete_commit, message="third"), AT_FIRST, AT_FIRST,
        keeps_commits=False,
    ),
    Transition(
        "delete-middle", both, partial(delete_commit, message="first"), AT_SECOND, AT_SECOND, keeps_commits=False
    ),
    Transition("prune", with_lost_commits, prune, AT_FIRST, AT_FIRST, keeps_commits=False),
    Transition("lost-parent", with_lost_parent, push_first_again, AT_SECOND, {"main": SECOND | FIRST}, is_partial=True),
    Transition(
        "lost-head", with_lost_head, partial(push, files={"n": b"n"}, message="n", revision="dev/x"),
        {"main": LOST, "dev/x": FIRST}, {"main": LOST, "dev/x": FIRST | {"n": b"n"}},
        is_partial=True, whole_branch="dev/x",
    ),
    Transition(
        "made-again", with_lost_head, partial(push_second, revision="dev/x"),
        {"main": LOST, "dev/x": FIRST}, {"main": SECOND, "dev/x": SECOND},
        is_partial=True, whole_branch="dev/x", mended={"main": SECOND, "dev/x": FIRST},
    ),
)  # fmt: skip
"""Every transition; `Refs` are what readers find at every ref before and after."""


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


class DirectoryHubSuite(TracedSuite[Transition, Baseline]):
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
        super().warm(place)
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

    def judge(self, point: Point[Transition, Baseline], run: Run, directory: Path) -> Judgement:
        """Read every ref and commit, then push once more."""
        try:
            return Judgement(_check(point, run, str(directory)))
        except Exception:  # an assertion or not, the trace is the finding
            return Judgement("wrong", [("wrong", traceback.format_exc(limit=-2))])


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
        files = files_at(hub, revision.name)
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
    files = files_below(Path(root))
    return {path: len(raw) for path, raw in files.items() if path.startswith(("commits/", "snapshots/"))}


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
