"""Files of torch.save with each rank's part of a model, as verl writes them: DTensors, ShardedTensors, plain tensors.

`model_world_size_4_rank_0.pt` has the state dict of rank 0 of 4. Its pickle is described, and nothing in it runs. A
DTensor's description has its placements and the rank's coordinates in the mesh, a ShardedTensor's the rectangles. Plain
tensors are the same on all ranks, except for buffers that each computes: those of rank 0 are read.

Source: verl `utils/checkpoint/fsdp_checkpoint_manager.py`; torch `distributed/tensor/{_api,_dtensor_spec}.py` and
`distributed/_shard/sharded_tensor/api.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, Final

from hfshard._util.text import count_of, shorten_list
from hfshard.disk.safe_open import Identity
from hfshard.errors import HfshardError, InvalidArgumentError
from hfshard.foreign.byte_runs import (
    ByteRun,
    ChunkRuns,
    ForeignRun,
    ForeignTable,
    ForeignTensor,
    StoredRecord,
    joined_tensor,
)
from hfshard.foreign.described_values import (
    MALFORMED,
    damaged,
    missing_rank,
    parse_count,
    parse_dict,
    parse_shape,
    parse_state,
    pattern_of,
    reject_other_names,
)
from hfshard.format.parts_of_ranks import names_in, only_model
from hfshard.pickles.described_file import DescribedFile, DescribedTensor, described_file
from hfshard.pickles.pickle_opcodes import DescribedObject, GlobalReference

_NAME: Final = re.compile(r"model_world_size_(\d{1,6})_rank_(\d{1,6})\.pt")
_OPTIMIZER: Final = re.compile(r"optim_world_size_\d{1,6}_rank_\d{1,6}\.pt")
_FOLDERS: Final = ("actor", "critic")
"""Folders of a step in which verl saves a model each."""

_SHARDED: Final = "torch.distributed._shard."
_PLACEMENT: Final = re.compile(r"torch\.distributed\._?tensor\.placement_types\.(?P<kind>\w+)")
_ADMITTED: Final = pattern_of(
    (
        "collections.OrderedDict",
        "torch.Size",
        "torch.device",
        "torch.serialization._get_layout",
        "torch.storage.UntypedStorage",
        "torch._tensor._rebuild_from_type_v2",
        "torch.distributed.remote_device._remote_device",
        "builtins.getattr",  # an Enum's member and a nested class in protocol 2
        f"{_SHARDED}metadata.ShardMetadata",
        f"{_SHARDED}sharded_tensor.shard.Shard",
    ),
    r"torch\.[A-Za-z0-9]+Storage|torch\._utils\._rebuild_(?:tensor|parameter|wrapper_subclass)\w*"
    r"|torch\.distributed\._?tensor\.(?:\w+\.)?(?:DTensor|DTensorSpec|TensorMeta|ShardOrderEntry)"
    r"|torch\.distributed\._?tensor\.placement_types\.\w+"
    r"|torch\.distributed\.(?:_tensor\.)?device_mesh\.DeviceMesh|torch\.distributed\._mesh_layout\.\w+"
    r"|torch\.distributed\._shard\.sharded_tensor\.api\.ShardedTensor(?:\.ProcessGroupState)?"
    r"|torch\.distributed\._shard\.sharded_tensor\.metadata\.\w+"
    r"|torch\.distributed\._shard\.sharding_spec\.\w+\.\w+",
)
"""All classes and functions that the files name, in addition to torch's dtypes."""

_WRAPPED: Final = "torch._utils._rebuild_wrapper_subclass"
_SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class _Cut:
    """A dimension of a tensor that is cut over the ranks."""

    dimension: int
    axes: tuple[tuple[int, int | None], ...]
    """Dimensions of the mesh over which it is cut, one after the other; with the factor of strided parts."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A rank's part of a tensor: all of a plain one."""

    file: str
    tensor: DescribedTensor
    shape: tuple[int, ...]
    """Of the complete tensor."""
    offsets: tuple[int, ...] | None
    """Position of the part; None: by its cuts."""
    cuts: tuple[_Cut, ...] = ()
    """Its cuts, if they say where it is."""
    coordinates: tuple[int, ...] = ()
    """The rank's position in the mesh."""


def find_rank_files(directory: str) -> str | None:
    """Find the file of the lowest rank, in a directory or a folder of it; None if there is none.

    Raises:
        AmbiguousWeightsError: There are an actor and a critic.
    """
    if files := _files_in(directory):
        return files[0][-1]
    below = {name: _files_in(os.path.join(directory, name)) for name in _FOLDERS}
    return only_model(directory, [f"{name}/{files[0][-1]}" for name, files in below.items() if files])


def read_rank_files(directory: str) -> ForeignTable:
    """Read the table of a directory with a file of each rank.

    Raises:
        InvalidArgumentError: A tensor is placed in a way that cannot be read, such as the parts of a sum.
        UnsafePickleError: A pickle asks for anything but what torch writes.
        UnsafePathError, DamagedCheckpointError: A file is missing, incomplete, or outside of the directory.
    """
    files = _checked_ranks(directory, _files_in(directory))
    identities: dict[str, Identity] = {}
    records: dict[tuple[str, int], StoredRecord] = {}
    parts: dict[str, list[_Part]] = {}
    for rank, file in enumerate(files):
        path = os.path.join(directory, file)
        with described_file(path, directory) as described:
            reject_other_names(described.names, _ADMITTED, path, "a rank's file of a model")
            identities[file] = described.identity
            try:
                values = parse_dict(described.value)
                found = {name: list(_parts_of(described, file, value)) for name, value in values.items()}
            except HfshardError:
                raise
            except MALFORMED as error:
                raise damaged(path, f"it is not a state dict as torch writes it ({error!r:.200})") from error
        if rank and found.keys() != parts.keys():
            other = min(found.keys() ^ parts.keys())
            raise damaged(path, f"it and '{files[0]}' do not both have tensor '{other}'")
        for name, some in found.items():
            parts.setdefault(name, []).extend(some)
            for part in some:
                record = part.tensor.storage
                if record.crc32 is not None and record.size:
                    stored = StoredRecord(file, record.offset, record.size, record.crc32)
                    records[file, record.offset] = stored
    runs = ChunkRuns(directory)
    tensors: dict[str, ForeignTensor] = {}
    aliases: dict[str, str] = {}
    known: dict[ForeignTensor, str] = {}
    for name, some in parts.items():
        tensor = _joined(directory, name, some, runs)
        if tensor.runs and known.setdefault(tensor, name) != name:
            aliases[name] = known[tensor]
        else:
            tensors[name] = tensor
    return ForeignTable(
        directory=directory,
        framework=f"verl ({count_of(len(files), 'rank')})",
        tensors=tensors,
        sizes={file: identity[2] for file, identity in identities.items()},
        identities=identities,
        aliases=aliases,
        records=tuple(record for _, record in sorted(records.items())),
    )


def read_rank_run(directory: str) -> ForeignRun:
    """Read a run: the weights alone, as the files of an optimizer have its states by numbers.

    Raises:
        InvalidArgumentError: There are such files.
    """
    for name in sorted(os.listdir(directory)):
        if _OPTIMIZER.fullmatch(name):
            raise InvalidArgumentError(
                f"'{directory}' has the states of its optimizer by numbers, without the names of parameters, as in "
                f"'{name}', so that it is not known which parameter a state belongs to. Nothing was loaded. Take the "
                "weights alone: hfshard convert --weights, or hfshard.load_model.",
                path=os.path.join(directory, name),
            )
    return ForeignRun(weights=read_rank_files(directory), optimizer=None, files={})


def _files_in(directory: str) -> list[tuple[int, int, str]]:
    """List the ranks' files of a directory: number of ranks, rank, name."""
    matches = filter(None, map(_NAME.fullmatch, names_in(directory)))
    return [(int(match[1]), int(match[2]), match[0]) for match in matches]


def _checked_ranks(directory: str, files: Sequence[tuple[int, int, str]]) -> list[str]:
    """Return the file of each rank, in order."""
    worlds = sorted({world for world, _, _ in files})
    if len(worlds) > 1:
        raise damaged(
            directory,
            f"it has files of {shorten_list(list(map(str, worlds)), _SHOWN)} ranks: some are leftovers of another run",
            hint="Move them away.",
        )
    by_rank = {rank: name for _, rank, name in files}
    if len(by_rank) != len(files) or any(rank >= worlds[0] for rank in by_rank):
        raise damaged(directory, f"its files are not one of each of {count_of(worlds[0], 'rank')}")
    for rank in range(worlds[0]):
        if rank not in by_rank:
            name = f"model_world_size_{worlds[0]}_rank_{rank}.pt"
            raise missing_rank(directory, "files", by_rank, worlds[0], rank, name)
    return [by_rank[rank] for rank in range(worlds[0])]


def _parts_of(described: DescribedFile, file: str, value: Any) -> Iterator[_Part]:
    """Yield the parts of a tensor that a rank's file has; several of a ShardedTensor, or none."""
    if not isinstance(value, DescribedObject):
        raise TypeError(f"a {type(value).__name__} in place of a tensor")
    is_wrapped = value.name == "torch._tensor._rebuild_from_type_v2" and value.arguments[0] == GlobalReference(_WRAPPED)
    if not is_wrapped:
        tensor = _found(described, value)
        yield _Part(file, tensor, tensor.shape, (0,) * len(tensor.shape))
        return
    _function, kind, arguments, state = value.arguments
    if kind.name.endswith(".ShardedTensor"):
        shards, metadata, *_ = state
        shape = parse_shape(parse_state(metadata, f"{_SHARDED}sharded_tensor.metadata.ShardedTensorMetadata")["size"])
        for one in shards:
            shard = _merged_state(one)
            of_shard = _merged_state(shard["metadata"])
            tensor = _found(described, shard["tensor"])
            if parse_shape(of_shard["shard_sizes"]) != tensor.shape:
                raise ValueError("a shard of another size than its metadata say")
            yield _Part(file, tensor, shape, parse_shape(of_shard["shard_offsets"]))
        return
    if not kind.name.endswith(".DTensor"):
        raise TypeError(kind.name)
    attributes = _merged(state)
    spec = _merged_state(attributes["_spec"])
    yield _Part(
        file,
        _found(described, attributes["_local_tensor"]),
        parse_shape(arguments[2]),
        None,
        _cuts_of(described.path, spec),
        parse_shape(_merged_state(spec["mesh"])["_coordinate_on_dim"]),
    )


def _found(described: DescribedFile, value: Any) -> DescribedTensor:
    tensor = described.find(value)
    if tensor is None:
        raise TypeError(f"a {value.name} in place of a tensor")
    if not tensor.is_contiguous:
        raise InvalidArgumentError(
            f"'{described.path}' has a tensor in another order than row-major, which hfshard cannot read. Nothing was "
            "loaded. Make it contiguous() in the program that saves it.",
            path=described.path,
        )
    return tensor


def _merged_state(value: DescribedObject) -> dict[str, Any]:
    return _merged(value.state)


def _merged(state: Any) -> dict[str, Any]:
    """Return attributes that were saved as a dict, or as two: without slots, and in slots."""
    found: dict[str, Any] = {}
    for one in state if isinstance(state, tuple) else (state,):
        found |= one or {}
    return found


def _cuts_of(path: str, spec: Mapping[str, Any]) -> tuple[_Cut, ...]:
    """Return the cuts of a tensor's dimensions, as its specification describes them."""
    kinds = [(_kind_of(path, one), one.state) for one in spec["placements"]]
    axes: dict[int, list[tuple[int, int | None]]] = {}
    for axis, (kind, state) in reversed(list(enumerate(kinds))):
        if kind != "Replicate":
            of_dimension = axes.setdefault(parse_count(state["dim"]), [])
            is_inner = kind == "_StridedShard"  # cut once those on its right are, as by FSDP over tensor parallelism
            factor = parse_count(state["split_factor"]) if is_inner else None
            of_dimension.insert(len(of_dimension) if is_inner else 0, (axis, factor))
    for entry in spec.get("shard_order") or () if "_StridedShard" not in dict(kinds) else ():
        dimension, order = entry.arguments
        if sorted(order) != [axis for axis, _ in axes[dimension]]:
            raise ValueError("an order of other cuts than there are")
        axes[dimension] = [(parse_count(axis), None) for axis in order]
    return tuple(_Cut(dimension, tuple(found)) for dimension, found in sorted(axes.items()))


def _kind_of(path: str, placement: DescribedObject) -> str:
    match = _PLACEMENT.fullmatch(placement.name)
    if match is None:
        raise TypeError(placement.name)
    if match["kind"] not in ("Replicate", "Shard", "_StridedShard"):
        raise InvalidArgumentError(
            f"'{path}' has tensors whose placement on the ranks is {match['kind']}, which hfshard cannot read. Nothing "
            "was loaded. Save with torch.distributed.checkpoint, which resolves it.",
            path=path,
        )
    return match["kind"]


def _joined(directory: str, name: str, parts: Sequence[_Part], runs: ChunkRuns) -> ForeignTensor:
    """Join the parts of a tensor."""
    if not parts:
        raise damaged(directory, f"no rank has a part of tensor '{name}'", name)
    first = parts[0]
    dtype, shape = first.tensor.dtype, first.shape
    for part in parts:
        here = part.tensor.dtype, part.shape, part.cuts, part.offsets is None, len(part.tensor.shape)
        if here != (dtype, shape, first.cuts, first.offsets is None, len(shape)):
            raise damaged(directory, f"'{first.file}' and '{part.file}' have different tensors '{name}'", name)
    found: list[ByteRun] = []
    placed = zip(_offsets_of(directory, name, parts), parts, strict=True)
    filled = [(offsets, part) for offsets, part in placed if part.tensor.numel]
    for offsets, part in dict(reversed(filled)).items():  # the first one of replicas
        found += runs.find(name, part.file, part.tensor.offset, dtype, shape, offsets, part.tensor.shape)
    return joined_tensor(dtype, shape, found)


def _offsets_of(directory: str, name: str, parts: Sequence[_Part]) -> Iterable[tuple[int, ...]]:
    """Return the position of each part; by cuts, parts follow one another in the order of the coordinates."""
    if parts[0].offsets is not None:
        return [part.offsets or () for part in parts]
    cuts = {cut.dimension: cut for cut in parts[0].cuts}
    keys_of_parts: list[list[int]] = [[] for _ in parts]
    for dimension, total in enumerate(parts[0].shape):
        axes = cuts[dimension].axes if dimension in cuts else ()
        keys = [tuple(part.coordinates[axis] for axis, _ in axes) for part in parts]
        extents: dict[tuple[int, ...], int] = {}
        for key, part in zip(keys, parts, strict=True):
            if extents.setdefault(key, part.tensor.shape[dimension]) != part.tensor.shape[dimension]:
                raise damaged(directory, f"parts of tensor '{name}' have different sizes", name)
        ordered = sorted(extents)
        begins = dict(zip(ordered, accumulate((extents[key] for key in ordered), initial=0), strict=False))
        if sum(extents.values()) != total:
            raise damaged(
                directory, f"tensor '{name}' has {sum(extents.values())} of {total} elements in a dimension", name
            )
        for number, (axis, factor) in enumerate(axes):
            outer = prod(len({key[at] for key in keys}) for at in range(number) if axes[at][0] > axis)
            if factor not in (None, outer):
                raise InvalidArgumentError(
                    f"'{directory}' has tensor '{name}' in strides of {factor} parts, which hfshard cannot read. "
                    "Nothing was loaded. Save with torch.distributed.checkpoint, which resolves them.",
                    path=directory,
                    fqn=name,
                )
        for found, key in zip(keys_of_parts, keys, strict=True):
            found.append(begins[key])
    return map(tuple, keys_of_parts)
