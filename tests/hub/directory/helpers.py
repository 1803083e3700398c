"""What the tests of the directory hub have in common: a push of bytes, and what lies on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hfshard.disk.byte_source import BytesSource
from hfshard.hub.directory.directory_hub import DirectoryHub


def push(hub: DirectoryHub, files: Mapping[str, bytes | None], message: str = "push", revision: str = "main") -> str:
    tree = hub.tree(revision)
    changes = {path: None if raw is None else BytesSource(raw) for path, raw in files.items()}
    parent = hub.resolve() if tree is None else tree.commit or None
    return hub.commit(changes, parent=parent, revision=revision, message=message).commit


def files_at(hub: DirectoryHub, revision: str = "main") -> dict[str, bytes]:
    folder = Path(hub.snapshot(revision))
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def everything(folder: str | Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def disk_bytes(folder: str) -> int:
    """Bytes on disk, each file counted once however many names it has."""
    blocks = {}
    for base, folders, names in os.walk(folder):
        for name in [*folders, *names]:
            status = os.lstat(os.path.join(base, name))
            blocks[status.st_ino] = status.st_blocks * 512
    return sum(blocks.values())


def litter(root: str) -> list[str]:
    """What lies in a hub at rest and does not belong there."""
    top = set(os.listdir(root)) - {"commits", "snapshots", "refs", "deleted", "hfshard-hub.json"}
    ids = {name.removesuffix(".json") for name in os.listdir(f"{root}/commits")}
    lost = set(os.listdir(f"{root}/snapshots")) ^ ids
    empty = [base for base, folders, files in os.walk(f"{root}/refs/heads") if not folders and not files]
    return sorted([*top, *lost, *empty])
