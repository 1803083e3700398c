"""A load by many ranks: they open the same checkpoint, share the work of verifying it, and all go on or none."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Final, TypeVar

import torch.distributed as dist

from hfshard._util.progress import bytes_bar
from hfshard.checkpoint.check_files import check_checksums, check_pickles
from hfshard.checkpoint.folder import FAR_TRIES
from hfshard.checkpoint.load_options import LoadOptions
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.commit.hub_marker import has_hub_marker
from hfshard.distributed.exchange.owners import assign_owners
from hfshard.distributed.liveness.call_group import has_other_ranks
from hfshard.distributed.participants import gather_participants
from hfshard.distributed.sightings import (
    checkpoint_digest,
    contents_digest,
    digest_of,
    files_of,
    place_of,
    sightings,
)
from hfshard.distributed.status import ANY_PLACE, SaveStatus
from hfshard.errors import CheckpointChangedError, HfshardError
from hfshard.places.source import CheckpointSource, LocalCheckpoint, open_source, with_checkpoint

_Result = TypeVar("_Result")

logger = logging.getLogger(__name__)


class LoadAgreement:
    """What one rank says to the others of a load, and learns from them. A rank that loads alone agrees with itself."""

    def __init__(self, status: SaveStatus | None) -> None:
        self._status = status
        self._has_opened = False
        self._is_known = False
        """Whether each rank knows that a save has overtaken one of them."""
        self._change: CheckpointChangedError | None = None
        """What this rank has seen, or was told, of the save that overtook the last try."""

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
            self._check_share(checkpoint, options.progress)
            yield checkpoint

    def use(self, source: CheckpointSource, options: LoadOptions, work: Callable[[OpenCheckpoint], _Result]) -> _Result:
        """Open a checkpoint and do something with it; in a store again, on all ranks, where a save came on any of them.

        Args:
            source: As for `open_source`, and so are options.
            options: How.
            work: Comes to `confirm` once; in a store it may be done again, from the beginning.

        Raises:
            CheckpointChangedError: It kept changing.
            Everything that `opened` and `work` raise.
        """
        if self._status is None:
            return with_checkpoint(source, options, work)
        local = self.fetch(source, options.progress)
        for _ in range(FAR_TRIES):
            with self.unless_overtaken(local), self.opened(source, options, local) as checkpoint:
                result = work(checkpoint)
                if local.folder is not None:
                    self.meet("read")
                return result
        raise self.kept_changing(source.path)

    @contextmanager
    def unless_overtaken(self, local: LocalCheckpoint) -> Iterator[None]:
        """Do a try with the other ranks; it ends on all without an error where a save in a store overtook one of them.

        Then all have to begin again. What is read of the checkpoint must be read in the block, before a last `meet`.

        Args:
            local: What `fetch` gave. In a directory what is open stays as it is, and nobody begins again.

        Raises:
            CheckpointChangedError: In a directory; or it kept changing while this rank opened it.
            Everything that the block raises.
        """
        self._has_opened = self._is_known = False
        self._change = None
        try:
            yield
        except CheckpointChangedError as error:
            if local.folder is None or not self._has_opened:
                raise
            self._change = CheckpointChangedError(error.message, path=local.folder.path)  # `error` holds what was built
            if self._status is not None:
                if not self._is_known:
                    self._status.meet(ANY_PLACE, _CHANGED)
                time.sleep(local.folder.wait_seconds)
            logger.info("%s Starting again.", error)

    def kept_changing(self, path: str) -> CheckpointChangedError:
        """The error of a load whose every try was overtaken.

        Args:
            path: What was loaded.
        """
        return self._change or CheckpointChangedError(
            f"The checkpoint in '{path}' kept changing. Load it when the save is done.", path=path
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
        files = files_of(checkpoint)
        digests = [checkpoint_digest(checkpoint, config), digest_of(sorted(files)), digest_of(sightings(files))]
        told = self._meet("checked", json.dumps(digests).encode())
        said = {rank: json.loads(words) for rank, words in told.items()}
        self._refuse_others(checkpoint, {rank: words[0] for rank, words in said.items()})
        if len({words[1] for words in said.values()}) == 1 < len({words[2] for words in said.values()}):  # copies
            self._refuse_others(checkpoint, self._meet("copies", contents_digest(checkpoint).encode()))

    def all_say(self, word: str, *, is_so: bool) -> bool:
        """Whether every rank says that something is so.

        Args:
            word: What this is about.
            is_so: What this rank says.

        Raises:
            CheckpointChangedError: A save in a store has overtaken another rank.
            RankFailedError: A rank failed or died.
        """
        return is_so if self._status is None else set(self._meet(word, b"%d" % is_so).values()) == {b"1"}

    def meet(self, word: str) -> None:
        """Go on once every rank has come here: what follows may have collectives, which none must miss.

        Raises:
            CheckpointChangedError: A save in a store has overtaken another rank.
            RankFailedError: A rank failed or died.
        """
        if self._status is not None:
            self._meet(word)

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

    def _check_share(self, checkpoint: OpenCheckpoint, progress: bool | None) -> None:
        """Compare this rank's share of the files with their checksums."""
        assert self._status is not None
        files = files_of(checkpoint)
        seen = self._meet("files", digest_of(sightings(files)).encode())
        sharing = [rank for rank, sighting in seen.items() if sighting == seen[self._status.rank]]
        names = sorted(files)
        owners = assign_owners([files[name].size for name in names], sharing)
        mine = {name for name, owner in zip(names, owners, strict=True) if owner == self._status.rank}
        with bytes_bar("Verifying", sum(files[name].size for name in mine), progress) as progress_callback:
            if checkpoint.pickles:
                check_pickles({name: checkpoint.pickles[name] for name in mine}, progress_callback)
            else:
                shards = {name: checkpoint.shards[name] for name in mine}
                check_checksums(checkpoint.folder, checkpoint.weights_path, checkpoint.index, shards, progress_callback)

    def _meet(self, word: str, value: bytes = b"") -> dict[int, bytes]:
        """Give each rank's value to all, unless one of them says that it was overtaken."""
        assert self._status is not None
        told = self._status.meet(word, value)
        if _CHANGED in told.values():
            self._is_known = True
            rank = next(rank for rank, said in told.items() if said == _CHANGED)
            raise CheckpointChangedError(f"The checkpoint was replaced while rank {rank} read it. Load it again.")
        return told

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
"""What a rank says at the next meeting, whichever that is, after what it has opened was replaced."""

_CACHE: Final = b"cache "
_SNAPSHOT: Final = b"snapshot "
"""How a rank's words begin about where it loads from: a repo of the Hub, or a directory hub."""

_UNDER_WAY: Final[ContextVar[LoadAgreement | None]] = ContextVar("hfshard_load_agreement", default=None)
"""Of the load of this thread: what all ranks load for a part of their work belongs to the same."""


@contextmanager
def load_together(call: str, *, is_collective: bool) -> Iterator[LoadAgreement]:
    """Let every rank do the block, or none: what one raises before it confirms, the others raise instead of going on.

    Args:
        call: What all ranks of the call's process group call, if it is collective.
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
    from hfshard.hub.cache import RepoCache  # imports huggingface_hub, which takes time

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
    from hfshard.hub.cache import RepoCache

    root = os.path.realpath(RepoCache(source.path, source.query.cache_dir).root)
    existing = root
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    return _CACHE + json.dumps([*place_of(os.stat(existing).st_dev), root]).encode(errors="surrogateescape")


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
