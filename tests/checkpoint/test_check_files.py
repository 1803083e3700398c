"""Files compared with index and records; a small file that checkpoints share is right if any of them recorded it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

import hfshard
from hfshard.checkpoint.check_files import ReplacedMeanwhile, check_files, check_keys, check_total, retry_if_replaced
from hfshard.checkpoint.folder import Folder, LocalFolder, Traits
from hfshard.checkpoint.ranged_folder import RangedFolder, StoreFolder
from hfshard.errors import CheckpointChangedError, DamagedCheckpointError, IntegrityError
from hfshard.format.index import CheckpointIndex, FileDigest, sha256_of
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


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ({"1": ["b"], "2": ["a"]}, "'b' of shard 'out/1' should be in '2' according to the index 'out/index'"),
        ({"1": ["a", "b"], "2": ["b"]}, "'b' of shard 'out/1' should be in '2'"),
        ({"1": ["a", "a"], "2": ["b"]}, "'a' of shard 'out/1' is also in '1'"),
        ({"1": ["a", "c"], "2": ["b"]}, "'c' of shard 'out/1' is not in the index 'out/index'"),
        ({"1": ["a"], "2": []}, "'b' of shard 'out/2' is missing, but the index 'out/index' lists it there"),
    ],
    ids=["swapped", "in two", "twice", "of no index", "missing"],
)
def test_shards_of_different_saves_are_refused_by_the_tensor_that_shows_it(
    contents: dict[str, list[str]], words: str
) -> None:
    with pytest.raises(DamagedCheckpointError, match=f"^Tensor {words}"):
        check_keys("out/index", {"a": "1", "b": "2"}, contents)


def test_shards_with_more_or_fewer_bytes_than_the_index_says_are_refused() -> None:
    index = CheckpointIndex({"a": "1"}, total_size=8, files={"1": FileDigest()})

    check_total("out/index", index, 8)
    for actual in (7, 9):
        with pytest.raises(DamagedCheckpointError, match=f"total_size is 8, but the shards contain {actual} bytes"):
            check_total("out/index", index, actual)


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


# Readers that start again.

LOCAL = replace(LocalFolder.traits, retries=3, wait_seconds=0)
REMOTE = replace(RangedFolder.traits, retries=3, wait_seconds=0)


def raising(*errors: BaseException) -> tuple[Callable[[], str], list[BaseException]]:
    """Work that raises one error after another, then succeeds; and the errors that are left."""
    left = list(errors)

    def work() -> str:
        if left:
            raise left.pop(0)
        return "read"

    return work, left


@pytest.mark.parametrize(
    ("traits", "error"),
    [
        (LOCAL, ReplacedMeanwhile()),
        (REMOTE, ReplacedMeanwhile()),
        (REMOTE, CheckpointChangedError("An object is gone.")),
    ],
    ids=["two saves in a directory", "two saves in a store", "an object of a store"],
)
def test_a_reader_starts_again_until_it_has_read_one_save(traits: Traits, error: Exception) -> None:
    work, left = raising(error, error)

    assert retry_if_replaced(work, traits, "out") == "read"
    assert left == []


def test_a_file_that_was_overwritten_in_a_directory_is_an_error_at_once() -> None:
    changed = CheckpointChangedError("The file has other bytes now.")
    work, left = raising(changed, changed)

    with pytest.raises(CheckpointChangedError, match="other bytes"):
        retry_if_replaced(work, LOCAL, "out")
    assert len(left) == 1


def test_attempts_within_attempts_are_not_multiplied() -> None:
    inner, left = raising(*[ReplacedMeanwhile() for _ in range(9)])

    with pytest.raises(CheckpointChangedError, match=r"^The checkpoint in 's3://a/b' was replaced on every attempt\."):
        retry_if_replaced(lambda: retry_if_replaced(inner, REMOTE, "s3://a/b"), REMOTE, "outer")
    assert len(left) == 6


def test_the_last_error_of_a_store_is_raised_as_it_is_and_a_given_message_replaces_the_usual_one() -> None:
    gone = [CheckpointChangedError(f"Object {number} is gone.") for number in range(3)]
    with pytest.raises(CheckpointChangedError, match=r"^Object 2 is gone\.$"):
        retry_if_replaced(raising(*gone)[0], REMOTE, "s3://a/b")

    cause = IntegrityError("Shard 1 differs.")
    signal = ReplacedMeanwhile()
    signal.__cause__ = cause
    with pytest.raises(CheckpointChangedError, match=r"^It never stood still\.$") as caught:
        retry_if_replaced(raising(signal, signal, signal)[0], REMOTE, "s3://a/b", "It never stood still.")
    assert caught.value.__cause__ is cause
