"""The table of the crash sweep of directory hubs: what is there before, and the change that is stopped."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from hfshard.disk.byte_source import ByteSource, BytesSource
from hfshard.hub.directory.directory_hub import DirectoryHub

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


def delete_lost_commit(root: str) -> None:
    hub = DirectoryHub.open(root)
    hub.delete(next(revision.commit for revision in hub.revisions() if revision.message == "third"))


def nothing(root: str) -> None:
    """There is no hub yet."""


def push_first_again(root: str) -> None:
    push(root, FIRST, "back")


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


def lose_manifest(root: str, message: str) -> None:
    commit = next(one.commit for one in DirectoryHub.open(root).revisions() if one.message == message)
    os.unlink(os.path.join(root, "commits", f"{commit}.json"))


def push_second_again(root: str) -> None:
    push_second(root, revision="dev/x")


def delete_middle_commit(root: str) -> None:
    hub = DirectoryHub.open(root)
    hub.delete(next(revision.commit for revision in hub.revisions() if revision.message == "first"))


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
    Transition("delete-commit", with_lost_commits, delete_lost_commit, AT_FIRST, AT_FIRST, keeps_commits=False),
    Transition("delete-middle", both, delete_middle_commit, AT_SECOND, AT_SECOND, keeps_commits=False),
    Transition("prune", with_lost_commits, prune, AT_FIRST, AT_FIRST, keeps_commits=False),
    Transition("lost-parent", with_lost_parent, push_first_again, AT_SECOND, {"main": SECOND | FIRST}, is_partial=True),
    Transition(
        "lost-head", with_lost_head, partial(push, files={"n": b"n"}, message="n", revision="dev/x"),
        {"main": LOST, "dev/x": FIRST}, {"main": LOST, "dev/x": FIRST | {"n": b"n"}},
        is_partial=True, whole_branch="dev/x",
    ),
    Transition(
        "made-again", with_lost_head, push_second_again,
        {"main": LOST, "dev/x": FIRST}, {"main": SECOND, "dev/x": SECOND},
        is_partial=True, whole_branch="dev/x", mended={"main": SECOND, "dev/x": FIRST},
    ),
)  # fmt: skip
"""Every transition; `Refs` are what readers find at every ref before and after."""
