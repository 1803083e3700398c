"""Attacks in the layout of the Hub's cache, where every file is a link to a blob."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable

from tests.attacks.files import raw
from tests.attacks.registry import Expected, Place, register

S = raw.SECOND
REVISION = "0123456789abcdef0123456789abcdef01234567"
REPO = "models--org--name"


def snapshot(place: Place, files: raw.Files, *, without: str = "") -> str:
    """Build `models--org--name` beside the checkpoint; `checkpoint` becomes a link to its one snapshot.

    Returns:
        The snapshot's directory.
    """
    repo = place.root / "hub" / REPO
    folder = repo / "snapshots" / REVISION
    folder.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(REVISION)
    for name, content in files.items():
        if name != without:
            blob = hashlib.sha256(content).hexdigest()
            (repo / "blobs" / blob).write_bytes(content)
            os.symlink(f"../../blobs/{blob}", folder / name)
    place.checkpoint.rmdir()
    os.symlink(folder, place.checkpoint)
    return str(folder)


LINKS: dict[str, Callable[[Place], str]] = {
    "to-the-blobs-folder": lambda place: "../../blobs",
    "to-a-missing-blob": lambda place: "../../blobs/" + "0" * 64,
}


def _linked(target: Callable[[Place], str], place: Place) -> Expected:
    folder = snapshot(place, raw.stock_sharded(), without=S)
    os.symlink(target(place), os.path.join(folder, S))
    return Expected(S)


for _name, _target in LINKS.items():
    register(f"cache-link-{_name}", functools.partial(_linked, _target))
