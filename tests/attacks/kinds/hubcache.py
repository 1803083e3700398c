"""Attacks in the layout of the Hub's cache, where every file is a link to a blob."""

from __future__ import annotations

import hashlib
import os

from tests.attacks.files import raw
from tests.attacks.registry import Build, Expected, Place, register_all

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


def _linked(target: str) -> Build:
    def build(place: Place) -> Expected:
        os.symlink(target, os.path.join(snapshot(place, raw.stock_sharded(), without=S), S))
        return Expected(S)

    return build


LINKS = {"to-the-blobs-folder": "../../blobs", "to-a-missing-blob": "../../blobs/" + "0" * 64}
register_all("cache-link", {name: _linked(target) for name, target in LINKS.items()})
