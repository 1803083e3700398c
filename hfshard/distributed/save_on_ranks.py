"""Saves by many ranks: each rank calls, the owners write the files, and the first rank commits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from os.path import dirname
from typing import Final, Self

import torch.distributed as dist

from hfshard._util.call_ranks import Role, Session, call_ranks
from hfshard.commit.transaction import OwnShardWriter
from hfshard.constants import MAX_INDEX_BYTES
from hfshard.disk.safe_open import read_small
from hfshard.distributed.liveness import announce_arrival
from hfshard.distributed.rank_writer import SHARED_FROM_BYTES, RankWriter, ReplicaWriter
from hfshard.distributed.rendezvous import session
from hfshard.distributed.spread_tensor import with_spread_tensors
from hfshard.distributed.tensor_owners import (
    Listing,
    LocalTensor,
    Mesh,
    RankGroup,
    TensorOwners,
    list_tensors,
)
from hfshard.errors import HfshardError, InvalidArgumentError, RankFailedError, RankMissingError
from hfshard.format.index import CheckpointIndex, FileDigest, sha256_of
from hfshard.places.place import Place, SavePlace
from hfshard.saving.pipeline import save_request
from hfshard.saving.save_request import SaveRequest, needs_all_ranks
from hfshard.tensors.stored_tensor import RawTensor, TensorLayout

_TELL_SECONDS: Final = 5.0
"""How long a rank that failed waits for others, to report its failure to them."""
_NO_CHECK: Callable[[], None] = lambda: None  # noqa: E731


def save_together(request: SaveRequest, place: SavePlace, check: Callable[[], None] = _NO_CHECK) -> CheckpointIndex:
    """Do what `save_here_or_on_ranks` describes for a process group that has other ranks.

    Args:
        request: This rank's.
        place: The same on all ranks that save together.
        check: As in `save_request`; on the rank that commits.

    Returns:
        The index, the same on every rank.

    Raises:
        RankFailedError: Another rank failed, died, or did not come: the old checkpoint stays, unless the message says
            that the outcome is unknown.
        Everything that `save_request` raises.
    """
    with session(place.key, needs_all=needs_all_ranks(request)) as ranks:
        if ranks.role is Role.LATE:
            return _late(request, place, ranks)
        return save_on_ranks(request, place, ranks, check)


@contextmanager
def prepare_to_save(place: Place, is_part: Callable[[], bool]) -> Iterator[None]:
    """Let the other ranks see that this one prepares its part of a save; see `abort_peers_on_error`."""
    try:
        with announce_arrival(dist.get_rank()):
            yield
    except RankFailedError:  # the store is gone: the failure cannot be reported
        raise
    except BaseException as error:
        if is_part():
            with (
                suppress(HfshardError, type(error)),
                session(place.key, needs_all=True, timeout_seconds=_TELL_SECONDS),
            ):
                raise
        raise


def leave_to_others(place: Place) -> None:
    """Let the ranks that save replicated tensors into a place not wait for this one."""
    with session(place.key, needs_all=False, may_join=False):
        return


def save_on_ranks(
    request: SaveRequest,
    place: SavePlace,
    session: Session,
    check: Callable[[], None] = _NO_CHECK,
) -> CheckpointIndex:
    """Save what the ranks of a session have together; each of them calls this.

    Args:
        request: As in `save_together`, like check.
        place: Where to save.
        session: Of the save.

    Returns:
        The index, on every rank.

    Raises:
        Everything that `save_together` raises.
    """
    index, listing = write_on_ranks(request, place, session, check)
    if index is not None:
        SaveOutcome.tell(session, index, sha256_of(listing.to_json()))
        return index
    return SaveOutcome.awaited(session).index(session, f"{place.address}/{request.options.names.index}")


def write_on_ranks(
    request: SaveRequest,
    place: SavePlace,
    session: Session,
    check: Callable[[], None] = _NO_CHECK,
    *,
    writers: Sequence[int] = (),
) -> tuple[CheckpointIndex | None, Listing]:
    """Do what `save_on_ranks` does, except for the end of the session: the caller publishes the outcome.

    Args:
        request, place, session, check: As in `save_on_ranks`.
        writers: The ranks that may write files; empty: all of the session.

    Returns:
        The index, on the leader, once the checkpoint is complete, and None on the others; and this rank's listing.
    """
    held = with_spread_tensors(request.tensors)
    listing, meshes = list_tensors(request, held)
    groups, listings = exchange_listings(session, listing, meshes)
    is_leader = session.is_leader
    if len(listings) == 1 and not meshes and len(groups) == 1:
        return _save_replicas(request, place, session, check, listing, may_share=not writers), listing
    require_all_ranks(session)
    request = _with_whole(request, listings)
    holders = TensorOwners.unite(groups, listings, request.name_order)
    writer = RankWriter(session, holders, held, writers=writers)
    if not is_leader:
        writer.follow()
        return None, listing
    index = save_request(_united(request, holders), place, check, writer)
    writer.end()
    return index, listing


def _save_replicas(
    request: SaveRequest,
    place: SavePlace,
    session: Session,
    check: Callable[[], None],
    listing: Listing,
    *,
    may_share: bool,
) -> CheckpointIndex | None:
    """Save replicated tensors: on the leader alone, or split by files if all ranks of the call have come."""
    is_leader = session.is_leader
    total_bytes = sum(entry.layout.nbytes for entry in listing.entries.values())
    has_all = len(session.ranks) > 1 and session.ranks == list(call_ranks())
    if may_share and has_all and total_bytes >= SHARED_FROM_BYTES and place.is_read_from_disk:
        writer = ReplicaWriter(session, request.tensors)
        if not is_leader:
            writer.follow()
            return None
        return save_request(request, place, check, writer)
    own = OwnShardWriter(confirm=session.begin_step)
    return save_request(request, place, check, own) if is_leader else None


def exchange_listings(
    session: Session, listing: Listing, meshes: Sequence[Mesh], what: str = ""
) -> tuple[list[RankGroup], dict[str, Listing]]:
    """Exchange the listings of all ranks: the leader groups equal ones, so that little is sent.

    Each rank publishes a digest and its meshes. If there are several listings, one rank publishes each.

    Args:
        session: Of the save.
        listing: Of this rank.
        meshes: The meshes that it numbers.
        what: Distinguishes the listings of one save.

    Returns:
        The groups of ranks, and digest -> listing; the same on every rank.
    """
    raw = listing.to_json()
    digest = sha256_of(raw)
    said: dict[bytes, list[int]] = {}
    for rank, holding in session.gather(f"holding{what}", json.dumps([digest, meshes]).encode()).items():
        said.setdefault(holding, []).append(rank)
    if session.is_leader:
        grouped = [[ranks, *json.loads(holding)] for holding, ranks in said.items()]
        session.tell(f"groups{what}", json.dumps(grouped).encode())
    groups = [RankGroup.from_json(value) for value in json.loads(session.wait_for(f"groups{what}", session.leader))]
    speakers: dict[str, int] = {}
    for group in groups:
        speakers.setdefault(group.digest, group.ranks[0])
    listings = {digest: listing}
    if len(speakers) > 1:
        if speakers[digest] == session.rank:
            session.tell(f"listing{what}", raw)
        others = {other: speaker for other, speaker in speakers.items() if other != digest}
        listings |= {
            other: Listing.from_json(session.wait_for(f"listing{what}", rank)) for other, rank in others.items()
        }
    return groups, listings


def require_all_ranks(session: Session) -> None:
    """Raise if ranks are absent that have tensors of their own.

    Raises:
        RankMissingError: It names one.
    """
    absent = sorted(set(call_ranks()) - set(session.ranks))
    if absent:
        raise RankMissingError(
            f"The ranks have different tensors, but rank {absent[0]} did not call with the others. Make this call on "
            "every rank, with collective=True.",
            rank=absent[0],
        )


def _with_whole(request: SaveRequest, listings: Mapping[str, Listing]) -> SaveRequest:
    """Add the full model's names and size, if this rank has only a part, as in a pipeline stage built by the user."""
    names = {frozenset(listing.entries) for listing in listings.values()}
    if len(names) == 1 or request.name_order or request.total_parameters is None:
        return request
    whole = request.describe_full_model() if request.describe_full_model is not None else None
    if whole is None or not frozenset[str]().union(*names) <= frozenset(whole.names):
        return replace(request, total_parameters=None)
    return replace(request, name_order=whole.names, total_parameters=whole.total_parameters)


def _united(request: SaveRequest, holders: TensorOwners) -> SaveRequest:
    """Return the leader's request, with the names of all ranks."""
    return replace(
        request,
        tensors={name: RawTensor(layout, no_bytes_here(name, layout)) for name, layout in holders.layouts.items()},
        tied_names=holders.tied_names,
        undeclared_ties=holders.undeclared_ties,
        separate_names=holders.separate_names,
    )


def no_bytes_here(name: str, layout: TensorLayout) -> Callable[[int], Iterator[memoryview]]:
    """Return the `blocks` of a `RawTensor` of the leader's request: only the owners of its files read any bytes."""

    def blocks(_: int) -> Iterator[memoryview]:
        raise AssertionError(f"'{name}' of {layout.nbytes} bytes is on other ranks, too, and only their owners read it")

    return blocks


def _late(request: SaveRequest, place: SavePlace, session: Session) -> CheckpointIndex:
    """Await the save of the ranks that came before this one: it must contain the same tensors."""
    outcome = SaveOutcome.awaited(session)
    listing, _ = list_tensors(request, held := dict[str, LocalTensor](request.tensors))
    if sha256_of(listing.to_json()) != outcome.listing_digest:
        raise InvalidArgumentError(
            f"The other ranks saved without rank {session.rank}, which arrived late with {len(held)} other tensors: "
            "the checkpoint lacks them. Make this call on every rank with collective=True, and save again."
        )
    return outcome.index(session, f"{place.address}/{request.options.names.index}")


# Outcome of a save, from the leader to the others: the index, or only its digest if they can read it themselves.


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """The outcome of a successful save.

    The index of many tensors takes megabytes, and one process hosts the store that serves all ranks. So ranks that see
    the directory read the index there, and verify it by its digest.
    """

    index_digest: str | None
    """sha256 of the index file; None: the checkpoint is a single file."""
    listing_digest: str
    """Digest that distinguishes the leader's tensors from others."""

    @classmethod
    def tell(cls, session: Session, index: CheckpointIndex, listing_digest: str) -> None:
        """Publish the outcome, on the leader, which ends the operation."""
        is_sharded = len({*index.weight_map.values()}) > 1
        outcome = cls(sha256_of(index.to_json()) if is_sharded else None, listing_digest)
        with suppress(RankFailedError):  # the store is gone, but the save is done
            session.put_key("result", json.dumps(asdict(index)).encode())
        session.finish(json.dumps(asdict(outcome)).encode())

    @classmethod
    def awaited(cls, session: Session) -> Self:
        """Wait for the outcome, on another rank.

        Raises:
            RankFailedError: A rank failed or died before.
        """
        return cls(**json.loads(session.finish()))

    def index(self, session: Session, path: str) -> CheckpointIndex:
        """Return the index: from the leader's index file, if this rank sees it, else as the leader sent it.

        Args:
            session: Of the save.
            path: Of the index file, if there is one.
        """
        if self.index_digest is not None:
            with suppress(OSError, HfshardError):  # another machine's disk, or another save came after
                raw, _ = read_small(path, dirname(path), MAX_INDEX_BYTES)
                if sha256_of(raw) == self.index_digest:
                    return CheckpointIndex.from_json(raw, path)
        value = json.loads(session.await_key("result", session.leader))
        value["files"] = {name: FileDigest(**digest) for name, digest in value["files"].items()}
        value["undeclared_ties"] = tuple(value["undeclared_ties"])
        return CheckpointIndex(**value)
