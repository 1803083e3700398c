"""Tells what a file is that bears the name of a PyTorch checkpoint and is none, and what to do about it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection
from typing import Final

from hfshard.constants import LFS_POINTER_MARK
from hfshard.errors import DamagedCheckpointError, remedy

_FIRST_BYTES: Final = 512
"""A block of a tar."""
_TAR_MARK: Final = slice(257, 262)
"""Where a tar of today says that it is one."""
_TABLE_MARK: Final = b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"
"""The end of a checkpoint of TensorFlow 1: LevelDB's magic number for tables."""
_PROTOCOLS: Final = (b"\x02", b"\x03", b"\x04", b"\x05")
"""Of pickles that begin with their protocol."""
_OLD_TORCH: Final = frozenset((b"sys_info", b"pickle", b"tensors", b"storages"))
"""The files in a tar of torch before 0.1.10."""

_BEGINNINGS: Final[tuple[tuple[bytes, str, str], ...]] = (
    (LFS_POINTER_MARK, "a git-lfs pointer, not the file itself", "Run: git lfs pull"),
    (b"GGUF", "a GGUF file of llama.cpp", "transformers reads it: from_pretrained(folder, gguf_file=name)."),
    (b"lmgg", "a GGML file of llama.cpp", "Convert it to GGUF, or take the weights that it was made of."),
    (b"tjgg", "a GGML file of llama.cpp", "Convert it to GGUF, or take the weights that it was made of."),
    (b"\x93NUMPY", "an array of NumPy", "Load it with numpy.load, and save a dict of tensors."),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes them", "Load it with h5py, and save a dict of tensors."),
    (b"\x1f\x8b", "a file compressed by gzip", "Unpack it first: gunzip, or tar -xzf for a tar."),
    (b"<!doctype", "a web page, as a failed download leaves", "Download it again."),
    (b"<html", "a web page, as a failed download leaves", "Download it again."),
)
"""How other files begin, what they are, and what to do."""


def refuse_other_format(fd: int, path: str) -> None:
    """Refuse a file that is neither a zip nor one of torch.save's older format, by what it is.

    Raises:
        DamagedCheckpointError: Always; it names the format where it is a known one.
    """
    first = os.pread(fd, _FIRST_BYTES, 0)
    if not first:
        raise _other(path, "an empty file", remedy(path))
    for begin, what, todo in _BEGINNINGS:
        if first.lower().startswith(begin) or first.startswith(begin):
            raise _other(path, what, todo)
    for describe in (_safetensors, _tar, _tensorflow, _bare_pickle):
        described = describe(fd, first, path)
        if described is not None:
            raise _other(path, *described)
    raise DamagedCheckpointError(
        f"'{path}' is not a PyTorch checkpoint: it begins neither as a zip nor with PyTorch's magic number. "
        f"{remedy(path)}",
        path=path,
    )


def refuse_other_archive(names: Collection[str], path: str) -> None:
    """Refuse a zip that torch.save did not write, by what it holds.

    Args:
        names: Of its records.
        path: The file's.

    Raises:
        DamagedCheckpointError: There is no pickle in it, or a program beside it.
    """
    if any(name.endswith("/constants.pkl") for name in names):
        command = f"import torch; torch.save(torch.jit.load({path!r}).state_dict(), 'weights.pt')"
        raise _other(
            path,
            "a TorchScript archive: a program with its tensors, and no state dict",
            f"If you trust who made it, take its weights by: python -c {shlex.quote(command)}",
        )
    if any(name.endswith("data.pkl") for name in names):
        return
    if any(name.endswith(".npy") for name in names):
        raise _other(path, "a NumPy archive (.npz)", "Load it with numpy.load, and save a dict of tensors.")
    if any("/" in name and name.endswith((".pt2", "archive_format")) for name in names):
        raise _other(path, "an archive of torch.export", "Load it with torch.export.load, and save its state_dict.")
    raise _other(path, "a zip file without the pickle of torch.save", "Unpack it, and give the file of weights in it.")


def _safetensors(fd: int, first: bytes, path: str) -> tuple[str, str] | None:
    header_bytes = int.from_bytes(first[:8], "little")
    if first[8:9] != b"{" or header_bytes > os.fstat(fd).st_size:
        return None
    return "a safetensors file under another name", f"Rename it to '{os.path.splitext(path)[0]}.safetensors'."


def _tar(fd: int, first: bytes, path: str) -> tuple[str, str] | None:
    if first[_TAR_MARK] != b"ustar":
        return None
    if first[:100].rstrip(b"\0") in _OLD_TORCH:
        return (
            "a tar, as torch wrote them before 0.1.10, and those are not read without running code",
            "If you trust who made it, load it with torch.load(path, weights_only=False), and save it again.",
        )
    return "a tar, and not a file of torch.save", f"Unpack it first: tar -xf {shlex.quote(path)}"


def _tensorflow(fd: int, first: bytes, path: str) -> tuple[str, str] | None:
    size = os.fstat(fd).st_size
    if os.pread(fd, len(_TABLE_MARK), max(size - len(_TABLE_MARK), 0)) != _TABLE_MARK:
        return None
    return "a checkpoint of TensorFlow", "Convert it with the program that it is for (transformers 4 has from_tf=True)."


def _bare_pickle(fd: int, first: bytes, path: str) -> tuple[str, str] | None:
    if first[:1] != b"\x80" or first[1:2] not in _PROTOCOLS:
        return None
    return (
        "a pickle that torch.save did not write",
        "It may run code when it is loaded. If you made it, load it with pickle.load, and save a dict of tensors.",
    )


def _other(path: str, what: str, todo: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"'{path}' is not a PyTorch checkpoint, but {what}. {todo}", path=path)
