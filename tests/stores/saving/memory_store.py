"""A store in memory that can fail, be killed or be overtaken at any request: thousands of saves in seconds."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Collection
from functools import lru_cache
from pathlib import Path

from hfshard._util.arguments import StoreAddress
from hfshard.errors import CheckpointChangedError, StoreError
from hfshard.stores.store import StoredObject

_NUMBERS = itertools.count()


class MemoryStore:
    """A `Store` of one place, for several threads at once.

    `before` and `after` are called around each request with its kind and its name, and may do requests of their own;
    what lies between is done at once, whoever else asks.
    """

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        self.objects: dict[str, bytes] = {} if objects is None else objects
        self.uploads: set[str] = set()
        self.address = StoreAddress("s3", "models", f"bert-{next(_NUMBERS)}")
        self.before: Callable[[str, str], object] = lambda kind, name: None
        self.after: Callable[[str, str], object] = lambda kind, name: None
        self.requests: list[str] = []
        self._lock = threading.RLock()

    def list_objects(self, folder: str = "", *, recursive: bool = False) -> dict[str, StoredObject]:
        self._ask("list", folder)
        start = f"{folder}/" if folder else ""
        return {
            name: _stored(name, raw)
            for name, raw in sorted(self.objects.copy().items())
            if name.startswith(start) and (recursive or "/" not in name[len(start) :])
        }

    def folders(self, folder: str = "") -> list[str]:
        self._ask("folders", folder)
        start = f"{folder}/" if folder else ""
        below = [name[len(start) :] for name in self.objects.copy() if name.startswith(start)]
        return sorted({name.partition("/")[0] for name in below if "/" in name})

    def neighbors(self) -> list[str]:
        return []

    def find(self, name: str) -> StoredObject | None:
        self._ask("find", name)
        return self._now(name)

    def read_into(self, found: StoredObject, begin: int, target: memoryview) -> None:
        self._ask("read", found.name)
        raw = self.objects.get(found.name)
        if raw is None or _stored(found.name, raw) != found:
            raise CheckpointChangedError(f"'{found.name}' was replaced.")
        target[:] = raw[begin : begin + len(target)]

    def read(self, found: StoredObject) -> bytes:
        raw = bytearray(found.size)
        self.read_into(found, 0, memoryview(raw))
        return bytes(raw)

    def put(self, name: str, raw: bytes) -> StoredObject:
        self._ask("put", name)
        self.objects[name] = bytes(raw)
        self.after("put", name)
        return _stored(name, raw)

    def open_writer(self, name: str, size: int, replaced: StoredObject | None = None) -> _Writer:
        self._ask("open", name)
        self.uploads.add(name)
        return _Writer(self, name, size)

    def copy(self, source: StoredObject, target: str) -> StoredObject:
        self._ask("copy", target)
        raw = self.objects.get(source.name)
        if raw is None or _stored(source.name, raw) != source:
            raise CheckpointChangedError(f"'{source.name}' was replaced or removed.")
        self.objects[target] = raw
        self.after("copy", target)
        return _stored(target, raw)

    def delete(self, names: Collection[str]) -> None:
        self._ask("delete", " ".join(names))
        for name in names:
            self.objects.pop(name, None)
        self.after("delete", " ".join(names))

    def sweep_uploads(self, is_left: Callable[[str], bool]) -> int:
        self._ask("sweep", "")
        left = {name for name in self.uploads.copy() if is_left(name)}
        self.uploads -= left
        return len(left)

    def into(self, folder: Path) -> Path:
        """Copy everything into a directory, as `aws s3 sync --delete` does."""
        folder.mkdir()
        for name, raw in self.objects.items():
            (folder / name).write_bytes(raw)
        return folder

    def _ask(self, kind: str, name: str) -> None:
        self.requests.append(f"{kind} {name}".rstrip())
        self.before(kind, name)

    def _now(self, name: str) -> StoredObject | None:
        raw = self.objects.get(name)
        return None if raw is None else _stored(name, raw)


def _stored(name: str, raw: bytes) -> StoredObject:
    return StoredObject(name, len(raw), _etag(bytes(raw)))


@lru_cache(16)
def _etag(raw: bytes) -> str:
    return hashlib.md5(raw).hexdigest()


class _Writer:
    def __init__(self, store: MemoryStore, name: str, size: int) -> None:
        self._store, self._name, self._size, self._raw = store, name, size, bytearray()

    def write(self, block: memoryview) -> None:
        self._raw += block

    def finish(self) -> StoredObject:
        self._store._ask("finish", self._name)
        if self._name not in self._store.uploads:
            raise StoreError(f"The upload of '{self._name}' was removed.")
        assert len(self._raw) == self._size
        self._store.uploads.discard(self._name)
        raw = bytes(self._raw)
        self._store.objects[self._name] = raw
        self._store.after("finish", self._name)
        return _stored(self._name, raw)

    def abort(self) -> None:
        self._store.uploads.discard(self._name)
