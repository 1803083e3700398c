"""The Hub's cache on disk, laid out by hand: models--org--name/{blobs,refs,snapshots}."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

REPO = "org/name"


def put_in_cache(cache: Path, files: Path, *, commit: str, refs: Mapping[str, str], repo_id: str = REPO) -> Path:
    """Lay out a directory as one snapshot of a repo, as huggingface_hub leaves it after a download.

    Args:
        cache: The cache's root.
        files: The directory whose files are the commit's, subfolders included.
        commit: 40 hex digits.
        refs: Branch or tag -> commit.
        repo_id: org/name.

    Returns:
        The snapshot's directory: links into `blobs`.
    """
    repo = cache / ("models--" + repo_id.replace("/", "--"))
    snapshot = repo / "snapshots" / commit
    (repo / "blobs").mkdir(parents=True, exist_ok=True)
    for path in sorted(path for path in files.rglob("*") if path.is_file()):
        data = path.read_bytes()
        blob = repo / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        link = snapshot / path.relative_to(files)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    for ref, target in refs.items():
        place = repo / "refs" / ref
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(target)
    return snapshot
