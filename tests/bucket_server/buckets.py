"""Buckets of the test Hub: names of files, and the Xet hashes of what is in them; found again after a restart."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.bucket_server.cas import Cas
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
    """One bucket; every change is written, at the end of a file, before it is answered.

    `lock` is held over a whole batch.
    """

    def __init__(self, bucket_id: str, path: Path) -> None:
        self.bucket_id = bucket_id
        self.lock = threading.RLock()
        self.created = ""
        self.private = False
        self.files: dict[str, BucketEntry] = {}
        self._path = path
        for line in path.read_text().splitlines() if path.is_file() else ():
            self._apply(**json.loads(line))

    def create(self, private: bool) -> None:
        """Write its beginning."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._change(created=now(), private=private)

    def set_private(self, private: bool) -> None:
        """Hide it, or show it."""
        self._change(private=private)

    def put(self, name: str, entry: BucketEntry | None) -> None:
        """Give a file its contents; None: delete it, if it is there."""
        self._change(name=name, entry=None if entry is None else asdict(entry))

    def _change(self, **change: Any) -> None:
        with self.lock:
            with self._path.open("a") as file:
                file.write(json.dumps(change) + "\n")
            self._apply(**change)

    def _apply(
        self,
        created: str | None = None,
        private: bool | None = None,
        name: str | None = None,
        entry: dict[str, Any] | None = None,
    ) -> None:
        self.created = created or self.created
        self.private = self.private if private is None else private
        if name is not None:
            self.files.pop(name, None)
        if name is not None and entry is not None:
            self.files[name] = BucketEntry(**entry)


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
    """All buckets under one root directory."""

    def __init__(self, root: Path) -> None:
        self._root = root / "buckets"
        self._lock = threading.Lock()
        self._buckets = {
            f"{path.parent.name}/{path.stem}": Bucket(f"{path.parent.name}/{path.stem}", path)
            for path in sorted(self._root.glob("*/*.jsonl"))
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
            bucket = Bucket(bucket_id, self._root / f"{bucket_id}.jsonl")
            bucket.create(private)
            self._buckets[bucket_id] = bucket
            return bucket

    def delete(self, bucket_id: str) -> None:
        """Forget a bucket and what is in it."""
        with self._lock:
            del self._buckets[bucket_id]
            (self._root / f"{bucket_id}.jsonl").unlink()

    def move(self, old_id: str, new_id: str) -> bool:
        """Give a bucket another name; False: another one has it."""
        with self._lock:
            if new_id in self._buckets:
                return False
            new_path = self._root / f"{new_id}.jsonl"
            new_path.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(self._root / f"{old_id}.jsonl", new_path)
            del self._buckets[old_id]
            self._buckets[new_id] = Bucket(new_id, new_path)
            return True
