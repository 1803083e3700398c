"""Directories of torch.distributed.checkpoint (DCP): FSDP, torchtitan, Accelerate and Lightning save in this form.

`.metadata` describes the tensors, the chunks into which they were cut, and the item of a file in which each chunk is.

Source: torch `distributed/checkpoint/{filesystem,hf_storage}.py`.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping
from math import prod
from typing import Final

from hfshard._util.text import count_of, shorten_list
from hfshard.disk.safe_open import Identity
from hfshard.errors import AmbiguousWeightsError, CheckpointNotFoundError, InvalidArgumentError
from hfshard.foreign.byte_runs import ByteRun, ChunkRuns, ForeignTable, StoredRecord, joined_tensor
from hfshard.foreign.dcp_items import Chunk, ItemLayout, open_items
from hfshard.foreign.dcp_metadata import DcpMetadata, read_metadata
from hfshard.pickles.pickle_file import OTHER_KEY, WEIGHTS_KEY

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
