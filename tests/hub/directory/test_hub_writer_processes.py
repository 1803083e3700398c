"""A directory hub with several processes: pushes at once, readers beside them, and pushes that are stopped."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from hfshard.disk.byte_source import BytesSource
from hfshard.hub.directory.directory_hub import DirectoryHub
from tests.helpers import processes
from tests.hub.directory.child import content
from tests.hub.directory.helpers import litter
from tests.sweeps.child import TRACED, has_strace, parse_trace
from tests.sweeps.power import effects_of

PUSHES = 10
LOOK_SECONDS = 0.01
"""How long the reader leaves the processor to those who push."""

needs_strace = pytest.mark.skipif(not has_strace(), reason="NO STRACE: NO PUSH IS STOPPED HERE. Install strace.")


def test_two_processes_that_push_at_once_make_one_line_of_whole_commits(
    tmp_path: Path, child_environment: dict[str, str]
) -> None:
    root = str(tmp_path / "org" / "name")
    reading, writing = os.pipe()
    children = [
        processes.start(
            ["-m", "tests.hub.directory.child", root, name, PUSHES],
            env=child_environment,
            stdin=reading,
            stdout=subprocess.PIPE,
        )
        for name in ("one", "two")
    ]
    os.close(reading)
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    os.close(writing)  # both read the end of their stdin, and go
    hub, seen = DirectoryHub.open(root), set()
    while any(child.poll() is None for child in children):  # a reader beside them
        tree = hub.tree()
        if tree is not None and tree.commit:
            hub.verify()
            seen.add(tree.commit)
        time.sleep(LOOK_SECONDS)
    for child in children:
        assert child.wait() == 0
        child.communicate()
    by_id = {revision.commit: revision for revision in hub.revisions() if revision.kind == "commit"}
    line = [by_id[hub.resolve()]]
    while line[-1].parents:
        line.append(by_id[line[-1].parents[0]])
    messages = [revision.message for revision in reversed(line)]
    assert len(line) == len(by_id) == 2 * PUSHES
    for name in ("one", "two"):
        assert [message for message in messages if message.startswith(name)] == [f"{name} {i}" for i in range(PUSHES)]
    for revision in line:
        hub.verify(revision.commit)
        name, number = revision.message.split()
        folder = Path(hub.snapshot(revision.commit))
        assert (folder / "last.bin").read_bytes() == (folder / f"{name}.bin").read_bytes() == content(name, int(number))
    assert seen <= set(by_id)
    assert litter(root) == []


def test_files_that_are_open_outlive_a_prune(tmp_path: Path) -> None:
    hub = DirectoryHub.create(tmp_path / "hub")
    old = hub.commit({"a": BytesSource(b"old")}, parent=None, message="1", revision="dev").commit
    with open(os.path.join(hub.snapshot("dev"), "a"), "rb") as file:
        hub.delete("dev")
        assert hub.prune() > 0
        assert file.read() == b"old"
    assert not os.path.exists(hub.url_of(old))


ORDER = """
import sys
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.disk.byte_source import BytesSource
hub = DirectoryHub.open(sys.argv[1])
hub.commit({"a": BytesSource(b"new"), "s/c": BytesSource(b"c")}, parent=hub.resolve(), message="second")
"""


@needs_strace
def test_everything_is_on_disk_before_what_leads_to_it(tmp_path: Path, child_environment: dict[str, str]) -> None:
    hub = DirectoryHub.create(tmp_path / "hub")
    old = hub.commit({"a": BytesSource(b"old"), "b": BytesSource(b"kept")}, parent=None, message="first").commit
    trace = tmp_path / "trace"
    strace = ["-y", "-o", str(trace), "-e", f"trace={TRACED}"]
    done = processes.run(["-c", ORDER, hub.root], env=child_environment, strace=strace, timeout=60)
    assert done.returncode == 0, done.stderr
    commit = hub.resolve()
    seen = []
    for effect in effects_of(parse_trace(trace.read_text())):
        if effect.path.startswith(hub.root):
            paths = [os.path.relpath(path, hub.root) for path in (effect.path, effect.target) if path]
            seen.append(" ".join([effect.kind, *paths]).replace(commit, "NEW").replace(old, "OLD"))
    assert seen == [
        "mkdir .staging",
        "mkdir .staging/files",
        "link snapshots/OLD/b .staging/files/b",
        "mkdir .staging/files/s",
        "create .staging/files/a",
        "write .staging/files/a",
        "sync .staging/files/a",
        "create .staging/files/s/c",
        "write .staging/files/s/c",
        "sync .staging/files/s/c",
        "sync .staging/files/s",
        "sync .staging/files",
        "create .staging/manifest.json",
        "write .staging/manifest.json",
        "sync .staging/manifest.json",
        "create .staging/new-commit",
        "write .staging/new-commit",
        "sync .staging/new-commit",
        "sync .staging",
        "sync .",
        "rename .staging/files snapshots/NEW",
        "sync snapshots",
        "rename .staging/manifest.json commits/NEW.json",
        "sync commits",
        "rename .staging/new-commit refs/heads/main",
        "sync refs/heads",
        "rmdir .staging",
    ]
