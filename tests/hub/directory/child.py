"""A process that pushes into a directory hub, again and again: run by test_processes.py."""

from __future__ import annotations

import signal
import sys

from hfshard.disk.byte_source import BytesSource
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.hub.repo import StaleParentError

CHILD_SECONDS = 110
"""One that takes longer hangs, and is killed."""


def content(name: str, number: int) -> bytes:
    """What a push writes: another size each time, so that a mixture is seen."""
    return f"{name} {number} ".encode() * (1000 + number)


def main(root: str, name: str, count: int) -> None:
    signal.alarm(CHILD_SECONDS)
    hub, stale = DirectoryHub.create(root), 0
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(count):
        raw = content(name, number)
        while True:
            tree = hub.tree()
            assert tree is not None
            changes = {f"{name}.bin": BytesSource(raw), "last.bin": BytesSource(raw)}
            try:
                hub.commit(changes, parent=tree.commit or None, message=f"{name} {number}")
                break
            except StaleParentError:
                stale += 1
    print(stale)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
