"""Options of a load, checked once, and the selection of the tensors to read by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hfshard._util.arguments import check_text_arguments
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.checkpoint.ranged_folder import RangedFolder
from hfshard.errors import InvalidArgumentError
from hfshard.format.index import CheckpointIndex, Verify, check_verify_level
from hfshard.shards.read_tensors import ReadMode, check_read_mode
from hfshard.tensors.parameter_names import KeySelection, select_keys


class SignatureCheck(Protocol):
    """Files of a checkpoint, and a verified signature over them."""

    def check_all(self, progress: bool | None = None) -> None:
        """Compare every file."""

    def check_opened(self, checkpoint: OpenCheckpoint, progress: bool | None = None) -> None:
        """Compare the files of weights that are open."""

    def confirm(self) -> None:
        """Check once more the files that were compared by their names."""


class FilesBeside(Protocol):
    """The small files of a checkpoint in a store that a load reads along with its weights."""

    def read_all(self) -> dict[str, bytes]:
        """Read the files as the folder last listed them: name -> contents."""


class SignatureRequirement(Protocol):
    """The signature that a load requires (`hfshard.signing`)."""

    def find(self, directory: str, subfolder: str = "", *, has_code: bool = False) -> SignatureCheck:
        """Check the signature, and all files that a load reads along with the weights."""

    def find_in_store(self, folder: RangedFolder, beside: FilesBeside, *, has_code: bool = False) -> SignatureCheck:
        """Do the same in a store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options for loading a checkpoint.

    Raises:
        InvalidArgumentError: A value is not allowed, or two values contradict each other.
    """

    is_lenient: bool = False
    """For a class of transformers: accept what transformers accepts, unless a file is damaged."""
    strict: bool | None = None
    """Reject missing and unexpected names; None: the default of the function that loads."""
    verify: Verify = "structure"
    """Level of the checks before any tensor is returned."""
    read: ReadMode = "auto"
    """Method of reading bytes into memory; "pread" if `disable_mmap` asks for it."""
    disable_mmap: bool | None = None
    """The argument of the same name in transformers."""
    progress: bool | None = None
    """A bar on stderr; None: on a terminal."""
    key: str | None = None
    """Key of the weights in a file of torch.save; None: there must be only one candidate."""
    signature: SignatureRequirement | None = None
    """Signature that must cover every file that is read; None: no signature is needed. If set, every byte of the
    weights is hashed, whatever `verify` asks for."""
    parallelize: Callable[[Any], Any] | None = None
    """Function that spreads a transformers model over ranks before it has data; each rank then reads its parts."""

    def __post_init__(self) -> None:
        """Check every value."""
        check_verify_level(self.verify)
        check_text_arguments(key=self.key)
        if self.signature is not None:
            object.__setattr__(self, "is_lenient", False)  # transformers would not check the signature
        object.__setattr__(self, "read", check_read_mode(self.read, disable_mmap=self.disable_mmap))


def checked_device(device: Any) -> torch.device:
    """Parse a device, and try it.

    Raises:
        InvalidArgumentError: It is not a device, or this machine or this torch does not have it.
    """
    try:
        if not isinstance(device, str | int | torch.device):
            raise TypeError(f"a {type(device).__name__}")
        parsed = torch.device(device)
        torch.empty(0, device=parsed)
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise InvalidArgumentError(
            f"device must be available to torch, such as 'cpu' or 'cuda:0', got {device!r:.200}: {reason:.300}"
        ) from error
    return parsed


# Selection of a checkpoint's tensors by name.


def files_with_keys(index: CheckpointIndex, keys: KeySelection) -> set[str]:
    """Find the files that contain the tensors of these names, tied names included.

    Raises:
        StateDictMismatchError: A name or glob matches nothing.
    """
    return {index.weight_map[name] for name in stored_names(index, keys)}


def stored_names(index: CheckpointIndex, keys: KeySelection) -> set[str]:
    """Find the stored names of these tensors: their own, or the names that they are tied to."""
    selected = select_keys([*index.weight_map, *index.tied_names], keys)
    return {index.tied_names.get(name, name) for name in selected}


def read_tensors(
    checkpoint: OpenCheckpoint, keys: KeySelection | None, device: str | torch.device, read: ReadMode
) -> dict[str, torch.Tensor]:
    """Read tensors of a checkpoint by name, tied names included.

    Args:
        checkpoint: Open.
        keys: Names of the tensors; None: all.
        device: Target device.
        read: Method of reading bytes into memory.

    Raises:
        DamagedCheckpointError: A selected entry of a pickle is not a dense tensor.
    """
    tied_names = checkpoint.index.tied_names
    names = [*checkpoint.keys, *checkpoint.others, *tied_names]
    selected = names if keys is None else select_keys(names, keys)
    checkpoint.reject_others(selected)
    stored = {tied_names.get(name, name) for name in selected}
    tensors = checkpoint.read([name for name in checkpoint.keys if name in stored], read, device)
    return {name: tensors[tied_names.get(name, name)] for name in selected}
