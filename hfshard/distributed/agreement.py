"""A load by many ranks: they open the same checkpoint, share the work of verifying it, and all go on or none."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

import torch.distributed as dist

from hfshard._util.progress import bytes_bar
from hfshard.distributed.exchange.owners import assign_owners
from hfshard.distributed.participants import gather_participants, has_other_ranks
from hfshard.distributed.status import SaveStatus
from hfshard.errors import CheckpointChangedError, HfshardError
from hfshard.loading.options import LoadOptions
from hfshard.loading.source import CheckpointSource, LocalCheckpoint, open_source, with_checkpoint
from hfshard.storage.checkpoint.checkpoint import OpenCheckpoint
from hfshard.storage.checkpoint.checks import check_checksums, check_pickles
from hfshard.storage.checkpoint.folder import FAR_TRIES
from hfshard.storage.disk.file_system import is_remote
from hfshard.storage.disk.hub_place import has_hub_marker
from hfshard.storage.format.integrity import sha256_of
from hfshard.storage.weights.pickles.pickle_file import PickleFile
from hfshard.storage.weights.ranged.ranged_shard import RangedShard
from hfshard.storage.weights.safetensors_shard import SafetensorsShard

_Result = TypeVar("_Result")

logger = logging.getLogger(__name__)


class LoadAgreement:
    """What one rank says to the others of a load, and learns from them. A rank that loads alone agrees with itself."""

    def __init__(self, status: SaveStatus | None) -> None:
        self._status = status
        self._has_opened = False
        self._has_confirmed = False

    @property
    def is_collective(self) -> bool:
        """Whether there are other ranks."""
        return self._status is not None

    def fetch(self, source: CheckpointSource, progress: bool | None = None) -> LocalCheckpoint:
        """Find the checkpoint on this machine, as `CheckpointSource.fetch` does.

        The first rank resolves the revision, and all load that commit, though somebody pushes meanwhile. Of the ranks
        that have a cache of the Hub in common, one downloads, and the others wait for it and ask the Hub for nothing.

        Raises:
            RankFailedError: Another rank could not find or download it.
            Everything that `CheckpointSource.fetch` raises.
        """
        if self._status is None:
            return source.fetch(progress)
        local = source.find_local()
        if local is not None and local.skeleton is not None:
            local.skeleton.fill()
        told = self._status.meet("source", _snapshot_of(local, source) if local is not None else _cache_of(source))
        if local is not None:
            return _same_snapshot(local, source, told)
        return _fetch_together(self._status, source, told, progress)

    @contextmanager
    def opened(
        self,
        source: CheckpointSource,
        options: LoadOptions,
        local: LocalCheckpoint | None = None,
        *,
        check_beside: bool = False,
    ) -> Iterator[OpenCheckpoint]:
        """Open a checkpoint, as `open_source` does; of files that several ranks see, each is hashed by one of them.

        Args:
            source: As for `open_source`, and so are options.
            local: What `fetch` gave; None: it is called.
            check_beside: As for `open_checkpoint`; ranks that share the work do it before.

        Raises:
            RankFailedError: Another rank found a file damaged, or failed otherwise; here or in `confirm`.
            Everything that `fetch` and `open_source` raise.
        """
        local = local or self.fetch(source, options.progress)
        if self._status is None or options.verify not in ("full", "sha256"):
            with open_source(source, options, local, check_beside=check_beside) as checkpoint:
                self._has_opened = True
                yield checkpoint
            return
        with open_source(source, replace(options, verify="structure"), local) as checkpoint:
            self._has_opened = True
            _check_share(self._status, checkpoint, options.progress)
            yield checkpoint

    def use(self, source: CheckpointSource, options: LoadOptions, work: Callable[[OpenCheckpoint], _Result]) -> _Result:
        """Open a checkpoint and do something with it; in a store again, on all ranks, where a save came on any of them.

        Args:
            source: As for `open_source`, and so are options.
            options: How.
            work: Comes to `confirm` once, and may be done again, from the beginning.

        Raises:
            CheckpointChangedError: It kept changing.
            Everything that `opened` and `work` raise.
        """
        if self._status is None:
            return with_checkpoint(source, options, work)
        local = self.fetch(source, options.progress)
        if local.folder is None:
            with self.opened(source, options, local) as checkpoint:
                return work(checkpoint)
        for _ in range(FAR_TRIES):
            self._has_opened = self._has_confirmed = False
            changed: CheckpointChangedError | None = None
            result: list[_Result] = []
            try:
                with self.opened(source, options, local) as checkpoint:
                    result.append(work(checkpoint))
            except CheckpointChangedError as error:
                changed = error
                if not self._has_opened:
                    raise
                if not self._has_confirmed:  # the others wait there
                    self._status.meet("checked", _CHANGED)
            if self.all_say("read", is_so=changed is None):
                return result[0]
            logger.info("'%s' was replaced while ranks loaded it. All of them start again.", source.path)
            time.sleep(local.folder.wait_seconds)
        raise changed or CheckpointChangedError(
            f"The checkpoint in '{source.path}' was replaced {FAR_TRIES} times while ranks loaded it. Load it when "
            "that process has finished saving.",
            path=source.path,
        )

    def confirm(self, checkpoint: OpenCheckpoint, config: bytes | None = None) -> None:
        """Go on once every rank has checked what it can, and has opened the same checkpoint.

        Args:
            checkpoint: This rank's.
            config: That of the model that is built.

        Raises:
            CheckpointChangedError: They have different ones.
            RankFailedError: A rank refused, failed or died.
        """
        if self._status is None:
            return
        files = _files_of(checkpoint)
        digests = [_digest(checkpoint, config), _digest_of(sorted(files)), _digest_of(_sightings(files))]
        told = self._status.meet("checked", json.dumps(digests).encode())
        self._has_confirmed = True
        if _CHANGED in told.values():
            raise CheckpointChangedError(
                f"The checkpoint in '{checkpoint.directory}' was replaced while another rank opened it. Load it again.",
                path=checkpoint.directory,
            )
        said = {rank: json.loads(words) for rank, words in told.items()}
        self._refuse_others(checkpoint, {rank: words[0] for rank, words in said.items()})
        if len({words[1] for words in said.values()}) == 1 < len({words[2] for words in said.values()}):  # copies
            try:
                contents = _digest_of(_contents(checkpoint)).encode()
            except CheckpointChangedError:
                contents = _CHANGED  # the others wait here
            self._refuse_others(checkpoint, self._status.meet("copies", contents))

    def all_say(self, word: str, *, is_so: bool) -> bool:
        """Whether every rank says that something is so.

        Args:
            word: What this is about.
            is_so: What this rank says.

        Raises:
            RankFailedError: A rank failed or died.
        """
        return is_so if self._status is None else set(self._status.meet(word, b"%d" % is_so).values()) == {b"1"}

    def meet(self, word: str) -> None:
        """Go on once every rank has come here: what follows may have collectives, which none must miss.

        Raises:
            RankFailedError: A rank failed or died.
        """
        if self._status is not None:
            self._status.meet(word)

    @contextmanager
    def naming_who_broke_it(self) -> Iterator[None]:
        """Where a collective of somebody else's code fails in the block, name the rank that failed or died.

        Raises:
            RankFailedError: In place of an error of torch.distributed.
        """
        try:
            yield
        except RuntimeError as error:
            if self._status is None or isinstance(error, HfshardError) or not _is_of_collective(error):
                raise
            raise self._status.who_broke_it(error) from error

    def _refuse_others(self, checkpoint: OpenCheckpoint, digests: Mapping[int, str | bytes]) -> None:
        leader = min(digests)
        other = next((rank for rank, digest in digests.items() if digest != digests[leader]), None)
        if other is not None:
            raise CheckpointChangedError(
                f"Ranks {leader} and {other} have different checkpoints in '{checkpoint.directory}', and nothing was "
                "loaded: it was replaced meanwhile, or is another one there. Give every rank the same, and load again.",
                path=checkpoint.directory,
            )


_CHANGED: Final = b"changed"
"""What a rank says in place of what it has opened, where that was replaced meanwhile."""

_CACHE: Final = b"cache "
_SNAPSHOT: Final = b"snapshot "
"""How a rank's words begin about where it loads from: a repo of the Hub, or a directory hub."""

_UNDER_WAY: Final[ContextVar[LoadAgreement | None]] = ContextVar("hfshard_load_agreement", default=None)
"""Of the load of this thread: what all ranks load for a part of their work belongs to the same."""


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
        with _under_way(LoadAgreement(None)) as agreement:
            yield agreement
    elif current_agreement().is_collective:
        yield current_agreement()
    else:
        with gather_participants(call, needs_all=True) as participation:
            status = participation.status
            assert status is not None  # that of a rank that takes part
            with _under_way(LoadAgreement(status)) as agreement:
                yield agreement
            status.meet("loaded")
            status.finish()


def current_agreement() -> LoadAgreement:
    """That of the innermost `load_together` in this thread."""
    return _UNDER_WAY.get() or LoadAgreement(None)


@contextmanager
def _under_way(agreement: LoadAgreement) -> Iterator[LoadAgreement]:
    token = _UNDER_WAY.set(agreement)
    try:
        yield agreement
    finally:
        _UNDER_WAY.reset(token)


def _fetch_together(
    status: SaveStatus, source: CheckpointSource, caches: Mapping[int, bytes], progress: bool | None
) -> LocalCheckpoint:
    """Have one rank of each cache download, all of the commit that the first one finds.

    Args:
        status: Of the load.
        source: A repo of the Hub.
        caches: Rank -> which cache it has; some may have found a directory.
        progress: Whether to show a bar.
    """
    from hfshard.hub.remote.cache import RepoCache  # imports huggingface_hub, which takes time

    query = source.query
    first = min(rank for rank, name in caches.items() if name.startswith(_CACHE))
    if status.rank == first:
        small = replace(query, files_of=lambda index: (), force_download=False)
        status.tell("commit", str(replace(source, query=small).fetch(progress).commit).encode())
    commit = status.wait_for("commit", first).decode()
    pinned = replace(source, query=replace(query, revision=commit))
    downloader = min(rank for rank, name in caches.items() if name == caches[status.rank])
    if status.rank == downloader:
        local = pinned.fetch(progress)
        RepoCache(source.path, query.cache_dir).remember(query.revision, commit)
        status.tell("downloaded")
    else:
        status.wait_for("downloaded", downloader)
        local = replace(pinned, query=replace(pinned.query, force_download=False)).fetch(progress)
    return replace(local, revision=query.revision)


def _cache_of(source: CheckpointSource) -> bytes:
    """What ranks say alike whose downloads go into one cache."""
    from hfshard.hub.remote.cache import RepoCache

    root = os.path.realpath(RepoCache(source.path, source.query.cache_dir).root)
    existing = root
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    return _CACHE + json.dumps([*_place_of(os.stat(existing).st_dev), root]).encode(errors="surrogateescape")


def _snapshot_of(local: LocalCheckpoint, source: CheckpointSource) -> bytes:
    """What a rank says of a directory: of a directory hub, which commit it has found."""
    return _SNAPSHOT + os.path.basename(local.path).encode() if has_hub_marker(source.path) else b""


def _same_snapshot(local: LocalCheckpoint, source: CheckpointSource, told: Mapping[int, bytes]) -> LocalCheckpoint:
    """The commit of a directory hub that the first rank has found, in place of this rank's."""
    first = next((words for words in told.values() if words.startswith(_SNAPSHOT)), b"")
    if _snapshot_of(local, source) in (b"", first):
        return local
    commit = first.removeprefix(_SNAPSHOT).decode()
    return replace(source, query=replace(source.query, revision=commit)).find_local() or local


def _is_of_collective(error: RuntimeError) -> bool:
    """Whether torch.distributed raised it; gloo's errors are plain ones."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _check_share(status: SaveStatus, checkpoint: OpenCheckpoint, progress: bool | None) -> None:
    """Compare this rank's share of the files with their checksums."""
    files = _files_of(checkpoint)
    seen = status.meet("files", _digest_of(_sightings(files)).encode())
    sharing = [rank for rank, sighting in seen.items() if sighting == seen[status.rank]]
    names = sorted(files)
    owners = assign_owners([files[name].size for name in names], sharing)
    mine = {name for name, owner in zip(names, owners, strict=True) if owner == status.rank}
    with bytes_bar("Verifying", sum(files[name].size for name in mine), progress) as progress_callback:
        if checkpoint.pickles:
            check_pickles({name: checkpoint.pickles[name] for name in mine}, progress_callback)
        else:
            shards = {name: checkpoint.shards[name] for name in mine}
            check_checksums(checkpoint.folder, checkpoint.weights_path, checkpoint.index, shards, progress_callback)


def _files_of(checkpoint: OpenCheckpoint) -> dict[str, SafetensorsShard | PickleFile]:
    return {**checkpoint.shards, **checkpoint.pickles}


def _sightings(files: Mapping[str, SafetensorsShard | PickleFile]) -> list[list[str | int]]:
    """What two ranks say alike if, and only if, their files are the same ones, not copies."""
    said: list[list[str | int]] = []
    for name, file in sorted(files.items()):
        device, *rest = file.identity
        place = ["far", device] if isinstance(file, RangedShard) else _place_of(device)
        said.append([name, *place, *rest])
    return said


def _place_of(device: int) -> list[str | int]:
    """What tells a file system from others; one of the network has another number on each machine."""
    return ["network"] if is_remote(device) else [_host(), device]


@cache
def _host() -> str:
    """What tells this machine from others, as far as it can."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _digest(checkpoint: OpenCheckpoint, config: bytes | None) -> str:
    """What is stored, as far as index and config say it."""
    index = checkpoint.index
    files = {name: asdict(digest) for name, digest in index.files.items()}
    return _digest_of([index.weight_map, index.tied_names, files, sha256_of(config or b"")])


def _contents(checkpoint: OpenCheckpoint) -> dict[str, str | int]:
    """Fingerprints of the files of which the index does not have any, such as those of transformers."""
    recorded = checkpoint.index.files
    shards = {name: shard.fingerprint() for name, shard in checkpoint.shards.items() if name not in recorded}
    return {**shards, **{name: file.size for name, file in checkpoint.pickles.items()}}


def _digest_of(said: object) -> str:
    return sha256_of(json.dumps(said, sort_keys=True).encode(errors="surrogatepass"))
