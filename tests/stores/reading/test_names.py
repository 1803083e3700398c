"""Names in a bucket that are hostile, or of no file: nothing is ever written outside of the directory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hfshard
from hfshard.errors import UnsafePathError
from hfshard.places import place as places
from hfshard.places import store_files, store_mirror
from hfshard.stores.open_store import open_store
from hfshard.training.run import run_store
from tests.servers.stores.buckets import Bucket
from tests.stores.saving.memory_store import MemoryStore

ADDRESS = "s3://models/bert"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """With a checkpoint; as a bucket of the Hub, it takes any name."""
    place = MemoryStore()
    for room in (store_mirror, run_store, store_files, places):
        monkeypatch.setattr(room, "open_store", lambda address: place)
    hfshard.save_state_dict({"a": torch.ones(3)}, ADDRESS)
    return place


@pytest.mark.parametrize(
    "name",
    ["../x", "a/../../x", "/etc/x", "..\\x", "c:x", "a//x", "./x", "a\nx", "\x1b[31mx", "a\0x", "x" * 256, "t.json/x"],
)
def test_an_object_that_can_be_no_file_is_named_before_anything_is_written(
    store: MemoryStore, tmp_path: Path, name: str
) -> None:
    store.objects |= {name: b"1", "t.json": b"{}"}
    assert hfshard.verify_checkpoint(ADDRESS).ok
    assert list(hfshard.load_state_dict(ADDRESS)) == ["a"]
    for act in (hfshard.pull_checkpoint, hfshard.push_checkpoint):
        with pytest.raises(
            UnsafePathError, match=r"(?s)An object in 's3://models/bert' cannot be a file .* with ignore_patterns\."
        ):
            act(ADDRESS, tmp_path / "to")
        assert list(tmp_path.iterdir()) == []

    hfshard.pull_checkpoint(ADDRESS, tmp_path / "to", ignore_patterns=[name, "t.json"])
    assert list(hfshard.load_state_dict(tmp_path / "to")) == ["a"]


def test_a_folder_made_by_hand_with_nothing_in_it_is_no_file(
    store_address: str, store_prefix: str, bucket: Bucket, tmp_path: Path
) -> None:
    hfshard.save_state_dict({"a": torch.ones(3)}, store_address)
    bucket.put(f"{store_prefix}/sub/", b"")
    for name in ("__init__.py", "README.md"):
        open_store(store_address).put(name, b"")
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "README.md").write_text("my own")

    hfshard.pull_checkpoint(store_address, tmp_path / "to")
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == [
        "README.md",
        "__init__.py",
        "model.safetensors",
    ]
    assert (tmp_path / "to" / "README.md").read_text() == "my own"
