"""What a push adds and deletes: its own family becomes what is local, all else stays, no damage is pushed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hfshard
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint, WhenOpen
from hfshard.disk.byte_source import BytesSource, read_all
from hfshard.errors import IntegrityError
from hfshard.format.index import Checksum, sha256_of
from hfshard.hub.push_files import (
    DirectoryFiles,
    collect_push_contents,
    detect_variants,
    foreign_indexes,
    plan_push,
    stale_names,
    unindexed_weights,
)
from hfshard.hub.repo import RemoteFile, RepoTree
from tests.commit.test_commit_plan_guide import NEW, OLD, OLD_SHARD_BYTES
from tests.commit.test_directory_commit import ONE_FILE, save
from tests.hub.models import files_of
from tests.saving.helpers import flip
from tests.servers.objects import git_blob_oid

pytestmark = pytest.mark.compat

# Written by hand: whose each name is. None is the plain variant; "nobody" is the user.
FAMILIES: dict[str, str | None] = {
    "model.safetensors": None,
    "model.safetensors.index.json": None,
    "model-00001-of-00002.safetensors": None,
    "model-00002-of-00002.safetensors": None,
    "model-00001-of-00003.safetensors": None,
    "model-123456-of-200000.safetensors": None,
    "model-hfshard-placeholder.safetensors": None,
    "model-hfshard-0123456789abcdef.safetensors": None,
    "model-hfshard-0123456789abcdef.safetensors.index.json": None,
    "pytorch_model.bin": None,
    "pytorch_model.bin.index.json": None,
    "pytorch_model-00001-of-00002.bin": None,
    "model.fp16.safetensors": "fp16",
    "model.safetensors.index.fp16.json": "fp16",
    "model.fp16-00001-of-00002.safetensors": "fp16",
    "model.fp16-hfshard-placeholder.safetensors": "fp16",
    "pytorch_model.fp16.bin": "fp16",
    "pytorch_model.bin.index.fp16.json": "fp16",
    "pytorch_model.fp16-00001-of-00002.bin": "fp16",
    "model.fp16.v2.safetensors": "fp16.v2",
    "model.safetensors.index.fp16.v2.json": "fp16.v2",
    "model.fp16.v2-00001-of-00001.safetensors": "fp16.v2",
    "README.md": "nobody",
    "config.json": "nobody",
    ".gitattributes": "nobody",
    "tokenizer.json": "nobody",
    "optimizer.bin": "nobody",
    "training_args.bin": "nobody",
    "adapter_model.safetensors": "nobody",
    "model_ema-00001-of-00002.safetensors": "nobody",
    "model_ema.safetensors": "nobody",
    "ema.safetensors.index.json": "nobody",
    "xmodel.safetensors": "nobody",
    "Model.safetensors": "nobody",
    "model.safetensors.bak": "nobody",
    "model-1-of-2.safetensors": "nobody",
    "model-00001-of-00002.safetensors.part": "nobody",
    "model-00001-of-00002.bin": "nobody",
    "pytorch_model-00001-of-00002.safetensors": "nobody",
    "flax_model.msgpack": "nobody",
    "model": "nobody",
}
NAMES = sorted(FAMILIES)
VARIANTS: list[str | None] = [None, "fp16", "fp16.v2"]

trees = st.dictionaries(st.sampled_from(NAMES), st.sampled_from([b"", b"a", b"b", b"longer"]))
kinds = st.sampled_from(["lfs", "regular"])


def tree_of(files: dict[str, bytes], kind: str) -> RepoTree:
    """As the Hub lists them: big ones with their sha256, small ones with git's hash."""
    return RepoTree(
        "c" * 40,
        {
            path: RemoteFile(len(raw), hashlib.sha256(raw).hexdigest() if kind == "lfs" else None, git_blob_oid(raw))
            for path, raw in files.items()
        },
    )


@given(remote=trees, local=trees, variants=st.sets(st.sampled_from(VARIANTS), min_size=1), kind=kinds)
def test_family_becomes_what_is_local_and_all_else_stays(
    remote: dict[str, bytes], local: dict[str, bytes], variants: set[str | None], kind: str
) -> None:
    local = {name: raw for name, raw in local.items() if FAMILIES[name] in (*variants, "nobody")}
    stale = stale_names(remote, local, variants, ())
    assert {FAMILIES[name] for name in stale} <= variants
    plan = plan_push({name: BytesSource(raw) for name, raw in local.items()}, tree_of(remote, kind), stale)
    after = {name: raw for name, raw in remote.items() if name not in plan.deletes}
    after |= {name: content.open().read() for name, content in plan.adds.items()}
    for name in NAMES:
        if FAMILIES[name] in variants or name in local:
            assert after.get(name) == local.get(name)
        else:
            assert after.get(name) == remote.get(name)
    # and nothing is sent that is there, or deleted that is not
    assert plan.adds.keys() == {name for name in local if remote.get(name) != local[name]}
    assert set(plan.deletes) <= remote.keys()
    assert plan.is_empty == (after == remote)


@given(remote=trees, local=trees, owned=st.sets(st.sampled_from(NAMES)))
def test_files_that_the_old_index_names_go_unless_they_are_pushed(
    remote: dict[str, bytes], local: dict[str, bytes], owned: set[str]
) -> None:
    stale = stale_names(remote, local, [None], owned)
    family = {name for name in NAMES if FAMILIES[name] is None}
    assert stale == ((family | owned) & remote.keys()) - local.keys()


@given(names=st.sets(st.sampled_from(NAMES)))
def test_checkpoints_are_known_by_their_entry_files(names: set[str]) -> None:
    entries: dict[str, str | None] = {
        "model.safetensors": None,
        "model.safetensors.index.json": None,
        "pytorch_model.bin": None,
        "pytorch_model.bin.index.json": None,
        "model.fp16.safetensors": "fp16",
        "model.safetensors.index.fp16.json": "fp16",
        "pytorch_model.fp16.bin": "fp16",
        "pytorch_model.bin.index.fp16.json": "fp16",
        "model.fp16.v2.safetensors": "fp16.v2",
        "model.safetensors.index.fp16.v2.json": "fp16.v2",
    }
    assert detect_variants(names) == {entries[name] for name in names & entries.keys()}


@given(remote=trees, local=trees, variants=st.sets(st.sampled_from(VARIANTS), min_size=1))
def test_indexes_and_weights_of_others_are_told_apart(
    remote: dict[str, bytes], local: dict[str, bytes], variants: set[str | None]
) -> None:
    others = {name for name in remote.keys() - local.keys() if FAMILIES[name] not in variants}
    indexes = {name for name in others if ".index." in name}
    assert set(foreign_indexes(remote, local, variants)) == indexes
    weights = {name for name in others if name.endswith((".safetensors", ".bin"))}
    assert unindexed_weights(remote, local, variants) == weights


def test_regular_and_lfs_files_are_compared_by_their_own_hash() -> None:
    # git's hash of b"hello\n", as `git hash-object` prints it, and sha256 as `sha256sum` does.
    blob = "ce013625030ba8dba906f756967f9e9ca394464a"
    sha256 = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"
    local = {"a": BytesSource(b"hello\n"), "b": BytesSource(b"hello\n")}
    same = RepoTree("c", {"a": RemoteFile(6, None, blob), "b": RemoteFile(6, sha256, "pointer")})
    assert plan_push(local, same, ()).is_empty
    other = RepoTree("c", {"a": RemoteFile(6, None, "pointer"), "b": RemoteFile(6, blob, blob)})
    assert set(plan_push(local, other, ()).adds) == {"a", "b"}
    unknown = RepoTree("c", {"a": RemoteFile(-1, None, None), "b": RemoteFile(6, None, None)})
    assert set(plan_push(local, unknown, ()).adds) == {"a", "b"}


@pytest.mark.parametrize("checksum", ["sha256", "xxh3"])
def test_single_file_with_a_flipped_bit_is_not_pushed(tmp_path: Path, checksum: Checksum) -> None:
    hfshard.save_state_dict({"w": torch.ones(100_000)}, tmp_path / "x", checksum=checksum)
    flip(tmp_path / "x" / "model.safetensors", -1)
    with pytest.raises(IntegrityError, match=r"model\.safetensors"):
        hfshard.push_checkpoint(tmp_path / "x", tmp_path / "hub")
    assert not (tmp_path / "hub").exists()


def test_shards_of_another_checksum_are_compared_before_they_are_pushed(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(5000), "b": torch.ones(5000)}
    hfshard.save_state_dict(tensors, tmp_path / "x", max_shard_size="25KB", checksum="xxh3")
    assert hfshard.push_checkpoint(tmp_path / "x", tmp_path / "hub").is_new
    flip(tmp_path / "x" / "model-00002-of-00002.safetensors", -1)
    with pytest.raises(IntegrityError, match="model-00002-of-00002"):
        hfshard.push_checkpoint(tmp_path / "x", tmp_path / "hub2")


class SavedOver(DirectoryFiles):
    """A directory into which another process saves between the listing and the opening."""

    @contextmanager
    def open_variant(self, variant: str | None, when_open: WhenOpen | None = None) -> Iterator[OpenCheckpoint]:
        """Save, then open what was saved."""
        hfshard.save_state_dict({"w": torch.ones(4000)}, self.place)
        with super().open_variant(variant, when_open) as checkpoint:
            yield checkpoint


def test_a_save_after_the_listing_is_pushed_with_its_own_sizes(tmp_path: Path) -> None:
    hfshard.save_state_dict({"w": torch.ones(1000)}, tmp_path)

    contents = collect_push_contents(SavedOver(str(tmp_path))).contents

    shard = contents["model.safetensors"]
    assert shard.size == (tmp_path / "model.safetensors").stat().st_size > 16_000
    assert shard.sha256 == sha256_of((tmp_path / "model.safetensors").read_bytes())


class SavedOverLater(DirectoryFiles):
    """A directory into which another process saves once, when its small files have been read, or all are checked."""

    save: Callable[[], None] | None = None
    is_late = False

    def _save(self) -> None:
        if self.save is not None:
            save, self.save = self.save, None
            save()

    @contextmanager
    def open_variant(self, variant: str | None, when_open: WhenOpen | None = None) -> Iterator[OpenCheckpoint]:
        """Save before or after the opening is complete."""

        def look(checkpoint: OpenCheckpoint) -> None:
            if when_open is not None:
                when_open(checkpoint)
            if not self.is_late:
                self._save()

        with super().open_variant(variant, look) as checkpoint:
            self._save()
            yield checkpoint


@pytest.mark.parametrize("limit", [ONE_FILE, OLD_SHARD_BYTES], ids=["one file", "shards"])
def test_a_checkpoint_that_is_replaced_while_it_is_opened_is_read_again(tmp_path: Path, limit: int) -> None:
    save(tmp_path, OLD, limit, version="old")
    files = SavedOverLater(str(tmp_path))
    files.save = partial(save, tmp_path, NEW, limit, version="new")

    contents = collect_push_contents(files).contents

    assert {name: read_all(content) for name, content in contents.items()} == files_of(tmp_path)


def test_the_config_of_a_checkpoint_that_is_replaced_later_stays_that_of_its_weights(tmp_path: Path) -> None:
    save(tmp_path, OLD, ONE_FILE, version="old")
    old = files_of(tmp_path)
    files = SavedOverLater(str(tmp_path))
    files.save = partial(save, tmp_path, NEW, ONE_FILE, version="new")
    files.is_late = True

    contents = collect_push_contents(files).contents

    assert {name: content.sha256 for name, content in contents.items()} == {
        name: sha256_of(raw) for name, raw in old.items()
    }
