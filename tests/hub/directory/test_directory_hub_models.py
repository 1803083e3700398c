"""Models in a directory hub: pushed as they were saved, and loaded by stock transformers from each revision."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import BertModel

from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.push import push_checkpoint
from tests.helpers.tiny_bert import SHARDED, SINGLE, all_see, bert, read_by_all, value_of
from tests.hub.directory.helpers import disk_bytes, litter


def test_stock_transformers_loads_each_revision_that_was_pushed(tmp_path: Path) -> None:
    saved, root = tmp_path / "saved", tmp_path / "org" / "name"
    commits = []
    for value, limit in ((1.0, SINGLE), (2.0, SHARDED), (3.0, SHARDED), (4.0, SINGLE)):
        bert(value).save_pretrained(saved, max_shard_size=limit)
        result = push_checkpoint(saved, f"file://{root}", commit_message=f"of {value}", progress=False)
        commits.append(result.commit)
        assert sorted(os.listdir(result.url)) == sorted(name for name in os.listdir(saved) if name != ".cache")
    hub = DirectoryHub.open(root)
    assert read_by_all(Path(hub.snapshot())) == all_see(4.0)
    for value, commit in zip((1.0, 2.0, 3.0, 4.0), commits, strict=True):
        hub.verify(commit)
        assert value_of(BertModel.from_pretrained(hub.snapshot(commit))) == value
    assert litter(str(root)) == []


def test_an_unchanged_checkpoint_makes_no_commit_and_writes_nothing(tmp_path: Path) -> None:
    saved, root = tmp_path / "saved", tmp_path / "hub"
    bert(1.0).save_pretrained(saved, max_shard_size=SHARDED)
    first = push_checkpoint(saved, str(root), progress=False)
    before = disk_bytes(str(root))
    again = push_checkpoint(saved, str(root), progress=False)
    assert (again.commit, again.is_new, again.sent_bytes) == (first.commit, False, 0)
    assert disk_bytes(str(root)) == before


def test_a_branch_and_a_pull_request_hold_other_weights_than_main(tmp_path: Path) -> None:
    saved, root = tmp_path / "saved", str(tmp_path / "hub")
    for value, options in ((1.0, {}), (2.0, {"revision": "exp/two"}), (3.0, {"create_pr": True})):
        bert(value).save_pretrained(saved, max_shard_size=SHARDED)
        push_checkpoint(saved, root, progress=False, **options)
    hub = DirectoryHub.open(root)
    found = {name: value_of(BertModel.from_pretrained(hub.snapshot(name))) for name in ("main", "exp/two", "refs/pr/1")}
    assert found == {"main": 1.0, "exp/two": 2.0, "refs/pr/1": 3.0}
