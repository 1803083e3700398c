"""How a checkpoint is loaded, checked once; and which of its tensors are read, by which names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hfshard._util.arguments import check_texts
from hfshard.checkpoint.folder import StoreFolder
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.errors import InvalidArgumentError
from hfshard.format.digests import Verify, check_verify_level
from hfshard.format.index import CheckpointIndex
from hfshard.shards.read_tensors import ReadMode, check_read_mode
from hfshard.tensors.parameter_names import KeySelection, select_keys


class SignedFiles(Protocol):
    """The files of a directory, and a signature over them that was checked."""

    def check_all(self, progress: bool | None = None) -> None:
        """Compare every file."""

    def check_opened(self, checkpoint: OpenCheckpoint, progress: bool | None = None) -> None:
        """Compare the files of weights that are open."""

    def confirm(self) -> None:
        """Look once more at the files that were compared by their names."""


class FilesBeside(Protocol):
    """The small files of a checkpoint in a store that a load reads beside its weights."""

    def read_all(self) -> dict[str, bytes]:
        """Read them as they were at the folder's last look: name -> contents."""


class SignatureDemand(Protocol):
    """What a load asks for that must be signed (`hfshard.signing`)."""

    def find(self, directory: str, subfolder: str = "", *, has_code: bool = False) -> SignedFiles:
        """Check the signature, and all files that a load reads beside the weights."""

    def find_in_store(self, folder: StoreFolder, beside: FilesBeside, *, has_code: bool = False) -> SignedFiles:
        """Do the same in a store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a checkpoint is loaded.

    Raises:
        InvalidArgumentError: A value is not one of those that are allowed, or two contradict each other.
    """

    is_lenient: bool = False
    """For a class of transformers: what transformers takes, and no file is damaged, is not refused but left to it."""
    strict: bool | None = None
    """Whether missing and unexpected names are refused; None: as the function that loads does by default."""
    verify: Verify = "structure"
    """What is checked before any tensor is returned."""
    read: ReadMode = "auto"
    """How the bytes come into memory; "pread" where `disable_mmap` asks for it."""
    disable_mmap: bool | None = None
    """As in transformers."""
    progress: bool | None = None
    """A bar on stderr; None: on a terminal."""
    key: str | None = None
    """Of a file of torch.save: the key under which it has the weights; None: there must be only one candidate."""
    signature: SignatureDemand | None = None
    """By whom every file must be signed that is read; None: nobody need sign. Then every byte of the weights is hashed,
    and `verify` need not ask for it."""
    parallelize: Callable[[Any], Any] | None = None
    """Spreads a model of transformers over ranks, before it has data; each rank then reads its parts."""

    def __post_init__(self) -> None:
        """Check every value."""
        check_verify_level(self.verify)
        check_texts(key=self.key)
        if self.signature is not None:
            object.__setattr__(self, "is_lenient", False)  # nothing is left to who does not check it
        object.__setattr__(self, "read", check_read_mode(self.read, disable_mmap=self.disable_mmap))


def checked_device(device: Any) -> torch.device:
    """Parse a device, and try it.

    Raises:
        InvalidArgumentError: It is none, or this machine or this torch does not have it.
    """
    try:
        if not isinstance(device, str | int | torch.device):
            raise TypeError(f"a {type(device).__name__}")
        parsed = torch.device(device)
        torch.empty(0, device=parsed)
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise InvalidArgumentError(
            f"device must be one that torch has here, such as 'cpu' or 'cuda:0', got {device!r:.200}: {reason:.300}"
        ) from error
    return parsed


# Which tensors of a checkpoint are read, and by which names.


def files_holding(index: CheckpointIndex, keys: KeySelection) -> set[str]:
    """Find the files that hold the tensors of these names, tied names included.

    Raises:
        StateDictMismatchError: A name or glob that matches nothing.
    """
    return {index.weight_map[name] for name in stored_names(index, keys)}


def stored_names(index: CheckpointIndex, keys: KeySelection | None) -> set[str]:
    """Find the stored names of these tensors: their own, or those that they are tied to."""
    selected = select_keys([*index.weight_map, *index.tied_names], keys)
    return {index.tied_names.get(name, name) for name in selected}


def read_tensors(
    checkpoint: OpenCheckpoint, keys: KeySelection | None, device: str | torch.device, read: ReadMode
) -> dict[str, torch.Tensor]:
    """Read tensors of a checkpoint by name, tied names included.

    Args:
        checkpoint: Open.
        keys: Which; None: all.
        device: Where they go.
        read: How the bytes come into memory.
    """
    tied_names = checkpoint.index.tied_names
    selected = select_keys([*checkpoint.keys, *tied_names], keys)
    stored = {tied_names.get(name, name) for name in selected}
    tensors = checkpoint.read([name for name in checkpoint.keys if name in stored], read, device)
    return {name: tensors[tied_names.get(name, name)] for name in selected}
