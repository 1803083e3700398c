"""A load by many ranks: they open the same checkpoint, share the work of verifying it, and all go on or none."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from hfshard._util.progress import bytes_bar
from hfshard.distributed.exchange.owners import assign_owners
from hfshard.distributed.participants import gather_participants, has_other_ranks
from hfshard.distributed.status import SaveStatus
from hfshard.errors import CheckpointChangedError
from hfshard.loading.options import LoadOptions
from hfshard.loading.source import CheckpointSource, open_source
from hfshard.storage.checkpoint.checkpoint import OpenCheckpoint
from hfshard.storage.checkpoint.checks import check_checksums, check_pickles
from hfshard.storage.disk.file_system import is_remote
from hfshard.storage.weights.pickle_file import PickleFile
from hfshard.storage.weights.safetensors_file import SafetensorsFile


class LoadAgreement:
    """What one rank says to the others of a load, and learns from them. A rank that loads alone agrees with itself."""

    def __init__(self, status: SaveStatus | None) -> None:
        self._status = status

    @contextmanager
    def opened(self, source: CheckpointSource, options: LoadOptions) -> Iterator[OpenCheckpoint]:
        """Open a checkpoint, as `open_source` does; of files that several ranks see, each is hashed by one of them.

        Raises:
            RankFailedError: Another rank found a file damaged, or failed otherwise; here or in `confirm`.
            Everything that `open_source` raises.
        """
        if self._status is None or options.verify not in ("full", "sha256"):
            with open_source(source, options) as checkpoint:
                yield checkpoint
            return
        with open_source(source, replace(options, verify="structure")) as checkpoint:
            _check_share(self._status, checkpoint, options.progress)
            yield checkpoint

    def confirm(self, checkpoint: OpenCheckpoint) -> None:
        """Go on once every rank has checked what it can, and has opened the same checkpoint.

        Raises:
            CheckpointChangedError: They have different ones.
            RankFailedError: A rank refused, failed or died.
        """
        if self._status is None:
            return
        digests = self._status.meet("checked", _digest(checkpoint))
        leader = self._status.leader
        other = next((rank for rank, digest in digests.items() if digest != digests[leader]), None)
        if other is not None:
            raise CheckpointChangedError(
                f"Ranks {leader} and {other} have different checkpoints in '{checkpoint.directory}', and nothing was "
                "loaded: it was replaced meanwhile, or is another one there. Give every rank the same, and load again.",
                path=checkpoint.directory,
            )


@contextmanager
def load_together(call: str, *, is_collective: bool) -> Iterator[LoadAgreement]:
    """Let every rank do the block, or none: what one raises before it confirms, the others raise instead of going on.

    Args:
        call: What all ranks of the default process group call, if it is collective.
        is_collective: False: this rank goes alone.

    Raises:
        RankFailedError: Another rank failed, died, or did not come.
    """
    if not is_collective or not has_other_ranks():
        yield LoadAgreement(None)
        return
    with gather_participants(call, needs_all=True) as participation:
        status = participation.status
        assert status is not None  # that of a rank that takes part
        yield LoadAgreement(status)
        status.meet("loaded")
        status.finish()


def _check_share(status: SaveStatus, checkpoint: OpenCheckpoint, progress: bool | None) -> None:
    """Compare this rank's share of the files with their checksums."""
    files: dict[str, SafetensorsFile | PickleFile] = {**checkpoint.shards, **checkpoint.pickles}
    seen = status.meet("files", json.dumps(_sightings(files)).encode())
    sharing = [rank for rank, sighting in seen.items() if sighting == seen[status.rank]]
    names = sorted(files)
    owners = assign_owners([files[name].size for name in names], sharing)
    mine = {name for name, owner in zip(names, owners, strict=True) if owner == status.rank}
    with bytes_bar("Verifying", sum(files[name].size for name in mine), progress) as progress_callback:
        if checkpoint.pickles:
            check_pickles({name: checkpoint.pickles[name] for name in mine}, progress_callback)
        else:
            shards = {name: checkpoint.shards[name] for name in mine}
            check_checksums(checkpoint.weights_path, checkpoint.index, shards, progress_callback)


def _sightings(files: dict[str, SafetensorsFile | PickleFile]) -> list[list[str | int]]:
    """What two ranks say alike if, and only if, their files are the same ones, not copies."""
    host = _host()
    said: list[list[str | int]] = []
    for name, file in sorted(files.items()):
        device, *rest = file.identity
        # A file system of the network has another number on each machine.
        where: list[str | int] = ["network"] if is_remote(device) else [host, device]
        said.append([name, *where, *rest])
    return said


def _host() -> str:
    """What tells this machine from others, as far as it can."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _digest(checkpoint: OpenCheckpoint) -> bytes:
    index = checkpoint.index
    files = {name: asdict(digest) for name, digest in index.files.items()}
    said = json.dumps([index.weight_map, index.tied_names, files], sort_keys=True)
    return hashlib.sha256(said.encode(errors="surrogatepass")).hexdigest().encode()
