"""Buckets of the test Hub: names of files, and the Xet hashes of what is in them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from tests.servers.bucket.cas import Cas
from tests.servers.hub.repos import now


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """One file of a bucket."""

    xet_hash: str
    size: int
    mtime: int
    """Milliseconds since 1970, as the client said."""
    uploaded: str
    content_type: str | None = None


class Bucket:
    """One bucket; `lock` is held over a whole batch."""

    def __init__(self, bucket_id: str, private: bool) -> None:
        self.bucket_id = bucket_id
        self.lock = threading.RLock()
        self.created = now()
        self.private = private
        self.files: dict[str, BucketEntry] = {}

    def put(self, name: str, entry: BucketEntry | None) -> None:
        """Give a file its contents; None: delete it, if it is there."""
        with self.lock:
            self.files.pop(name, None)
            if entry is not None:
                self.files[name] = entry


class BucketView:
    """One bucket, seen and changed from inside the test process, past the wire."""

    def __init__(self, bucket: Bucket, cas: Cas) -> None:
        self._bucket, self._cas = bucket, cas

    def files(self) -> dict[str, BucketEntry]:
        """List its files."""
        with self._bucket.lock:
            return dict(self._bucket.files)

    def read(self, path: str) -> bytes:
        """Read a file."""
        recipe = self._cas.recipe(self.files()[path].xet_hash)
        assert recipe is not None, path
        return b"".join(self._cas.pieces(recipe, 0, recipe.size))

    def copy(self, source: str, target: str) -> None:
        """Give what a file holds another name, too, as somebody else."""
        self._bucket.put(target, replace(self._bucket.files[source], uploaded=now()))

    def delete(self, path: str) -> None:
        """Delete a file as somebody else."""
        self._bucket.put(path, None)


class BucketStore:
    """All buckets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[str, Bucket] = {}

    def get(self, bucket_id: str) -> Bucket | None:
        """Find a bucket."""
        with self._lock:
            return self._buckets.get(bucket_id)

    def create(self, bucket_id: str, private: bool) -> Bucket | None:
        """Make a bucket; None: it is there already."""
        with self._lock:
            if bucket_id in self._buckets:
                return None
            self._buckets[bucket_id] = Bucket(bucket_id, private)
            return self._buckets[bucket_id]
