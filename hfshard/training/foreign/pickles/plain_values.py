"""Makes plain values of what a file of torch.save holds: what was described becomes what it is, if only data."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, Final

import torch

from hfshard.errors import DamagedCheckpointError
from hfshard.pickles.pickle_opcodes import Described, Named, NameHashes
from hfshard.training.foreign.pickles.data_types import OTHER, meaning, size_of
from hfshard.training.foreign.pickles.described_tensors import DescribedFile
from hfshard.training.parts.nested_types import NOT_STORED

_MAX_DEPTH: Final = 100
"""Real states have ten levels."""

_MOST_ENTRIES: Final = 100_000_000
"""Entries of all containers, those that occur several times counted each time: an optimizer has a few per parameter."""

_AT_ONCE: Final = 1 << 20
"""Entries, bytes and characters that the objects of any small file may have."""

_KINDS: Final = (dict, OrderedDict, Counter, list, tuple, set, frozenset, torch.Size)
"""Containers that are copied as what they are."""
_SCALARS: Final = frozenset({int, float, bool, str, bytes, type(None)})
"""What is its own copy, and may come in millions."""
_CHOSEN_HASH: Final = (tuple, frozenset, complex)
"""Names whose hash a file can choose: see `NameHashes`."""


class PlainValues:
    """Copies values of one file; what can't be had without running code becomes `NOT_STORED`, and is noted."""

    def __init__(self, path: str, described: DescribedFile | None = None) -> None:
        """Begin.

        Args:
            path: The file's, for messages.
            described: The file, where its pickle was only described; it must stay open.
        """
        self.path = path
        self.described = described
        self.unread: dict[str, str] = {}
        """Where an object was that is not read -> which class or function it is of."""
        self._copies: dict[int, tuple[Any, int, Any]] = {}
        self._above: set[int] = set()
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._left = _AT_ONCE + 4 * described.size if described is not None else 0
        """How much of described objects may still be copied: they may have the same parts, each of which is copied."""

    def of(self, value: Any, at: str = "") -> Any:
        """Copy a value: tensors get memory of their own.

        Args:
            value: What the file holds.
            at: Where it is in the file, for messages.

        Raises:
            DamagedCheckpointError: It contains itself, is larger than any real state, or not what it says.
        """
        return self._copied(value, at)[0]

    def _copied(self, value: Any, at: str) -> tuple[Any, int]:
        """The copy, and how many entries it has in all."""
        make: Callable[[Any, str], tuple[Any, int]]
        if isinstance(value, torch.Tensor):
            make = self._tensor
        elif isinstance(value, dict | list | tuple | set | frozenset):
            make = self._container
        elif isinstance(value, Named | Described):
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
            raise self._damaged(at, f"has what such a value can't have ({error!r:.100})") from error
        self._above.discard(id(value))
        if entries > _MOST_ENTRIES:
            raise self._damaged(at, "has more entries than any state of a run")
        self._copies[id(value)] = copied, entries, value  # which stays alive, as its id is the key
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
        """Refuse names of one hash, which some have only now that they are what was described."""
        hashes = NameHashes()
        for name in names:
            if isinstance(name, _CHOSEN_HASH) and hashes.is_one_of_many(name):
                raise self._damaged(at, "has names that take forever to be hashed")

    def _tensor(self, value: torch.Tensor, at: str) -> tuple[Any, int]:
        is_plain = value.layout is torch.strided and value.device.type != "meta"
        if is_plain and value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise self._damaged(at, "is a tensor with more elements than the file has bytes for")
        return self._clone(value) if self.described is None else value, 1

    def _clone(self, value: torch.Tensor) -> torch.Tensor:
        """A copy; several views of one memory stay that."""
        if value.layout is not torch.strided or value.device.type == "meta" or value.is_conj() or value.is_neg():
            return value.detach().clone()
        storage = value.untyped_storage()
        if storage.data_ptr() not in self._storages:
            self._storages[storage.data_ptr()] = storage.clone(), storage
        copied, _ = self._storages[storage.data_ptr()]
        made = torch.empty(0, dtype=value.dtype)
        return made.set_(copied, value.storage_offset(), value.shape, value.stride())

    def _object(self, value: Named | Described, at: str) -> tuple[Any, int]:
        if isinstance(value, Described) and self.described is not None:
            tensor = self.described.tensor(value)
            if tensor is not None:
                return self._tensor(tensor, at)
        self._left -= size_of(value)
        if self._left < 0:
            raise self._damaged(at, "has more in all its objects than the file")
        try:
            found = meaning(value)
        except (TypeError, ValueError, LookupError, OverflowError, AttributeError, RuntimeError) as error:
            raise self._damaged(at, f"is not what {value.name} is saved as ({error!r:.100})") from error
        if found is OTHER:
            self.unread[at] = value.name
            return NOT_STORED, 1
        return self._container(found, at) if isinstance(found, dict | list) else (found, 1)

    def _damaged(self, at: str, what: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            f"'{self.path}' is damaged, or was made to do harm: its '{at}' {what}. Use another file.", path=self.path
        )


def _shown(key: Any) -> str:
    return str(key)[:100] if isinstance(key, str | int | float) else type(key).__name__
