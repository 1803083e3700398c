"""Buckets of the test Hub: names of files, and the Xet hashes of what is in them; found again after a restart."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.bucket_server.cas import Cas
from tests.hubserver.objects import replace_file
from tests.hubserver.repos import now


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
    """One bucket; every change is written before it is answered. Its `lock` is held over a whole batch."""

    def __init__(self, bucket_id: str, path: Path) -> None:
        self.bucket_id = bucket_id
        self.lock = threading.RLock()
        self._path = path
        state: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
        self.created: str = state.get("created") or now()
        self.private: bool = state.get("private", False)
        self.files = {name: BucketEntry(**entry) for name, entry in state.get("files", {}).items()}

    def save(self) -> None:
        """Write what it holds."""
        files = {name: asdict(entry) for name, entry in self.files.items()}
        state = {"created": self.created, "private": self.private, "files": files}
        replace_file(self._path, json.dumps(state).encode())


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
        with self._bucket.lock:
            self._bucket.files[target] = replace(self._bucket.files[source], uploaded=now())
            self._bucket.save()

    def delete(self, path: str) -> None:
        """Delete a file as somebody else."""
        with self._bucket.lock:
            del self._bucket.files[path]
            self._bucket.save()


class BucketStore:
    """All buckets under one root directory."""

    def __init__(self, root: Path) -> None:
        self._root = root / "buckets"
        self._lock = threading.Lock()
        self._buckets = {
            f"{path.parent.name}/{path.stem}": Bucket(f"{path.parent.name}/{path.stem}", path)
            for path in sorted(self._root.glob("*/*.json"))
        }

    def get(self, bucket_id: str) -> Bucket | None:
        """Find a bucket."""
        with self._lock:
            return self._buckets.get(bucket_id)

    def of_namespace(self, namespace: str) -> list[Bucket]:
        """All buckets of a user or an organization, by name."""
        with self._lock:
            return [one for name, one in sorted(self._buckets.items()) if name.startswith(f"{namespace}/")]

    def all_hashes(self) -> set[str]:
        """What all files of all buckets hold."""
        with self._lock:
            return {entry.xet_hash for one in self._buckets.values() for entry in list(one.files.values())}

    def create(self, bucket_id: str, private: bool) -> Bucket | None:
        """Make a bucket; None: it is there already."""
        with self._lock:
            if bucket_id in self._buckets:
                return None
            bucket = Bucket(bucket_id, self._root / f"{bucket_id}.json")
            bucket.private = private
            bucket.save()
            self._buckets[bucket_id] = bucket
            return bucket

    def delete(self, bucket_id: str) -> None:
        """Forget a bucket and what is in it."""
        with self._lock:
            del self._buckets[bucket_id]
            (self._root / f"{bucket_id}.json").unlink()

    def move(self, old_id: str, new_id: str) -> bool:
        """Give a bucket another name; False: another one has it."""
        with self._lock:
            if new_id in self._buckets:
                return False
            new_path = self._root / f"{new_id}.json"
            new_path.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(self._root / f"{old_id}.json", new_path)
            del self._buckets[old_id]
            self._buckets[new_id] = Bucket(new_id, new_path)
            return True
