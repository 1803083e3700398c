"""Directories of torch.distributed.checkpoint (DCP): FSDP, torchtitan, Accelerate and Lightning save in this form.

`.metadata` describes the tensors, the chunks into which they were cut, and the item of a file in which each chunk is.

Source: torch `distributed/checkpoint/{filesystem,hf_storage}.py`.
"""

from __future__ import annotations

import io
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple

import torch

from hfshard._util.text import count_of, shorten_list
from hfshard.disk.safe_open import Identity, open_regular
from hfshard.errors import (
    AmbiguousWeightsError,
    CheckpointNotFoundError,
    HfshardError,
    InvalidArgumentError,
    UnsafePathError,
)
from hfshard.foreign.byte_runs import ByteRun, ChunkRuns, ForeignTable, StoredRecord, joined_tensor
from hfshard.foreign.dcp_items import NEEDED_BY, Chunk, ItemLayout, damaged_dcp, open_items
from hfshard.foreign.described_values import (
    MALFORMED,
    parse_count,
    parse_shape,
    parse_state,
    parse_text,
    pattern_of,
    reject_other_names,
)
from hfshard.format.file_names import is_safe_file_name
from hfshard.format.parts_of_ranks import DCP_METADATA
from hfshard.pickles.described_file import meaning
from hfshard.pickles.pickle_file import OTHER_KEY, WEIGHTS_KEY
from hfshard.pickles.pickle_opcodes import DescribedObject, NameHashes, checked_key, describe_pickle

_MOST_METADATA_BYTES: Final = 1 << 30
"""Limit of that file: a chunk takes about 150 bytes in it."""

_CLASSES: Final = "torch.distributed.checkpoint.metadata."
_STORAGE_INFO: Final = "torch.distributed.checkpoint.filesystem._StorageInfo"
_PROPERTIES: Final = (
    f"{_CLASSES}TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",  # before torch 2.3
)
_ADMITTED: Final = pattern_of(
    (
        *(f"{_CLASSES}{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
        *(f"{_CLASSES}{name}StorageMetadata" for name in ("Tensor", "Bytes", "Chunk")),
        *_PROPERTIES,
        "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        _STORAGE_INFO,
        "torch.distributed.checkpoint.filesystem._StoragePrefix",
        "torch.Size",
        "torch.serialization._get_layout",
        "builtins.getattr",  # an Enum's member in protocol 4
        "collections.OrderedDict",
        *(f"pathlib.{local}{name}Path" for local in ("", "_local.") for name in ("Posix", "PurePosix", "Windows")),
    )
)
"""All classes and functions that `.metadata` names, in addition to torch's dtypes."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor as `.metadata` describes it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    """Without those that have no elements."""


class SavedItem(NamedTuple):
    """The item of a file that has a value which is not a tensor."""

    file: str
    begin: int
    """Position in the file."""
    length: int


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """Everything that was saved in a directory, by joined names."""

    tensors: dict[str, SavedTensor]
    values: dict[str, SavedItem]
    """All other values."""
    paths: dict[str, tuple[str | int, ...]]
    """Keys of each tensor and value, ints for those of lists: a dot in a name is not one of nesting."""


def read_metadata(directory: str) -> DcpMetadata:
    """Read what a directory has.

    Raises:
        UnsafePickleError: `.metadata` asks for anything but what torch writes.
        InvalidArgumentError: It was saved with transforms.
        UnsafePathError, DamagedCheckpointError: It is missing, incomplete, or names a file outside of the directory.
    """
    path = os.path.join(directory, DCP_METADATA)
    with os.fdopen(open_regular(path, directory), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MOST_METADATA_BYTES:
            raise damaged_dcp(path, f"it has {size:,} bytes, and at most {_MOST_METADATA_BYTES:,} are read")
        described = describe_pickle(io.BytesIO(file.read(size)), path)
    reject_other_names(described.names, _ADMITTED, path, NEEDED_BY)
    try:
        state = parse_state(described.value, f"{_CLASSES}Metadata")
        places = _places_of(state["storage_data"], directory)
        once = _Once(size)
        tensors = {}
        values = {}
        for fqn, one in _items_of(state["state_dict_metadata"]):
            if one.name != f"{_CLASSES}BytesStorageMetadata":
                tensors[parse_text(fqn)] = _described_tensor(parse_text(fqn), one, places, once)
            elif (place := places.get((parse_text(fqn), None))) is not None:
                values[fqn] = SavedItem(*place)
            else:
                raise ValueError(f"the value '{fqn}' is in no file")
        planned = _items_of(state.get("planner_data") or {})
        keys = {parse_text(fqn): tuple(map(_key, once.all_of(path))) for fqn, path in planned}
    except HfshardError:
        raise
    except MALFORMED as error:
        raise damaged_dcp(path, f"it does not describe a checkpoint as torch does ({error!r:.200})") from error
    return DcpMetadata(tensors, values, {fqn: keys.get(fqn) or (fqn,) for fqn in (*tensors, *values)})


class _Once:
    """A count of entries of lists: each takes bytes in a pickle, unless one list is in it a million times."""

    def __init__(self, size: int) -> None:
        self._left = size

    def all_of(self, entries: Any) -> list[Any] | tuple[Any, ...]:
        """Return a list or tuple.

        Raises:
            TypeError, ValueError: It is none; or there are more entries than the file has bytes.
        """
        if not isinstance(entries, list | tuple):
            raise TypeError("no list")
        self._left -= len(entries)
        if self._left < 0:
            raise ValueError("a list that is there again and again")
        return entries


def _places_of(value: Any, directory: str) -> dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]:
    """Return (joined name, offsets of a chunk) -> (file, begin, length) of its item."""
    places = {}
    hashes = NameHashes()
    for index, info in _items_of(value):
        of_item = parse_state(info, _STORAGE_INFO)
        of_chunk = parse_state(index, f"{_CLASSES}MetadataIndex")
        if transforms := of_item.get("transform_descriptors"):
            raise InvalidArgumentError(
                f"'{directory}' was saved with transforms ({shorten_list(list(map(parse_text, transforms)), 3)}), so "
                "that its bytes are not those of the tensors. Save it without extensions.",
                path=directory,
            )
        offset = of_chunk.get("offset")
        at = None if offset is None else parse_shape(offset)
        found = parse_text(of_item["relative_path"]), parse_count(of_item["offset"]), parse_count(of_item["length"])
        if not is_safe_file_name(found[0]):
            raise UnsafePathError(
                f"'{os.path.join(directory, DCP_METADATA)}' names the file {found[0]!r:.200}, which is outside of its "
                "directory. Do not load it unless you know its origin.",
                path=directory,
                actual=found[0],
            )
        places[parse_text(of_chunk["fqn"]), checked_key(at, hashes)] = found
    return places


def _described_tensor(
    fqn: str,
    described: DescribedObject,
    places: Mapping[tuple[str, tuple[int, ...] | None], tuple[str, int, int]],
    once: _Once,
) -> SavedTensor:
    state = parse_state(described, f"{_CLASSES}TensorStorageMetadata")
    properties = state["properties"]
    if properties.name not in _PROPERTIES:
        raise TypeError(properties.name)
    dtype = meaning(properties.state[0])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"'{fqn}' has no dtype")
    shape = parse_shape(state["size"])
    chunks = []
    for one in once.all_of(state["chunks"]):
        of_chunk = parse_state(one, f"{_CLASSES}ChunkStorageMetadata")
        offsets, sizes = parse_shape(of_chunk["offsets"]), parse_shape(of_chunk["sizes"])
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise ValueError(f"a chunk of '{fqn}' has other dimensions")
        if any(begin + size > most for begin, size, most in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a chunk of '{fqn}' is out of its bounds")
        if 0 not in sizes:
            place = places.get((fqn, offsets)) or (places.get((fqn, None)) if not any(offsets) else None)
            if place is None:
                raise ValueError(f"the chunk of '{fqn}' at {list(offsets)} is in no file")
            chunks.append(Chunk(offsets, sizes, *place))
    return SavedTensor(dtype, shape, tuple(chunks))


def _items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the items of a dict, or of an OrderedDict that was described."""
    if isinstance(value, DescribedObject) and value.name == "collections.OrderedDict":
        return value.pairs
    items: Iterable[tuple[Any, Any]] = value.items()
    return items


def _key(value: Any) -> str | int:
    return parse_count(value) if isinstance(value, int) else parse_text(value)


_EDGES_AT_ONCE: Final = 1024
"""Items whose beginnings and ends are in memory at once: 4 MiB."""


def read_dcp_directory(directory: str, key: str | None = None) -> ForeignTable:
    """Read the table of a directory in which torch.distributed.checkpoint has saved a model, among others.

    Args:
        directory: The directory with `.metadata`.
        key: The key under which the model was saved, with a dot before each deeper one; "" for tensors without one.
            None: there must be only one candidate. Optimizers, schedulers and the like are none.

    Raises:
        CheckpointNotFoundError: It has no weights.
        AmbiguousWeightsError: There are several sets of weights, which the error lists.
        InvalidArgumentError: There is nothing under `key`; or it was saved with transforms.
        UnsafePickleError: A pickle asks for anything but what torch writes.
        UnsafePathError, DamagedCheckpointError: A file is missing, incomplete, or outside of the directory.
    """
    metadata = read_metadata(directory)
    return table_of(directory, metadata, tensors_below(metadata, choose_weights(metadata, key, directory)))


def table_of(directory: str, metadata: DcpMetadata, names: Mapping[str, str], folder: str = "") -> ForeignTable:
    """Build the table of some of the tensors in a directory, or in a folder of it.

    Args:
        directory: The directory of the table.
        metadata: The metadata in it, or in the folder.
        names: Name in the table -> joined name.
        folder: The folder; empty: the directory itself.

    Raises:
        InvalidArgumentError: A tensor is in too many pieces.
        UnsafePickleError: An item asks for anything but a tensor.
        DamagedCheckpointError: A file is missing or incomplete.
    """
    chosen = {name: metadata.tensors[fqn] for name, fqn in names.items()}
    by_file: dict[str, list[tuple[str, Chunk]]] = defaultdict(list)
    for name, tensor in chosen.items():
        for chunk in tensor.chunks:
            by_file[chunk.file].append((name, chunk))
    runs: dict[str, list[ByteRun]] = {name: [] for name in chosen}
    records: list[StoredRecord] = []
    identities: dict[str, Identity] = {}
    layouts: dict[bytes, ItemLayout] = {}
    of_chunks = ChunkRuns(directory)
    inner = os.path.join(directory, folder) if folder else directory
    for name_in_folder, chunks in sorted(by_file.items()):
        file = f"{folder}/{name_in_folder}" if folder else name_in_folder
        with open_items(inner, name_in_folder, layouts) as items:
            identities[file] = items.identity
            in_order = sorted(chunks, key=lambda item: item[1].begin)
            for number, (name, chunk) in enumerate(in_order):
                if number % _EDGES_AT_ONCE == 0:
                    items.read_edges(one for _, one in in_order[number : number + _EDGES_AT_ONCE])
                tensor = chosen[name]
                found = items.find(names[name], chunk, tensor.dtype)
                runs[name] += of_chunks.find(
                    names[name], file, found.offset, tensor.dtype, tensor.shape, chunk.offsets, chunk.sizes, found.order
                )
                if found.crc32:
                    nbytes = tensor.dtype.itemsize * prod(chunk.sizes)
                    records.append(StoredRecord(file, found.offset, nbytes, found.crc32))
    return ForeignTable(
        directory=directory,
        framework=f"torch DCP ({count_of(len(identities), 'file')})",
        tensors={name: joined_tensor(tensor.dtype, tensor.shape, runs[name]) for name, tensor in chosen.items()},
        sizes={file: identity[2] for file, identity in identities.items()},
        identities=identities,
        records=tuple(records),
    )


# Selection of the weights among everything that was saved.


_OF_OPTIMIZER: Final = re.compile(r"optim\w*\.(state|param_groups)\.", re.IGNORECASE)
"""Beginning of the names of an optimizer that a program has flattened itself."""

_SHOWN: Final = 8


def choose_weights(metadata: DcpMetadata, key: str | None, directory: str) -> str:
    """Return the key of the model; arguments and errors as of `read_dcp_directory`."""
    if key is not None:
        if not tensors_below(metadata, key):
            keys = shorten_list(sorted(candidates(metadata)), _SHOWN, quote=True)
            there = f"Its weights are under {keys}" if keys else "It has no weights that hfshard recognizes"
            raise InvalidArgumentError(f"'{directory}' has no tensors under key={key!r:.200}. {there}.", path=directory)
        return key
    found = candidates(metadata)
    if not found:
        tops = shorten_list(sorted({str(path[0]) for path in metadata.paths.values()}), _SHOWN, quote=True)
        raise CheckpointNotFoundError(
            f"'{directory}' was saved by torch.distributed.checkpoint, but has no weights that hfshard recognizes: its "
            f"entries are {tops or 'none'}. If one of them has weights, pass it as key=, or as --key on the command "
            "line.",
            path=directory,
        )
    if len(found) > 1:
        sets = [f"{one!r:.200} ({count_of(len(tensors_below(metadata, one)), 'tensor')})" for one in found]
        first = found[0] or found[1]
        raise AmbiguousWeightsError(
            f"'{directory}' contains several sets of weights: {shorten_list(sets, _SHOWN)}. Nothing was loaded. Pass "
            f"one: hfshard.load_model or load_state_dict(..., key={first!r}), or --key {first} on the command line.",
            path=directory,
            keys=tuple(found),
        )
    return found[0]


def tensors_below(metadata: DcpMetadata, key: str) -> dict[str, str]:
    """Return the tensors under a key, by their names below it; for "", those without a key, except an optimizer's."""
    if not key:
        return {fqn: fqn for fqn in metadata.tensors if len(metadata.paths[fqn]) == 1 and not _OF_OPTIMIZER.match(fqn)}
    joined = {fqn: ".".join(map(str, metadata.paths[fqn])) for fqn in metadata.tensors}
    return {name.removeprefix(f"{key}."): fqn for fqn, name in joined.items() if name.startswith(f"{key}.")}


def candidates(metadata: DcpMetadata) -> list[str]:
    """List the keys that have weights, without those below another one."""
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for fqn, path in metadata.paths.items():
        keys = tuple(map(str, path[:-1]))
        if not any(map(OTHER_KEY.search, keys)) and not _OF_OPTIMIZER.match(fqn):
            groups[keys].append(fqn)
    tops: list[tuple[str, ...]] = []
    for keys in sorted(keys for keys, fqns in groups.items() if _may_be_weights(keys, fqns, metadata)):
        if not (tops and tops[-1] and tops[-1] == keys[: len(tops[-1])]):  # those below it follow it
            tops.append(keys)
    return [".".join(keys) for keys in tops]


def _may_be_weights(keys: tuple[str, ...], fqns: list[str], metadata: DcpMetadata) -> bool:
    tensors = [metadata.tensors[fqn] for fqn in fqns if fqn in metadata.tensors]
    if keys and WEIGHTS_KEY.search(keys[-1]):
        return bool(tensors)
    is_pure = not keys or len(tensors) == len(fqns)
    return is_pure and any(one.shape and (one.dtype.is_floating_point or one.dtype.is_complex) for one in tensors)
