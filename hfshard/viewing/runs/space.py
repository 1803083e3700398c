"""What the checkpoints of a run take: how much of each is the model, and what it has in common with those before it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from hfshard._util.addresses import is_address
from hfshard.constants import SAFETENSORS_SUFFIX
from hfshard.format.file_names import MODEL_BASE, WeightNames
from hfshard.format.index import FileDigest
from hfshard.training.run.find_checkpoint import files_at
from hfshard.training.run.manifest import MANIFEST, CheckpointManifest, RunCheckpoint
from hfshard.training.state.collect_state import STATE_BASE

Part = Literal["model", "optimizer", "state", "other"]
"""Tensors of the model, of the optimizer, of what else is restored (random numbers, scalers, moving averages), and all
other files: configs, tokenizers, the state that is no tensor."""

_NAMES: Final[dict[Part, WeightNames]] = {
    "model": WeightNames(base=MODEL_BASE),
    "optimizer": WeightNames(base="optimizer"),
    "state": WeightNames(base=STATE_BASE),
}


@dataclass(frozen=True, slots=True)
class CheckpointSpace:
    """The bytes of one checkpoint of a run."""

    parts: dict[Part, int]
    """Of the parts that it has, largest first."""
    unchanged: int
    """Of files of weights that a checkpoint that was saved before it has too: in a directory the same file on the disk
    (a hard link), which takes no space of its own; in a store one with the same checksums, which was copied there."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.parts.values())

    @property
    def written(self) -> int:
        """What was written, or sent, for this one."""
        return self.total - self.unchanged


def spaces_of(found: Sequence[RunCheckpoint]) -> dict[str, CheckpointSpace]:
    """Measure the checkpoints of a run.

    Args:
        found: In the order in which they were saved; those without a manifest are left out.

    Returns:
        Path -> its bytes.
    """
    spaces = {}
    seen: set[object] = set()
    for one in found:
        if one.manifest is None:
            continue
        files = {name: record for name, record in one.manifest.files.items() if name.endswith(SAFETENSORS_SUFFIX)}
        identities = {name: _identity_of(one.path, name, record) for name, record in files.items()}
        unchanged = sum(files[name].size or 0 for name, identity in identities.items() if identity in seen)
        seen |= {identity for identity in identities.values() if identity is not None}
        spaces[one.path] = CheckpointSpace(parts_of(one.path, one.manifest), unchanged)
    return spaces


def parts_of(path: str, manifest: CheckpointManifest) -> dict[Part, int]:
    """Measure the parts of one checkpoint, the manifest's own file included."""
    sizes: dict[Part, int] = {"other": files_at(path).size(MANIFEST)}
    for name, record in manifest.files.items():
        part = part_of(name)
        sizes[part] = sizes.get(part, 0) + (record.size or 0)
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def counts_of(manifest: CheckpointManifest) -> Counter[Part]:
    """Count the files of each part of one checkpoint, the manifest's own included."""
    return Counter(part_of(name) for name in (*manifest.files, MANIFEST))


def part_of(name: str) -> Part:
    """Tell by the name of a file of a checkpoint which part of it that is."""
    for part, names in _NAMES.items():
        if name in (names.single, names.index) or names.is_shard(name):
            return part
    return "other"


def _identity_of(path: str, name: str, record: FileDigest) -> object:
    """What two files have in common that are one; None where that can't be told."""
    if is_address(path):
        return (record.size, record.sha256, record.xxh3, record.fingerprint) if record.is_verifiable else None
    try:
        status = os.stat(os.path.join(path, name))
    except OSError:  # missing: the list says that it is damaged
        return None
    return (status.st_dev, status.st_ino)
