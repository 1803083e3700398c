"""What a checkpoint consists of, as plain data: `hfshard inspect` and its page are made from it."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from hfshard._util.arguments import absolute_path
from hfshard.checkpoint.load_options import LoadOptions
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.constants import SIGNATURE_NAME
from hfshard.format.index import FileDigest
from hfshard.hub.resolve import CheckpointQuery
from hfshard.tensors.stored_tensor import stored_dtype_name
from hfshard.viewing.opening import ViewedCheckpoint, open_to_view
from hfshard.viewing.tensor_entry import TensorEntry


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of the checkpoint."""

    name: str
    nbytes: int
    tensors: int | None
    """How many tensors it holds; None for a config, which holds none."""
    digest: FileDigest
    """What was recorded when it was saved; empty where hfshard did not save it."""


@dataclass(frozen=True, slots=True)
class DtypeEntry:
    """All tensors of one dtype."""

    dtype: str
    tensors: int
    parameters: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint, from its index and headers alone: no tensor is read."""

    place: str
    """An absolute path, an address of a store, or "org/name@revision"; of a run, that of its checkpoint."""
    directory: str
    """Where its files are; as it was typed, where it was."""
    entry: str
    """The file that readers open first: the index, or the single file."""
    files: tuple[FileEntry, ...]
    key: str | None
    """Under which a file of torch.save has the weights; None: it is nothing else, or no such file."""
    tensors: tuple[TensorEntry, ...]
    """In the order of the files and of the bytes in them."""
    tied_names: dict[str, str]
    metadata: dict[str, Any]
    is_verifiable: bool
    """Whether every file that holds tensors has a checksum."""
    signature: str | None
    """The name of the signature that lies beside; whether it holds is not checked. None: there is none."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(prod(tensor.shape) for tensor in self.tensors)

    @property
    def dtypes(self) -> tuple[DtypeEntry, ...]:
        """What each dtype takes, the largest first."""
        counts = Counter(tensor.dtype for tensor in self.tensors)
        entries = [
            DtypeEntry(
                dtype,
                count,
                sum(prod(tensor.shape) for tensor in self.tensors if tensor.dtype == dtype),
                sum(tensor.nbytes for tensor in self.tensors if tensor.dtype == dtype),
            )
            for dtype, count in counts.items()
        ]
        return tuple(sorted(entries, key=lambda entry: (-entry.nbytes, entry.dtype)))

    def largest(self, count: int) -> list[TensorEntry]:
        """The tensors with the most bytes, the largest first; the earlier ones of equals."""
        return sorted(self.tensors, key=lambda tensor: -tensor.nbytes)[:count]

    def as_json(self) -> dict[str, Any]:
        """Everything, for `--format json`."""
        return {
            "directory": self.directory,
            "entry": self.entry,
            "key": self.key,
            "is_verifiable": self.is_verifiable,
            "signature": self.signature,
            "total_size": self.nbytes,
            "total_parameters": self.parameters,
            "files": [
                {
                    "name": file.name,
                    "size": file.nbytes,
                    "tensors": file.tensors,
                    "sha256": file.digest.sha256,
                    "xxh3": file.digest.xxh3,
                }
                for file in self.files
            ],
            "tensors": [{**asdict(tensor), "shape": list(tensor.shape)} for tensor in self.tensors],
            "dtypes": [asdict(entry) for entry in self.dtypes],
            "tied_names": self.tied_names,
            "metadata": self.metadata,
        }


def inspect_checkpoint(
    path: str | os.PathLike[str],
    *,
    variant: str | None = None,
    key: str | None = None,
    subfolder: str = "",
    revision: str | None = None,
    token: str | bool | None = None,
) -> Inspection:
    """Read a checkpoint's index and headers.

    Args:
        path: As for `open_to_view`: a directory, a file, an address, a name of the Hub, a run or a step of one.
        variant, subfolder, revision, token: As in transformers' `from_pretrained`.
        key: Of a file of torch.save, as in `load_state_dict`.

    Raises:
        CheckpointNotFoundError: No weights there.
        DamagedCheckpointError, UnsafePathError, UnsafePickleError: Something is wrong with a file.
        StoreError, HubError: The store or the Hub refuses, or can't be reached.
    """
    query = CheckpointQuery(variant=variant, subfolder=subfolder, revision=revision, token=token)
    with open_to_view(path, query, LoadOptions(verify="none", key=key)) as viewed:
        return _inspected(viewed, os.fspath(path))


def _inspected(viewed: ViewedCheckpoint, typed: str) -> Inspection:
    checkpoint = viewed.checkpoint
    is_as_typed = os.path.isdir(typed) and checkpoint.directory == absolute_path(typed)
    return Inspection(
        place=viewed.place,
        directory=typed if is_as_typed else checkpoint.directory,
        entry=checkpoint.weights.name,
        key=next((pickled.key for pickled in checkpoint.pickles.values()), None),
        files=tuple(_files(checkpoint)),
        tensors=tuple(_tensors(checkpoint)),
        tied_names=dict(checkpoint.index.tied_names),
        metadata=dict(checkpoint.index.metadata),
        is_verifiable=checkpoint.index.is_verifiable,
        signature=SIGNATURE_NAME if checkpoint.folder.has(SIGNATURE_NAME) else None,
    )


def _files(checkpoint: OpenCheckpoint) -> list[FileEntry]:
    counts = Counter(checkpoint.index.weight_map.values())
    digests = checkpoint.index.files
    configs = [name for name in digests if name not in checkpoint.shards]
    entries = []
    for name in [*checkpoint.shards, *checkpoint.pickles, *sorted(configs)]:
        nbytes = checkpoint.folder.size(name)
        is_config = name in configs and name not in checkpoint.pickles
        entries.append(FileEntry(name, nbytes, None if is_config else counts[name], digests.get(name, FileDigest())))
    return entries


def _tensors(checkpoint: OpenCheckpoint) -> list[TensorEntry]:
    entries = [
        TensorEntry(info.name, info.dtype, info.shape, info.nbytes, file)
        for file, shard in checkpoint.shards.items()
        for info in shard.header.tensors.values()
    ]
    for file, pickled in checkpoint.pickles.items():
        for name, tensor in pickled.tensors.items():
            dtype = stored_dtype_name(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")
            entries.append(TensorEntry(name, dtype, tuple(tensor.shape), tensor.nbytes, file))
    return entries
