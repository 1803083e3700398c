"""Weights in a torch.save file, such as `pytorch_model.bin`, and the key under which the file has them."""

from __future__ import annotations

import logging
import mmap
import os
import re
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from hfshard._util.text import shorten_list
from hfshard._util.threads import run_in_threads
from hfshard.disk.direct_io import read_blocks
from hfshard.errors import AmbiguousWeightsError, DamagedCheckpointError, InvalidArgumentError, repair_hint
from hfshard.format.parts_of_ranks import reject_partitioned_file
from hfshard.pickles.read_pickle import read_pickle
from hfshard.shards.shard_file import PooledFile, open_or_evict
from hfshard.tensors.stored_tensor import RawTensor, TensorLike, is_plain_tensor, tensor_layout


class PickleFile:
    """The tensors of one pickled file, read with `weights_only=True`; a zip file is mapped, not read.

    Attributes:
        path: The file's path.
        key: The key under which the file has the weights; None: the file contains nothing else.
        tensors: FQN -> tensor.
        others: FQN -> entry next to the tensors that is not a dense tensor.
        size: Bytes of the file.
        identity: Identity of the file that was read.
        changed_ns: Time of the file's last change of any kind before it was read.
    """

    def __init__(self, path: str, root: str, key: str | None = None, opener: Callable[[], int] | None = None) -> None:
        """Read a file.

        Args:
            path: The file.
            root: The directory that must contain the file and its link target.
            key: The key of the weights; None: there must be only one candidate (see `select_weights`).
            opener: Open the file for reading, if it is not on disk; `path` is then only for messages.

        Raises:
            AmbiguousWeightsError, InvalidArgumentError: `key` does not select the weights.
            UnsafePickleError: The file asks for anything but tensors and plain containers.
            DamagedCheckpointError: The file is not complete, or has no weights.
        """
        self.path = path
        contents = read_pickle(path, root, opener)
        self.key: str | None
        self.tensors: dict[str, torch.Tensor]
        self.others: dict[str, OtherEntry]
        self.key, self.tensors, self.others = select_weights(contents.value, path, key)
        self.size, self.identity = contents.size, contents.identity
        self.changed_ns = contents.changed_ns
        self._contents = replace(contents, value=None)  # the rest, such as an optimizer, can be freed
        self._held: PooledFile | None = None
        self._opening = threading.Lock()

    def stored_tensors(self, least_bytes: int = 0) -> dict[str, TensorLike]:
        """Return the tensors for copying or comparing; contiguous ones are read from the file block by block.

        All touched pages of a mapped file count as the process's memory until it is unmapped. If the file is truncated,
        touching a page kills the process. Tensors with other strides, of files before the zip format or of the other
        byte order are torch's own.

        Args:
            least_bytes: Smaller tensors are torch's own, too: a call for each would take longer than its pages.
        """
        return {name: self._stored(name, tensor, least_bytes) for name, tensor in self.tensors.items()}

    def close(self) -> None:
        """Close the file, if tensors were read from it; mapped tensors stay valid."""
        with self._opening:
            if self._held is not None:
                self._held.close()

    def _stored(self, name: str, tensor: torch.Tensor, least_bytes: int) -> TensorLike:
        address = self._contents.address
        if address is None or not is_plain_tensor(tensor, name) or not tensor.is_contiguous() or tensor.numel() == 0:
            return tensor
        if tensor.is_conj() or tensor.is_neg():
            return tensor
        layout = tensor_layout(tensor)
        if layout.nbytes < least_bytes:
            return tensor
        return RawTensor(layout, partial(self._blocks, tensor.data_ptr() - address, layout.nbytes))

    def _blocks(self, start: int, count_bytes: int, block_bytes: int) -> Iterator[memoryview]:
        found_bytes = 0
        with self._file().opened() as fd:
            for block in read_blocks(fd, start, count_bytes, block_bytes):
                found_bytes += len(block)
                yield block
        if found_bytes != count_bytes:
            raise DamagedCheckpointError(
                f"'{self.path}' was truncated while it was being read. {repair_hint(self.path)}", path=self.path
            )

    def _file(self) -> PooledFile:
        with self._opening:
            if self._held is None:
                open_again = self._contents.open_again
                self._held = PooledFile(open_or_evict(open_again), open_again)
            return self._held

    def check_every_byte(self, progress_callback: Callable[[int], object] = lambda count: None) -> bool:
        """Compare all bytes with their checksums; see `PickleContents.check_every_byte`."""
        return self._contents.check_every_byte(progress_callback)


# Selection of the weights in what a program saved, without guessing if there are several candidates.


logger = logging.getLogger(__name__)

WEIGHTS_KEY: Final = re.compile(
    r"(^|[_.])(model|state_?dict|net|network|module|weights|params|ema|teacher|student|generator|discriminator)\d*($|_)",
    re.IGNORECASE,
)
"""Keys under which programs save weights: timm, Lightning, torchvision's references, mmcv, fairseq, DINO, GANs."""

OTHER_KEY: Final = re.compile(
    r"optim|(^|_)opt(_|$)|sched|scaler|rng|random|seed|callback|loop|hparam|hyper|metric|meter|history|args|config|cfg"
    r"|meta$|param_groups|param_shapes",
    re.IGNORECASE,
)
"""Keys under which a run stores things that are not weights, including tensors. Used only if `key` names them."""

_SHOWN: Final = 12
"""The most candidates or keys in a message."""


class OtherEntry:
    """An entry among weights that is not a dense tensor: its name can be compared, and any use is an error."""

    def __init__(self, error: DamagedCheckpointError) -> None:
        """Keep the error that names the entry."""
        self.error = error

    def __getattr__(self, name: str) -> Any:
        """Raise the error: a load into a model that lacks the name does not get here."""
        raise self.error

    def __getitem__(self, place: object) -> Any:
        """Raise the error."""
        raise self.error


def select_weights(
    value: Any, path: str, key: str | None
) -> tuple[str | None, dict[str, torch.Tensor], dict[str, OtherEntry]]:
    """Extract the weights from what a program saved.

    1. `key` selects them, if it is given.
    2. A dict of names and tensors is itself the weights.
    3. Otherwise they are in a dict one or two levels down that has a usual key, or contains only names and tensors.
       A run's optimizer and random states are not weights.

    Args:
        value: The value that `read_pickle` read.
        path: The file's path, for messages.
        key: The key of the weights, with a dot before each deeper one; None: there must be only one candidate.

    Returns:
        The key under which they were found, or None if the complete value is the weights; FQN -> tensor; FQN -> entry
        that is not a dense tensor.

    Raises:
        AmbiguousWeightsError: There are several candidates, which the error lists.
        InvalidArgumentError: There is no dict under `key`.
        DamagedCheckpointError: There are no weights, or an entry among them has no name, or none is a dense tensor.
        CheckpointNotFoundError: The weights are in other files, as parts.
    """
    if not isinstance(value, Mapping):
        raise DamagedCheckpointError(
            f"'{path}' contains a {type(value).__name__}, not a state dict. {repair_hint(path)}",
            path=path,
            expected="dict",
        )
    reject_partitioned_file(value, path)
    if key is None and not _is_pure(value):
        key = _only_candidate(value, path)
        if key is not None:
            logger.info("The weights in '%s' are under the key '%s'.", path, key)
    chosen = value if key is None else _at_key(value, key, path)
    others = _find_others(chosen, path, key)
    return key, {name: tensor for name, tensor in chosen.items() if name not in others}, others


def find_candidates(value: Mapping[Any, Any]) -> dict[str, Mapping[Any, Any]]:
    """Find possible weights in a dict that is not itself a state dict.

    Returns:
        Key, with a dot before a deeper one -> dict; each dict once, under its first key.
    """
    found: dict[str, Mapping[Any, Any]] = {}
    for key, part in _parts(value):
        if _may_be_weights(key, part):
            found.setdefault(key, part)
        elif not _has_tensors(part):
            inner = {f"{key}.{name}": one for name, one in _parts(part)}
            found |= {name: one for name, one in inner.items() if _may_be_weights(name, one)}
    if not found:  # the state dict of a module without parameters
        found = {key: part for key, part in _parts(value) if not part and WEIGHTS_KEY.search(key)}
    kept = {id(part): key for key, part in reversed(found.items())}
    return {key: part for key, part in found.items() if kept[id(part)] == key}


def _only_candidate(value: Mapping[Any, Any], path: str) -> str | None:
    candidates = find_candidates(value)
    named = {key: part for key, part in candidates.items() if WEIGHTS_KEY.search(key)}
    if not candidates or (not named and _has_weights(value)):
        if value and not _has_weights(value):
            keys = shorten_list([key for key in value if isinstance(key, str)], _SHOWN, quote=True)
            raise DamagedCheckpointError(
                f"'{path}' contains no weights that hfshard recognizes: its entries are {keys}. If one of them "
                "contains weights, pass it as key=, or as --key on the command line.",
                path=path,
            )
        return None  # a state dict with another entry
    if len(candidates) == 1:
        return next(iter(candidates))
    first = next(iter(named or candidates))
    raise AmbiguousWeightsError(
        f"'{path}' contains several sets of weights: {_described(candidates)}. Nothing was loaded. Pass one: "
        f"hfshard.load_model or load_state_dict(..., key={first!r}), or --key {first} on the command line.",
        path=path,
        keys=tuple(candidates),
    )


def _at_key(value: Mapping[Any, Any], key: str, path: str) -> Mapping[Any, Any]:
    found = _lookup(value, key)
    if isinstance(found, Mapping):
        return found
    what = "has nothing" if found is None else f"has a {type(found).__name__}"
    candidates = {} if _is_pure(value) else find_candidates(value)
    there = f"Its weights: {_described(candidates)}" if candidates else "Leave out key if all of the file is weights"
    raise InvalidArgumentError(f"'{path}' {what} under key={key!r:.200}. {there}.", path=path)


def _lookup(value: Any, key: str) -> Any:
    """Look up a key whose dots can be part of it or precede a deeper key; the longest first key wins."""
    if not isinstance(value, Mapping):
        return None
    if key in value:
        return value[key]
    dots = [at for at in reversed(range(len(key))) if key[at] == "."]
    found = (_lookup(value[key[:at]], key[at + 1 :]) for at in dots if key[:at] in value)
    return next((one for one in found if one is not None), None)


def _find_others(chosen: Mapping[Any, Any], path: str, key: str | None) -> dict[str, OtherEntry]:
    """Find the entries that are not dense tensors; raise the error of one that has no name, or if no entry is one."""
    where = "" if key is None else f" under {key!r:.200}"
    others: dict[str, OtherEntry] = {}
    for name, value in chosen.items():
        is_named = isinstance(name, str)
        problem = _problem_of(value) if is_named else f"has a name of type {type(name).__name__}"
        if problem is None:
            continue
        shown = name if is_named else type(name).__name__
        error = DamagedCheckpointError(
            f"'{path}' has more than dense tensors{where}: its entry {shown[:200]!r} {problem}. Load the tensors "
            "alone, with hfshard.load_state_dict(..., keys=...), or save the file again without it.",
            path=path,
            fqn=shown,
        )
        others[shown] = OtherEntry(error)
        if not is_named or len(others) == len(chosen):
            raise error
    return others


def _problem_of(tensor: Any) -> str | None:
    """Describe what is wrong with a value among weights; None if it is a plain tensor with its data."""
    if not isinstance(tensor, torch.Tensor):
        return f"is a {type(tensor).__name__}, not a tensor"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"is a {type(tensor).__name__}, not a plain tensor"
    if tensor.device.type == "meta":
        return "is a tensor without data, on the meta device"
    if tensor.is_nested or tensor.layout != torch.strided:
        return "is a sparse or nested tensor: torch.load reads it, hfshard reads only dense ones"
    return None


def _may_be_weights(key: str, part: Mapping[Any, Any]) -> bool:
    if OTHER_KEY.search(key):
        return False
    return _has_tensors(part) if WEIGHTS_KEY.search(key) else _is_pure(part) and _has_weights(part)


def _parts(value: Mapping[Any, Any]) -> list[tuple[str, Mapping[Any, Any]]]:
    return [(key, part) for key, part in value.items() if isinstance(key, str) and isinstance(part, Mapping)]


def _is_pure(value: Mapping[Any, Any]) -> bool:
    return all(isinstance(key, str) and isinstance(one, torch.Tensor) for key, one in value.items())


def _has_tensors(value: Mapping[Any, Any]) -> bool:
    return any(isinstance(one, torch.Tensor) for one in value.values())


def _has_weights(value: Mapping[Any, Any]) -> bool:
    """Return whether any tensor looks like a weight, not like a metric or random state."""
    return any(
        isinstance(one, torch.Tensor) and one.dim() > 0 and (one.is_floating_point() or one.is_complex())
        for one in value.values()
    )


def _described(candidates: Mapping[str, Mapping[Any, Any]]) -> str:
    return shorten_list([f"{key!r:.200} ({_size_of(part)})" for key, part in candidates.items()], _SHOWN)


def _size_of(part: Mapping[Any, Any]) -> str:
    tensors = [one for one in part.values() if isinstance(one, torch.Tensor)]
    nbytes = sum(one.numel() * one.itemsize for one in tensors)
    return f"{len(tensors):,} tensor{'s' if len(tensors) != 1 else ''}, {nbytes:,} bytes"


# A remote file in memory: torch maps pickles, so they must be local files.


_PIECE_BYTES: Final = 8 << 20
"""Bytes per request."""
_PIECES_AT_ONCE: Final = 8


class MemoryFile:
    """An unnamed file in memory that lives as long as this object; nothing is on disk.

    On systems without such files (macOS), it is a temporary file.
    """

    def __init__(self, size: int, read_into: Callable[[int, memoryview], None]) -> None:
        """Create and fill the file.

        Args:
            size: Bytes of the file, and of the memory that it takes.
            read_into: Fill memory with the bytes from a position on; called by several threads.

        Raises:
            Everything that `read_into` raises.
        """
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("hfshard")
            self._path = f"/proc/self/fd/{fd}"
        else:
            fd, self._path = tempfile.mkstemp(prefix="hfshard-")
            weakref.finalize(self, os.unlink, self._path)
        weakref.finalize(self, os.close, fd)
        os.truncate(fd, size)
        if size == 0:
            return
        with mmap.mmap(fd, size) as mapping, memoryview(mapping) as whole:

            def fill(begin: int, _cancelled: object) -> None:
                with whole[begin : begin + _PIECE_BYTES] as piece:
                    read_into(begin, piece)

            run_in_threads(fill, range(0, size, _PIECE_BYTES), _PIECES_AT_ONCE)

    def open(self) -> int:
        """Open the file for reading at its first byte."""
        return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
