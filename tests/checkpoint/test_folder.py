"""Folders: directories, and what holds of each kind of folder."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import pytest

from hfshard.checkpoint.folder import Folder, LocalFolder, StockFolder
from hfshard.checkpoint.ranged_folder import RangedFolder, StoreFolder
from hfshard.disk.byte_source import ByteSource
from hfshard.errors import MissingShardError
from hfshard.format.file_names import WeightNames
from tests.stores.saving.memory_store import MemoryStore


def test_a_directory_finds_files_folders_and_links_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "code").mkdir()
    (tmp_path / "gone.bin").symlink_to(tmp_path / "elsewhere")
    folder, missing = LocalFolder(str(tmp_path)), LocalFolder(str(tmp_path / "missing"))

    assert folder.names() == ["code", "config.json", "gone.bin"]
    assert [folder.size(name) for name in folder.names()] == [0, 2, 0]
    assert [folder.version(name) is None for name in folder.names()] == [False, False, True]
    assert all(map(folder.has, folder.names()))
    found = folder.find("config.json")
    assert found is not None and found.modified is not None and found.modified.tzinfo is not None
    assert (missing.exists(), missing.names(), missing.find("config.json")) == (False, [], None)
    assert LocalFolder(str(tmp_path / "code")).exists()


@pytest.mark.parametrize("is_local", [True, False])
def test_a_file_is_opened_and_passed_on_as_it_is(tmp_path: Path, *, is_local: bool) -> None:
    raw = b"\0not text"
    (tmp_path / "spiece.model").write_bytes(raw)
    store = MemoryStore({"spiece.model": raw})
    folder = LocalFolder(str(tmp_path)) if is_local else StoreFolder(store, "s3://models/bert")

    with folder.open("spiece.model") as reader, folder.source("spiece.model", "ab" * 32).open() as again:
        assert reader.read() == again.read() == raw
    source = folder.source("spiece.model", "ab" * 32)
    assert (source.size, source.sha256) == (len(raw), "ab" * 32)
    with pytest.raises(MissingShardError, match=r"spiece\.txt"):
        folder.open("spiece.txt")


def test_a_directory_finds_a_file_of_a_year_that_datetime_has_not() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as directory:
        path = Path(directory, "model.safetensors")
        path.write_bytes(b"12")
        os.utime(path, (3e11, 3e11))  # 11476, where the file system has it
        found = LocalFolder(directory).find("model.safetensors")
        has_year = path.stat().st_mtime < 2e11

    assert found is not None
    assert (found.size, found.version is None, found.modified is None) == (2, False, not has_year)


def test_the_names_of_a_directory_that_is_removed_meanwhile_are_none(tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    is_over = threading.Event()

    def move() -> None:
        while not is_over.is_set():
            moved.mkdir()
            moved.rmdir()

    mover = threading.Thread(target=move)
    mover.start()
    try:
        assert {tuple(LocalFolder(str(moved)).names()) for _ in range(3000)} == {()}
    finally:
        is_over.set()
        mover.join()


FILES = {"tokenizer.json": b"{}", "model.safetensors": b"weights", ".hidden": b"", "unet/config.json": b"{}"}


@pytest.fixture(params=["directory", "store", "ranges"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """The same files in each kind of folder."""
    if request.param == "directory":
        for name, raw in FILES.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(raw)
        return LocalFolder(str(tmp_path))
    kind = StoreFolder if request.param == "store" else RangedFolder
    return kind(MemoryStore(dict(FILES)), "s3://models/bert")


def raw_of(source: ByteSource) -> bytes:
    with source.open() as reader:
        return reader.read()


def test_each_folder_finds_the_files_that_go_along_with_a_checkpoint(folder: Folder) -> None:
    assert {name: raw_of(source) for name, source in folder.companions(()).items()} == {"tokenizer.json": b"{}"}
    assert folder.companions(("tokenizer.json",)) == {}


def test_each_folder_has_what_is_there_now(folder: Folder) -> None:
    there = folder.existing(("model.safetensors", "none"))
    found = folder.look_up(("unet/config.json", "tokenizer.json", "none"))

    assert {name: raw_of(source) for name, source in there.items()} == {"model.safetensors": b"weights"}
    assert {path: raw_of(one.contents) for path, one in found.items()} == {
        "tokenizer.json": b"{}",
        "unet/config.json": b"{}",
    }
    assert found["tokenizer.json"].version == folder.look_up(("tokenizer.json",))["tokenizer.json"].version


def test_each_folder_names_the_folders_below_and_its_own_files(folder: Folder) -> None:
    assert folder.folders() == ["unet"]
    assert folder.has_any(("none", "tokenizer.json"))
    assert not folder.has_any(("none",))
    assert folder.entered(WeightNames()) is folder
    assert folder.stale_copies() == []
    assert folder.describe_plain_weights() is None


def test_a_folder_in_the_place_of_a_file_equals_no_contents(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "nowhere")
    folder = LocalFolder(str(tmp_path))

    assert {name: source.size for name, source in folder.existing(("a", "b", "c")).items()} == {"a": -1, "b": -1}
    assert {name: one.contents.size for name, one in folder.look_up(("a", "b", "c")).items()} == {"b": -1}


def test_a_file_that_vanishes_while_it_is_looked_up_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")

    def remove_first(path: str, mode: int) -> bool:
        if path.endswith("/a"):
            os.unlink(path)
        return True

    monkeypatch.setattr(os, "access", remove_first)

    assert LocalFolder(str(tmp_path)).look_up(("a", "b")).keys() == {"b"}


def test_only_a_directory_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    in_store = StoreFolder(MemoryStore(), "s3://models/bert")

    assert type(LocalFolder(str(tmp_path)).as_stock()) is StockFolder
    assert in_store.as_stock() is in_store
