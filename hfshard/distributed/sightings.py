"""What a rank says of the checkpoint that it has opened, by which ranks find out whether they have the same one."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path

from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.disk.fsops import is_remote
from hfshard.format.digests import sha256_of
from hfshard.pickles.pickle_file import PickleFile
from hfshard.shards.ranged_shard import RangedShard
from hfshard.shards.shard import SafetensorsShard


def files_of(checkpoint: OpenCheckpoint) -> dict[str, SafetensorsShard | PickleFile]:
    """Name -> file, of those that hold tensors."""
    return {**checkpoint.shards, **checkpoint.pickles}


def sightings(files: Mapping[str, SafetensorsShard | PickleFile]) -> list[list[str | int]]:
    """What two ranks say alike if, and only if, their files are the same ones, not copies."""
    said: list[list[str | int]] = []
    for name, file in sorted(files.items()):
        device, *rest = file.identity
        place = ["far", device] if isinstance(file, RangedShard) else place_of(device)
        said.append([name, *place, *rest])
    return said


def place_of(device: int) -> list[str | int]:
    """What tells a file system from others; one of the network has another number on each machine."""
    return ["network"] if is_remote(device) else [_host(), device]


@cache
def _host() -> str:
    """What tells this machine from others, as far as it can."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def checkpoint_digest(checkpoint: OpenCheckpoint, config: bytes | None) -> str:
    """What is stored, as far as the index and the config of a model that is built say it."""
    index = checkpoint.index
    files = {name: asdict(digest) for name, digest in index.files.items()}
    return digest_of([index.weight_map, index.tied_names, files, sha256_of(config or b"")])


def contents_digest(checkpoint: OpenCheckpoint) -> str:
    """What the files hold of which the index has no fingerprints, such as those of transformers.

    Raises:
        CheckpointChangedError: One was replaced since it was opened.
    """
    recorded = checkpoint.index.files
    shards = {name: shard.fingerprint() for name, shard in checkpoint.shards.items() if name not in recorded}
    return digest_of({**shards, **{name: file.size for name, file in checkpoint.pickles.items()}})


def digest_of(said: object) -> str:
    """What is alike for two values if, and only if, they are the same as JSON."""
    return sha256_of(json.dumps(said, sort_keys=True).encode(errors="surrogatepass"))
