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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, product
from math import prod
from typing import Any, Final

import torch

from hfshard._util.text import count_of, shorten_list
from hfshard.disk.safe_open import open_regular
from hfshard.errors import (
    AmbiguousWeightsError,
    CheckpointNotFoundError,
    HfshardError,
    InvalidArgumentError,
    UnsafePathError,
)
from hfshard.foreign.byte_runs import ByteRun, ForeignTable, ForeignTensor, StoredRecord
from hfshard.foreign.dcp_items import Chunk, FoundChunk, ItemLayout, damaged_dcp, open_items, reject_other_names
from hfshard.format.file_names import is_safe_file_name
from hfshard.pickles.described_file import meaning
from hfshard.pickles.pickle_file import OTHER_KEY, WEIGHTS_KEY
from hfshard.pickles.pickle_opcodes import DescribedObject, NameHashes, checked_key, describe_pickle

METADATA: Final = ".metadata"
"""The file by which a directory of DCP is known."""

_MOST_METADATA_BYTES: Final = 1 << 30
"""Limit of that file: a chunk takes about 150 bytes in it."""

_MOST_PIECES: Final = 1 << 20
"""Limit of all runs besides the first one of each chunk: about 150 MB. A transposed matrix has one per column."""

_MOST_DIMENSIONS: Final = 64
"""As many as torch allows; a pickle can have one long shape for many tensors."""

_CLASSES: Final = "torch.distributed.checkpoint.metadata."
_STORAGE_INFO: Final = "torch.distributed.checkpoint.filesystem._StorageInfo"
_PROPERTIES: Final = (
    f"{_CLASSES}TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",  # before torch 2.3
)
_ADMITTED: Final = frozenset(
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
    records: list[StoredRecord] = []
    sizes: dict[str, int] = {}
    layouts: dict[bytes, ItemLayout] = {}
    left = _MOST_PIECES
    for file, chunks in sorted(by_file.items()):
        with open_items(directory, file, layouts) as items:
            sizes[file] = items.size
            for name, chunk in sorted(chunks, key=lambda item: item[1].begin):
                tensor = chosen[name]
                found = items.find(names[name], chunk, tensor.dtype)
                pieces = list(islice(_runs_of(file, found, tensor, chunk), left + 2))
                left -= len(pieces) - 1
                if left < 0:
                    raise InvalidArgumentError(
                        f"'{os.path.join(directory, file)}' has tensor '{names[name]}' in too many pieces: more than "
                        f"{_MOST_PIECES:,}. Nothing was loaded. Save it contiguous(), or cut in its first dimension.",
                        path=directory,
                        fqn=name,
                    )
                runs[name] += pieces
                if found.crc32:
                    nbytes = tensor.dtype.itemsize * prod(chunk.sizes)
                    records.append(StoredRecord(file, found.offset, nbytes, found.crc32))
    return ForeignTable(
        directory=directory,
        framework=f"torch DCP ({count_of(len(sizes), 'file')})",
        tensors={name: _foreign_tensor(tensor, runs[name]) for name, tensor in chosen.items()},
        sizes=sizes,
        records=tuple(records),
    )


def _foreign_tensor(tensor: _Tensor, runs: Iterable[ByteRun]) -> ForeignTensor:
    return ForeignTensor(tensor.dtype, tensor.shape, tuple(sorted(runs, key=lambda run: run.start)))


def _runs_of(file: str, found: FoundChunk, tensor: _Tensor, chunk: Chunk) -> Iterator[ByteRun]:
    """Yield the runs of a chunk.

    Of its dimensions, in the order in which the item has them, the innermost ones make the bytes of a row while the
    tensor has them in one piece, too. Those around them make rows as long as their distances are equal. There is a run
    for each index of the others.
    """
    steps = [tensor.dtype.itemsize] * len(tensor.shape)
    for at in reversed(range(len(steps) - 1)):
        steps[at] = steps[at + 1] * tensor.shape[at + 1]
    start = sum(begin * step for begin, step in zip(chunk.offsets, steps, strict=True))
    outer = [(chunk.sizes[at], steps[at]) for at in found.order if chunk.sizes[at] > 1]
    row_bytes = tensor.dtype.itemsize
    while outer and outer[-1][1] == row_bytes:
        row_bytes *= outer.pop()[0]
    rows, stride = outer.pop() if outer else (1, 0)
    while outer and outer[-1][1] == rows * stride:
        rows *= outer.pop()[0]
    for number, index in enumerate(product(*(range(size) for size, _ in outer))):
        at = start + sum(one * step for one, (_, step) in zip(index, outer, strict=True))
        yield ByteRun(file, found.offset + number * rows * row_bytes, row_bytes, at, rows, stride)


# `.metadata`: the tensors, their chunks, and the keys under which they were saved.


@dataclass(frozen=True, slots=True)
class _Described:
    tensors: dict[str, _Tensor]
    """Joined name -> tensor."""
    paths: dict[str, tuple[str, ...]]
    """Joined name of everything that was saved -> its keys: a dot in a name is not one of nesting."""


def _read_metadata(directory: str) -> _Described:
    path = os.path.join(directory, METADATA)
    with os.fdopen(open_regular(path, directory), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MOST_METADATA_BYTES:
            raise damaged_dcp(path, f"it has {size:,} bytes, and at most {_MOST_METADATA_BYTES:,} are read")
        described = describe_pickle(io.BytesIO(file.read(size)), path)
    reject_other_names(described.names, _ADMITTED, path)
    try:
        state = _state_of(described.value, f"{_CLASSES}Metadata")
        places = _places_of(state["storage_data"], directory)
        once = _Once(size)
        tensors = {}
        for fqn, one in _items_of(state["state_dict_metadata"]):
            if one.name != f"{_CLASSES}BytesStorageMetadata":
                tensors[_text(fqn)] = _described_tensor(_text(fqn), one, places, once)
        planned = _items_of(state.get("planner_data") or {})
        paths = {_text(fqn): tuple(map(_key, once.all_of(keys))) for fqn, keys in planned}
        known = [fqn for fqn, _ in _items_of(state["state_dict_metadata"])]
    except HfshardError:
        raise
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise damaged_dcp(path, f"it does not describe a checkpoint as torch does ({error!r:.200})") from error
    return _Described(tensors, {fqn: paths.get(fqn) or (fqn,) for fqn in known})


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
        of_item = _state_of(info, _STORAGE_INFO)
        of_chunk = _state_of(index, f"{_CLASSES}MetadataIndex")
        if transforms := of_item.get("transform_descriptors"):
            raise InvalidArgumentError(
                f"'{directory}' was saved with transforms ({shorten_list(list(map(_text, transforms)), 3)}), so that "
                "its bytes are not those of the tensors. Save it without extensions.",
                path=directory,
            )
        offset = of_chunk.get("offset")
        at = None if offset is None else _size(offset)
        found = _text(of_item["relative_path"]), _number(of_item["offset"]), _number(of_item["length"])
        if not is_safe_file_name(found[0]):
            raise UnsafePathError(
                f"'{os.path.join(directory, METADATA)}' names the file {found[0]!r:.200}, which is outside of its "
                "directory. Do not load it unless you know its origin.",
                path=directory,
                actual=found[0],
            )
        places[_text(of_chunk["fqn"]), checked_key(at, hashes)] = found
    return places


def _described_tensor(
    fqn: str,
    described: DescribedObject,
    places: Mapping[tuple[str, tuple[int, ...] | None], tuple[str, int, int]],
    once: _Once,
) -> _Tensor:
    state = _state_of(described, f"{_CLASSES}TensorStorageMetadata")
    properties = state["properties"]
    if properties.name not in _PROPERTIES:
        raise TypeError(properties.name)
    dtype = meaning(properties.state[0])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"'{fqn}' has no dtype")
    shape = _size(state["size"])
    chunks = []
    for one in once.all_of(state["chunks"]):
        of_chunk = _state_of(one, f"{_CLASSES}ChunkStorageMetadata")
        offsets, sizes = _size(of_chunk["offsets"]), _size(of_chunk["sizes"])
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


def _state_of(value: Any, name: str) -> dict[str, Any]:
    """Return the attributes of an object of a class."""
    if not isinstance(value, DescribedObject) or value.name != name or not isinstance(value.state, dict):
        raise TypeError(f"no {name.rpartition('.')[2]}")
    return value.state


def _items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the items of a dict, or of an OrderedDict that was described."""
    if isinstance(value, DescribedObject) and value.name == "collections.OrderedDict":
        return value.pairs
    items: Iterable[tuple[Any, Any]] = value.items()
    return items


def _size(value: Any) -> tuple[int, ...]:
    numbers = value.arguments[0] if isinstance(value, DescribedObject) and value.name == "torch.Size" else value
    if not isinstance(numbers, tuple) or len(numbers) > _MOST_DIMENSIONS:
        raise TypeError("no torch.Size")
    return tuple(map(_number, numbers))


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError("a number of bytes or elements that is none")
    return value


def _key(value: Any) -> str:
    return str(_number(value)) if isinstance(value, int) else _text(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a name that is not text")
    return value


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
    tops: list[tuple[str, ...]] = []
    for keys in sorted(keys for keys, fqns in groups.items() if _may_be_weights(keys, fqns, described)):
        if not (tops and tops[-1] and tops[-1] == keys[: len(tops[-1])]):  # those below it follow it
            tops.append(keys)
    return [".".join(keys) for keys in tops]


def _may_be_weights(keys: tuple[str, ...], fqns: list[str], described: _Described) -> bool:
    tensors = [described.tensors[fqn] for fqn in fqns if fqn in described.tensors]
    if keys and WEIGHTS_KEY.search(keys[-1]):
        return bool(tensors)
    is_pure = not keys or len(tensors) == len(fqns)
    return is_pure and any(one.shape and (one.dtype.is_floating_point or one.dtype.is_complex) for one in tensors)
