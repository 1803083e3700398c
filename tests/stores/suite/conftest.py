"""One place for each test: a directory, and one in each service."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.servers.stores.buckets import BUCKET, Bucket
from tests.stores.conftest import use_service


def usual_name(name: str) -> str:
    """The name of a file without the number and the id of the save that its object belongs to."""
    return re.sub(r"-\d{8}-[0-9a-f]{16}(?=\.|$)", "", name)


@dataclass(frozen=True)
class Place:
    """Where a test saves: a directory, or an address of a store."""

    path: str
    bucket: Bucket | None
    folder: Path
    """Of the test, on the disk."""

    @property
    def is_store(self) -> bool:
        """Whether it is no directory."""
        return self.bucket is not None

    def below(self, name: str) -> Place:
        """A place in this one."""
        return Place(f"{self.path}/{name}", self.bucket, self.folder)

    def files(self) -> dict[str, bytes]:
        """What lies there, asked by other means than hfshard's."""
        if self.bucket is not None:
            return self.bucket.objects(self._prefix)
        root = Path(self.path)
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    def names(self) -> list[str]:
        """The names of what lies there, sorted, with N for the number and the id of a save."""
        return sorted(re.sub(r"-\d{8}-[0-9a-f]{16}(?=\.|$)", "-N", name) for name in self.files())

    def synced(self) -> Path:
        """A directory with a copy of what lies there, as the services' own tools make it."""
        copy = self.folder / "synced"
        shutil.rmtree(copy, ignore_errors=True)
        for name, raw in self.files().items():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(raw)
        return copy

    def put(self, name: str, raw: bytes) -> None:
        """Put a file there, as a user does."""
        if self.bucket is not None:
            self.bucket.put(f"{self._prefix}/{name}", raw)
            return
        (Path(self.path) / name).parent.mkdir(parents=True, exist_ok=True)
        (Path(self.path) / name).write_bytes(raw)

    @property
    def _prefix(self) -> str:
        return self.path.partition(f"{BUCKET}/")[2]


@pytest.fixture
def place(store_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A directory, and a place in each service, where nothing lies yet."""
    scheme, is_address, _ = store_place.partition("://")
    return Place(store_place, use_service(scheme, monkeypatch) if is_address else None, tmp_path)


@pytest.fixture
def store(scheme: str, store_address: str, bucket: Bucket, tmp_path: Path) -> Place:
    """A place in each service where nothing lies yet."""
    return Place(store_address, bucket, tmp_path)
