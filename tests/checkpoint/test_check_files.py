"""Files compared with their records; a small file that checkpoints share is right if any of them recorded it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

import hfshard
from hfshard.checkpoint.check_files import check_files
from hfshard.checkpoint.folder import Folder, LocalFolder, StoreFolder
from hfshard.errors import DamagedCheckpointError, IntegrityError
from hfshard.format.digests import sha256_of
from hfshard.format.index import FileDigest
from tests.stores.saving.memory_store import MemoryStore

CONFIG = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=20)


class Bert(hfshard.ShardedModelMixin, BertModel):
    """The stock encoder."""


@pytest.mark.parametrize("limit", ["5GB", "10KB"], ids=["single", "sharded"])
def test_a_variant_that_rewrites_the_shared_config_leaves_the_weights_beside_it_verifiable(
    tmp_path: Path, limit: str
) -> None:
    model: Any = Bert(CONFIG)
    model.save_pretrained(tmp_path, max_shard_size=limit)
    model.to(torch.float16).save_pretrained(tmp_path, max_shard_size=limit, variant="fp16")
    assert '"float16"' in (tmp_path / "config.json").read_text()

    for variant in (None, "fp16"):
        assert hfshard.verify_checkpoint(tmp_path, variant=variant).problems == ()
        hfshard.load_state_dict(tmp_path, variant=variant, verify="full")


def test_a_config_that_no_save_wrote_is_an_error_for_each_checkpoint_beside_it(tmp_path: Path) -> None:
    model: Any = Bert(CONFIG)
    model.save_pretrained(tmp_path)
    model.to(torch.float16).save_pretrained(tmp_path, variant="fp16")
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("float16", "float64"))

    for variant in (None, "fp16"):
        with pytest.raises(IntegrityError, match=r"config\.json"):
            hfshard.load_state_dict(tmp_path, variant=variant, verify="full")


# Files compared with a table of records: the same findings in a directory and in a store.

SINGLE = "model.safetensors"
NOTES = "notes.bin"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """A single file that states its own digests, and a file that is no text."""
    hfshard.save_state_dict({"w": torch.arange(5000.0)}, tmp_path / "saved", max_shard_size="1GB")
    return {SINGLE: (tmp_path / "saved" / SINGLE).read_bytes(), NOTES: b"\0\1\2"}


@pytest.fixture
def records(files: dict[str, bytes], tmp_path: Path) -> dict[str, FileDigest]:
    """What a manifest has of them."""
    shard = LocalFolder(str(tmp_path / "saved")).open_shard(SINGLE)
    stated = shard.hfshard_metadata.digests
    shard.close()
    return {
        SINGLE: replace(stated, size=len(files[SINGLE]), tensor_digests=None),
        NOTES: FileDigest(len(files[NOTES]), sha256=sha256_of(files[NOTES])),
    }


def in_directory(files: dict[str, bytes], directory: Path) -> Folder:
    """A directory with some files."""
    directory.mkdir()
    for name, raw in files.items():
        (directory / name).write_bytes(raw)
    return LocalFolder(str(directory))


def in_store(files: dict[str, bytes], directory: Path) -> Folder:
    """A store with some files."""
    return StoreFolder(MemoryStore(dict(files)), "s3://models/bert")


EVERYWHERE = pytest.mark.parametrize("put", [in_directory, in_store], ids=["directory", "store"])

FolderOf = Callable[[dict[str, bytes], Path], Folder]


@EVERYWHERE
@pytest.mark.parametrize("level", ["structure", "full"])
def test_files_that_are_as_recorded_pass(
    put: FolderOf, level: str, files: dict[str, bytes], records: dict[str, FileDigest], tmp_path: Path
) -> None:
    hashed: list[int] = []
    check_files(put(files, tmp_path / "out"), records, level, progress_callback=hashed.append)

    assert bool(hashed) == (level == "full")


@EVERYWHERE
@pytest.mark.parametrize("name", [SINGLE, NOTES])
def test_a_file_that_lacks_its_last_byte_or_is_missing_is_damage(
    put: FolderOf, name: str, files: dict[str, bytes], records: dict[str, FileDigest], tmp_path: Path
) -> None:
    short = put({**files, name: files[name][:-1]}, tmp_path / "short")
    lacking = put({one: raw for one, raw in files.items() if one != name}, tmp_path / "lacking")

    for folder in (short, lacking):
        problems: list[DamagedCheckpointError] = []
        check_files(folder, records, "structure", on_problem=problems.append)
        assert [problem.path for problem in problems] == [f"{folder.path}/{name}"]
        with pytest.raises(DamagedCheckpointError, match=name):
            check_files(folder, records, "structure")


@EVERYWHERE
def test_a_digest_that_a_file_states_of_itself_must_be_the_recorded_one(
    put: FolderOf, files: dict[str, bytes], records: dict[str, FileDigest], tmp_path: Path
) -> None:
    fingerprint = str(records[SINGLE].fingerprint).encode()
    forged = files[SINGLE].replace(fingerprint, b"0" * len(fingerprint))
    assert forged != files[SINGLE]

    with pytest.raises(IntegrityError, match="states the fingerprint 0000"):
        check_files(put({**files, SINGLE: forged}, tmp_path / "out"), records, "full")
