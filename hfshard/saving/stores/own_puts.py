"""Cache of the small objects that this process has put, so that the next save need not read them."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Final

from hfshard._util.threads import ProcessLock
from hfshard.stores.store import Store, StoredObject

_MOST_OBJECTS: Final = 64
_MOST_BYTES: Final = 1 << 20
"""Of one object: the index of a model of 10,000 tensors."""

_OBJECTS: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
"""Address of an object -> ETag and bytes, that which was put last at the end."""
_LOCK: Final = ProcessLock()


def note_put(store: Store, put: StoredObject, raw: bytes) -> None:
    """Note the bytes of an object that was put."""
    key = str(store.address.joined(put.name))
    with _LOCK.held():
        _OBJECTS.pop(key, None)
        if len(raw) <= _MOST_BYTES:
            _OBJECTS[key] = put.etag, raw
            while len(_OBJECTS) > _MOST_OBJECTS:
                _OBJECTS.popitem(last=False)


def known(store: Store, found: StoredObject) -> bytes | None:
    """Return the bytes of an object that this process has put; None: it must be read."""
    etag, raw = _OBJECTS.get(str(store.address.joined(found.name)), ("", b""))
    return raw if etag == found.etag and len(raw) == found.size else None


def forget() -> None:
    """Know of no put any more."""
    _OBJECTS.clear()


os.register_at_fork(after_in_child=forget)
