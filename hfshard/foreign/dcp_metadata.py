"""`.metadata` of torch.distributed.checkpoint (DCP): the tensors and values that were saved, and where each of them is.

It is a pickle, which is described; nothing in it runs.

Source: torch `distributed/checkpoint/{metadata,filesystem,default_planner,_nested_dict}.py`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from hfshard._util.text import shorten_list
from hfshard.disk.safe_open import open_regular
from hfshard.errors import HfshardError, InvalidArgumentError, UnsafePathError
from hfshard.foreign.dcp_items import NEEDED_BY, Chunk, damaged_dcp
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
