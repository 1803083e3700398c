"""One save of all ranks' tensors: what this rank says that it has, and what the first rank writes for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from hfshard._util.progress import ProgressCallback
from hfshard.commit.transaction import KnownFile
from hfshard.distributed.rank_writer import RankWriter
from hfshard.distributed.spread_tensor import SpreadTensor, with_spread_tensors
from hfshard.distributed.tensor_owners import HeldTensor, Holders, Listing
from hfshard.format.file_names import MODEL_BASE
from hfshard.format.index import FileDigest
from hfshard.saving.save_request import SaveRequest
from hfshard.shards.write_shards import WriteJob
from hfshard.stores.store import Store
from hfshard.tensors.stored_tensor import RawTensor, TensorLayout
from hfshard.training.collecting import STATE_BASE, SavePayload, is_of_a_rank, rank_prefix

_NUMBERLESS: Final = "rank*/"
"""Stands for the beginning of the names of what belongs to one rank alone."""


@dataclass(frozen=True, slots=True)
class HeldParts:
    """The tensors of this rank, by keys: the set of tensors, and the name in it."""

    common: SaveRequest
    """What all ranks have, or have parts of; and what the model says of its names."""
    own: SaveRequest
    """What this rank alone gives; names lack its number, see `with_rank`."""
    held: dict[str, HeldTensor]
    """Both, by their own names."""


@dataclass(frozen=True, slots=True)
class _KeyedTensor(RawTensor):
    """A tensor that owners write, with the key by which all ranks know it."""

    key: str = field(kw_only=True)


def key_of(base: str, name: str) -> str:
    """The key of a tensor: names of different sets may be the same."""
    return f"{base}/{name}"


def name_of_key(key: str) -> str:
    """The name under which the tensor of a key is stored."""
    return key.partition("/")[2]


def held_parts(payload: SavePayload, rank: int, *, is_stage: bool = False) -> HeldParts:
    """List what this rank has for a save of all ranks.

    Of what is not spread, the model's and the optimizer's tensors are the same everywhere; all else is the first
    rank's, or this rank's own (random numbers, the position of its loader).

    Args:
        payload: What the rank would save if it were alone.
        rank: This one.
        is_stage: Whether ranks have different modules: then what else is not a rank's own may be on any of them.

    Raises:
        UnstorableTensorError: A tensor can't be stored.
    """
    prefix = rank_prefix(rank)
    common: dict[str, HeldTensor] = {}
    own: dict[str, HeldTensor] = {}
    held: dict[str, HeldTensor] = {}
    for base, request in payload.requests.items():
        for name, tensor in with_spread_tensors(request.tensors).items():
            is_shared = base != STATE_BASE or isinstance(tensor, SpreadTensor)
            if is_shared or (is_stage and not is_of_a_rank(name)):
                common[key_of(base, name)] = tensor
            elif name.startswith(prefix):
                own[key_of(base, _NUMBERLESS + name.removeprefix(prefix))] = tensor
            elif rank == 0:
                own[key_of(base, name)] = tensor
            else:
                continue
            held[key_of(base, name)] = tensor
    options = next(iter(payload.requests.values())).options
    plain = SaveRequest(options=options)
    model = payload.requests.get(MODEL_BASE, plain)
    of_common = SaveRequest(
        options=options,
        tied_names={key_of(MODEL_BASE, tied): key_of(MODEL_BASE, name) for tied, name in model.tied_names.items()},
        undeclared_ties=tuple(key_of(MODEL_BASE, name) for name in model.undeclared_ties),
        separate_names=frozenset(key_of(MODEL_BASE, name) for name in model.separate_names),
        name_order=tuple(key_of(MODEL_BASE, name) for name in model.name_order),
    )
    return HeldParts(replace(of_common, tensors=_typed(common)), replace(plain, tensors=_typed(own)), held)


def with_whole_order(payload: SavePayload) -> SavePayload:
    """The payload of a stage that also knows all names and parameters of the whole model, if these can be known."""
    request = payload.requests.get(MODEL_BASE)
    if request is None or request.name_order:
        return payload
    whole = None if request.look_at_whole is None else request.look_at_whole()
    total = None if whole is None else whole.total_parameters
    request = replace(request, name_order=() if whole is None else whole.names, total_parameters=total)
    return replace(payload, requests={**payload.requests, MODEL_BASE: request})


def with_rank(listing: Listing, rank: int) -> Listing:
    """The listing of what a rank has alone, with its number in the names."""
    numberless = key_of(STATE_BASE, _NUMBERLESS)
    numbered = key_of(STATE_BASE, rank_prefix(rank))
    entries = {
        numbered + key.removeprefix(numberless) if key.startswith(numberless) else key: entry
        for key, entry in listing.entries.items()
    }
    return replace(listing, entries=entries)


def united_payload(payload: SavePayload, holders: Holders) -> SavePayload:
    """What the first rank saves: its own payload, with the tensors of all ranks."""
    some_options = next(iter(payload.requests.values())).options
    by_base: dict[str, dict[str, RawTensor]] = {}
    for key, layout in holders.layouts.items():
        base = key.partition("/")[0]
        by_base.setdefault(base, {})[name_of_key(key)] = _KeyedTensor(layout, _no_bytes(key, layout), key=key)
    requests = {}
    for base in dict.fromkeys([*payload.requests, *by_base]):
        request = payload.requests.get(base) or SaveRequest(options=replace(some_options, base=base, progress=None))
        if base == MODEL_BASE:
            is_known = not request.name_order or by_base.get(base, {}).keys() <= set(request.name_order)
            request = replace(
                request,
                tied_names={name_of_key(tied): name_of_key(kept) for tied, kept in holders.tied_names.items()},
                undeclared_ties=tuple(map(name_of_key, holders.undeclared_ties)),
                separate_names=frozenset(map(name_of_key, holders.separate_names)),
                total_parameters=request.total_parameters if is_known else None,
            )
        requests[base] = replace(request, tensors=by_base.get(base, {}))
    return replace(payload, requests=requests)


class KeyedWriter:
    """The `ShardWriter` of the first rank: it orders files of all sets of tensors at once.

    Args:
        ranks: What all ranks take part in; it knows the tensors by their keys.
    """

    def __init__(self, ranks: RankWriter) -> None:
        self._ranks = ranks

    def fingerprints(self, jobs: Sequence[WriteJob], checksum: str | None) -> Iterable[str]:
        """As in `ShardWriter`."""
        return self._ranks.fingerprints(_keyed(jobs), checksum)

    def link(self, jobs: Sequence[WriteJob], known: Mapping[str, KnownFile], checksum: str) -> list[FileDigest | None]:
        """As in `ShardWriter`."""
        return self._ranks.link(_keyed(jobs), known, checksum)

    def write(
        self,
        jobs: Sequence[WriteJob],
        checksum: str | None,
        progress_callback: ProgressCallback | None,
        store: Store | None = None,
    ) -> list[FileDigest]:
        """As in `ShardWriter`."""
        return self._ranks.write(_keyed(jobs), checksum, progress_callback, store)

    def confirm(self) -> None:
        """As in `ShardWriter`."""
        self._ranks.confirm()


def _keyed(jobs: Sequence[WriteJob]) -> list[WriteJob]:
    keyed = []
    for job in jobs:
        tensors = {tensor.key: tensor for tensor in job.tensors.values() if isinstance(tensor, _KeyedTensor)}
        keyed.append(replace(job, tensors=tensors))
    return keyed


def _no_bytes(key: str, layout: TensorLayout) -> Callable[[int], Iterator[memoryview]]:
    def blocks(_: int) -> Iterator[memoryview]:
        raise AssertionError(f"'{key}' of {layout.nbytes} bytes is on other ranks, too, and only their owners read it")

    return blocks


def _typed(tensors: Mapping[str, HeldTensor]) -> Mapping[str, Any]:
    """A request of this room holds parts of tensors, too."""
    return tensors
