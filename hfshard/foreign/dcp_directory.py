"""Directories of torch.distributed.checkpoint (DCP): FSDP, torchtitan, Accelerate and Lightning save in this form.

`.metadata` is a pickle that describes the tensors, the chunks into which they were cut, and the item of a file in which
each chunk is. It is described, and nothing in it runs. An item is a file of torch.save, or a tensor of a safetensors
file. An item's own pickle says how the numbers are laid out; it is described, too.

Source: torch `distributed/checkpoint/{metadata,filesystem,hf_storage,default_planner,_nested_dict}.py`.
"""

from __future__ import annotations

import io
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

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
from hfshard.pickles.pickle_opcodes import DescribedObject, describe_pickle

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
class _Tensor:
    """A tensor as `.metadata` describes it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    """Without those that have no elements."""


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
    described = _read_metadata(directory)
    names = _select(described, key, directory)
    chosen = {name: described.tensors[fqn] for name, fqn in names.items()}
    by_file: dict[str, list[tuple[str, Chunk]]] = defaultdict(list)
    for name, tensor in chosen.items():
        for chunk in tensor.chunks:
            by_file[chunk.file].append((name, chunk))
    runs: dict[str, list[ByteRun]] = {name: [] for name in chosen}
    of_chunks = ChunkRuns(directory)
    records: list[StoredRecord] = []
    identities: dict[str, Identity] = {}
    layouts: dict[bytes, ItemLayout] = {}
    for file, chunks in sorted(by_file.items()):
        with open_items(directory, file, layouts) as items:
            identities[file] = items.identity
            for name, chunk in sorted(chunks, key=lambda item: item[1].begin):
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


# `.metadata`: the tensors, their chunks, and the keys under which they were saved.


@dataclass(frozen=True, slots=True)
class _Described:
    tensors: dict[str, _Tensor]
    """Joined name -> tensor."""
    paths: dict[str, tuple[str, ...]]
    """Joined name of everything that was saved -> its keys: a dot in a name is not one of nesting."""


def _read_metadata(directory: str) -> _Described:
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
        tensors = {}
        for fqn, one in _items_of(state["state_dict_metadata"]):
            if one.name != f"{_CLASSES}BytesStorageMetadata":
                tensors[parse_text(fqn)] = _described_tensor(parse_text(fqn), one, places)
        paths = {parse_text(fqn): tuple(map(str, keys)) for fqn, keys in _items_of(state.get("planner_data") or {})}
        known = [fqn for fqn, _ in _items_of(state["state_dict_metadata"])]
    except HfshardError:
        raise
    except MALFORMED as error:
        raise damaged_dcp(path, f"it does not describe a checkpoint as torch does ({error!r:.200})") from error
    return _Described(tensors, {fqn: paths.get(fqn) or (fqn,) for fqn in known})


def _places_of(value: Any, directory: str) -> dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]:
    """Return (joined name, offsets of a chunk) -> (file, begin, length) of its item."""
    places = {}
    for index, info in _items_of(value):
        of_item = parse_state(info, _STORAGE_INFO)
        of_chunk = parse_state(index, f"{_CLASSES}MetadataIndex")
        if transforms := of_item.get("transform_descriptors"):
            raise InvalidArgumentError(
                f"'{directory}' was saved with transforms ({shorten_list(list(map(str, transforms)), 3)}), so that its "
                "bytes are not those of the tensors. Save it without extensions.",
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
        places[parse_text(of_chunk["fqn"]), at] = found
    return places


def _described_tensor(
    fqn: str, described: DescribedObject, places: Mapping[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]
) -> _Tensor:
    state = parse_state(described, f"{_CLASSES}TensorStorageMetadata")
    properties = state["properties"]
    if properties.name not in _PROPERTIES:
        raise TypeError(properties.name)
    dtype = meaning(properties.state[0])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"'{fqn}' has no dtype")
    shape = parse_shape(state["size"])
    chunks = []
    for one in state["chunks"]:
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
    return _Tensor(dtype, shape, tuple(chunks))


def _items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the items of a dict, or of an OrderedDict that was described."""
    if isinstance(value, DescribedObject) and value.name == "collections.OrderedDict":
        return value.pairs
    items: Iterable[tuple[Any, Any]] = value.items()
    return items


# Selection of the weights among everything that was saved.


_OF_OPTIMIZER: Final = re.compile(r"optim\w*\.(state|param_groups)\.", re.IGNORECASE)
"""Beginning of the names of an optimizer that a program has flattened itself."""

_SHOWN: Final = 8


def _select(described: _Described, key: str | None, directory: str) -> dict[str, str]:
    """Choose the tensors of the model.

    Returns:
        Name in the model -> joined name.
    """
    if key is not None:
        found = _below(described, key)
        if not found:
            keys = shorten_list(sorted(_candidates(described)), _SHOWN, quote=True)
            there = f"Its weights are under {keys}" if keys else "It has no weights that hfshard recognizes"
            raise InvalidArgumentError(f"'{directory}' has no tensors under key={key!r:.200}. {there}.", path=directory)
        return found
    candidates = _candidates(described)
    if not candidates:
        tops = shorten_list(sorted({path[0] for path in described.paths.values()}), _SHOWN, quote=True)
        raise CheckpointNotFoundError(
            f"'{directory}' was saved by torch.distributed.checkpoint, but has no weights that hfshard recognizes: its "
            f"entries are {tops or 'none'}. If one of them has weights, pass it as key=, or as --key on the command "
            "line.",
            path=directory,
        )
    if len(candidates) > 1:
        sets = [f"{one!r:.200} ({count_of(len(_below(described, one)), 'tensor')})" for one in candidates]
        first = candidates[0] or candidates[1]
        raise AmbiguousWeightsError(
            f"'{directory}' contains several sets of weights: {shorten_list(sets, _SHOWN)}. Nothing was loaded. Pass "
            f"one: hfshard.load_model or load_state_dict(..., key={first!r}), or --key {first} on the command line.",
            path=directory,
            keys=tuple(candidates),
        )
    return _below(described, candidates[0])


def _below(described: _Described, key: str) -> dict[str, str]:
    """Return the tensors under a key, by their names below it; for "", those without a key, except an optimizer's."""
    if not key:
        return {
            fqn: fqn for fqn in described.tensors if len(described.paths[fqn]) == 1 and not _OF_OPTIMIZER.match(fqn)
        }
    joined = {fqn: ".".join(described.paths[fqn]) for fqn in described.tensors}
    return {name.removeprefix(f"{key}."): fqn for fqn, name in joined.items() if name.startswith(f"{key}.")}


def _candidates(described: _Described) -> list[str]:
    """List the keys that have weights, without those below another one."""
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for fqn, path in described.paths.items():
        if not any(map(OTHER_KEY.search, path[:-1])) and not _OF_OPTIMIZER.match(fqn):
            groups[path[:-1]].append(fqn)
    found = [keys for keys, fqns in groups.items() if _may_be_weights(keys, fqns, described)]
    tops = [
        keys for keys in found if not any(other and other == keys[: len(other)] for other in found if other != keys)
    ]
    return [".".join(keys) for keys in sorted(tops)]


def _may_be_weights(keys: tuple[str, ...], fqns: list[str], described: _Described) -> bool:
    tensors = [described.tensors[fqn] for fqn in fqns if fqn in described.tensors]
    if keys and WEIGHTS_KEY.search(keys[-1]):
        return bool(tensors)
    is_pure = not keys or len(tensors) == len(fqns)
    return is_pure and any(one.shape and (one.dtype.is_floating_point or one.dtype.is_complex) for one in tensors)
