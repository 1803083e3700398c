"""Small objects that this process has put, by their ETags: the next save of a training need not read them."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Final

from hfshard._util.threads import ProcessLock
from hfshard.stores.protocols import Store, StoredObject

_MOST_OBJECTS: Final = 64
_MOST_BYTES: Final = 1 << 20
"""Of one object: the index of a model of 10,000 tensors."""

_OBJECTS: OrderedDict[tuple[str, str], tuple[str, bytes]] = OrderedDict()
"""(address, name) -> ETag and bytes, that which was put last at the end."""
_LOCK: Final = ProcessLock()


def note_put(store: Store, put: StoredObject, raw: bytes) -> None:
    """Note the bytes of an object that was put."""
    key = str(store.address), put.name
    with _LOCK.held():
        _OBJECTS.pop(key, None)
        if len(raw) <= _MOST_BYTES:
            _OBJECTS[key] = put.etag, raw
            while len(_OBJECTS) > _MOST_OBJECTS:
                _OBJECTS.popitem(last=False)


def read_small(store: Store, found: StoredObject) -> bytes:
    """The bytes of an object, which is read only if this process has not put it.

    Raises:
        CheckpointChangedError: It has other bytes now, or is gone.
    """
    etag, raw = _OBJECTS.get((str(store.address), found.name), ("", b""))
    return raw if etag == found.etag and len(raw) == found.size else store.read(found)


def forget() -> None:
    """Know of no put any more."""
    _OBJECTS.clear()


os.register_at_fork(after_in_child=forget)
