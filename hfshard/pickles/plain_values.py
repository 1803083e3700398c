"""Read any file of torch.save as plain values: described objects are converted if they are only data."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from hfshard._util.text import shorten_list
from hfshard.disk.safe_open import Identity
from hfshard.errors import DamagedCheckpointError, UnsafePickleError
from hfshard.format.index import Verify
from hfshard.pickles.described_file import OTHER, DescribedFile, described_file, meaning, reject_code, size_of
from hfshard.pickles.pickle_opcodes import DescribedObject, GlobalReference, NameHashes, most_taken
from hfshard.pickles.read_pickle import read_pickle

_MAX_DEPTH: Final = 100
"""The limit on nesting; real states have ten levels."""

_MOST_ENTRIES: Final = 100_000_000
"""Entries of all containers, repeated ones counted each time; an optimizer has a few per parameter."""

_KINDS: Final = (dict, OrderedDict, Counter, list, tuple, set, frozenset, torch.Size)
"""Containers whose copies have the same type."""
_SCALARS: Final = frozenset({int, float, bool, str, bytes, type(None)})
"""Types whose values are their own copies, and may occur in millions."""
_CHOSEN_HASH: Final = (tuple, frozenset, complex)
"""Types of names whose hash a file can choose; see `NameHashes`."""


class NotStored:
    """A replacement for a value that was not stored: on a restore, the object that was built keeps its own."""


NOT_STORED: Final = NotStored()


class PlainValues:
    """Copies values of one file; what cannot be read without running code becomes `NOT_STORED`, and is noted."""

    def __init__(self, path: str, described: DescribedFile | None = None) -> None:
        """Prepare to copy values.

        Args:
            path: The file's path, for messages.
            described: The file, if its pickle was only described; it must stay open.
        """
        self.path = path
        self.described = described
        self.unread: dict[str, str] = {}
        """Place of each object that was not read -> its class or function."""
        self._copies: dict[int, tuple[Any, int, Any]] = {}
        self._above: set[int] = set()
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._left = most_taken(described.size) if described is not None else 0
        """The amount of described objects that may still be copied: they can share parts, each copied every time."""

    def of(self, value: Any, at: str = "") -> Any:
        """Copy a value: tensors get their own memory.

        Args:
            value: A value from the file.
            at: Its place in the file, for messages.

        Raises:
            DamagedCheckpointError: It contains itself, is larger than any real state, or is not what it claims to be.
        """
        return self._copied(value, at)[0]

    def _copied(self, value: Any, at: str) -> tuple[Any, int]:
        """Return the copy, and the total number of its entries."""
        make: Callable[[Any, str], tuple[Any, int]]
        if isinstance(value, torch.Tensor):
            make = self._tensor
        elif isinstance(value, dict | list | tuple | set | frozenset):
            make = self._container
        elif isinstance(value, GlobalReference | DescribedObject):
            make = self._object
        else:
            return value, 1
        if id(value) in self._copies:
            return self._copies[id(value)][:2]
        if id(value) in self._above or len(self._above) > _MAX_DEPTH:
            raise self._damaged(at, f"contains itself, or is nested deeper than {_MAX_DEPTH} levels")
        self._above.add(id(value))
        try:
            copied, entries = make(value, at)
        except DamagedCheckpointError:
            raise
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            raise self._damaged(at, f"has contents that such a value cannot have ({error!r:.100})") from error
        self._above.discard(id(value))
        if entries > _MOST_ENTRIES:
            raise self._damaged(at, "has more entries than any training state")
        self._copies[id(value)] = copied, entries, value  # it stays alive, as its id is the key
        return copied, entries

    def _container(self, value: Any, at: str) -> tuple[Any, int]:
        prefix = f"{at}." if at else ""
        kind: Any = type(value) if type(value) in _KINDS else None
        if isinstance(value, dict):
            pairs = [
                (self._copied(key, f"{prefix}{_shown(key)}")[0], *self._copied(one, f"{prefix}{_shown(key)}"))
                for key, one in value.items()
            ]
            self._check_names([key for key, *_ in pairs], at)
            return (kind or dict)({key: one for key, one, _ in pairs}), 1 + sum(count for *_, count in pairs)
        items = [
            (one, 1) if type(one) in _SCALARS else self._copied(one, f"{prefix}{number}")
            for number, one in enumerate(value)
        ]
        if isinstance(value, set | frozenset):
            self._check_names([one for one, _ in items], at)
        return (kind or list)([one for one, _ in items]), 1 + sum(count for _, count in items)

    def _check_names(self, names: list[Any], at: str) -> None:
        """Reject many names with one hash; for some, it is known only now, after their conversion."""
        hashes = NameHashes()
        for name in names:
            if isinstance(name, _CHOSEN_HASH) and hashes.is_one_of_many(name):
                raise self._damaged(at, "has names that take too long to hash")

    def _tensor(self, value: torch.Tensor, at: str) -> tuple[Any, int]:
        is_plain = value.layout is torch.strided and value.device.type != "meta"
        if is_plain and value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise self._damaged(at, "is a tensor with more elements than the file has bytes for")
        return self._clone(value) if self.described is None else value, 1

    def _clone(self, value: torch.Tensor) -> torch.Tensor:
        """Copy a tensor; several views of one memory still share it."""
        if value.layout is not torch.strided or value.device.type == "meta" or value.is_conj() or value.is_neg():
            return value.detach().clone()
        storage = value.untyped_storage()
        if storage.data_ptr() not in self._storages:
            self._storages[storage.data_ptr()] = storage.clone(), storage
        copied, _ = self._storages[storage.data_ptr()]
        made = torch.empty(0, dtype=value.dtype)
        return made.set_(copied, value.storage_offset(), value.shape, value.stride())

    def _object(self, value: GlobalReference | DescribedObject, at: str) -> tuple[Any, int]:
        if isinstance(value, DescribedObject) and self.described is not None:
            tensor = self.described.tensor(value)
            if tensor is not None:
                return self._tensor(tensor, at)
        self._left -= size_of(value)
        if self._left < 0:
            raise self._damaged(at, "has objects that together are larger than the file")
        try:
            found = meaning(value)
        except (TypeError, ValueError, LookupError, OverflowError, AttributeError, RuntimeError) as error:
            raise self._damaged(at, f"is not a valid {value.name} ({error!r:.100})") from error
        if found is OTHER:
            self.unread[at] = value.name
            return NOT_STORED, 1
        return self._container(found, at) if isinstance(found, dict | list) else (found, 1)

    def _damaged(self, at: str, what: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            f"'{self.path}' is damaged or malicious: its '{at}' {what}. Use another file.", path=self.path
        )


def _shown(key: Any) -> str:
    return str(key)[:100] if isinstance(key, str | int | float) else type(key).__name__


# Any file of torch.save as plain values: read with weights_only=True, or by description if that refuses it.


_SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class PlainFile:
    """The contents of a file of torch.save, as plain values."""

    path: str
    identity: Identity
    """The identity of the file."""
    value: Any
    """Containers, numbers, text, tensors and numpy arrays; `NOT_STORED` for anything that is more than data."""
    is_mapped: bool
    """True if tensors are mapped files, which `copied` must copy before the training continues with them."""
    unread: dict[str, str] = field(default_factory=dict)
    """Place of each object that is more than data -> its class or function. Always empty with strict."""

    def copied(self, value: Any, at: str) -> Any:
        """Return a part of the value with its own memory.

        Raises:
            DamagedCheckpointError: It contains itself, or is larger than any real state.
        """
        return PlainValues(self.path).of(value, at) if self.is_mapped else value

    def left_out(self) -> tuple[str, ...]:
        """Describe what was not read, in sentences."""
        return tuple(
            f"'{at}' in '{self.path}' was left out: it is a '{name}', which cannot be read without running code."
            for at, name in self.unread.items()
        )


def read_plain_file(path: str, root: str, *, strict: bool, verify: Verify) -> PlainFile:
    """Read a file of torch.save without running anything in it.

    Args:
        path: The file.
        root: The directory that must contain it, and what it links to.
        strict: Reject a file with objects that are more than data; else they are left out.
        verify: "full": compare every byte with the checksums that torch.save writes.

    Raises:
        UnsafePickleError: It asks for something that runs code; or strict, and it has objects that are more than data.
        DamagedCheckpointError: It is incomplete, or not a file of torch.save.
    """
    try:
        contents = read_pickle(path, root)
    except UnsafePickleError as error:
        return _read_described(path, root, error, strict=strict)
    if verify == "full":
        contents.check_every_byte()
    return PlainFile(path, contents.identity, contents.value, is_mapped=True)


def _read_described(path: str, root: str, error: UnsafePickleError, *, strict: bool) -> PlainFile:
    """Read what `weights_only=True` refuses. Everything that is read of a zip is compared with its checksum."""
    with described_file(path, root) as file:
        reject_code(path, file.names)
        values = PlainValues(path, file)
        value = values.of(file.value)
        if strict and values.unread:
            names = shorten_list(list(dict.fromkeys(values.unread.values())), _SHOWN, quote=True)
            raise UnsafePickleError(
                f"'{path}' has objects of {names}, which cannot be read without running code "
                f"({shorten_list(list(values.unread), _SHOWN)}). Pass strict=False to leave them out, without running "
                "anything, and read the rest. Or load it in the program that made it, and save tensors, numbers, "
                "text, lists and dicts.",
                path=path,
                actual=next(iter(values.unread.values())),
            ) from error
        return PlainFile(path, file.identity, value, is_mapped=False, unread=values.unread)
