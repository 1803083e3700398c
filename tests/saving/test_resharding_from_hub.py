"""Re-shards of what lies on a hub: with what lies beside it, and never into what the hub keeps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import hfshard
from hfshard.errors import HubNotFoundError, SaveDirectoryError
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.push import push_checkpoint
from tests.hub.models import files_of, saved
from tests.hub.pull.pull_hub import PullHub, cached

pytestmark = pytest.mark.compat
SHARDS, WHOLE = 20_000, "10MB"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = saved(tmp_path / "saved", 1, SHARDS)
    (made / "README.md").write_text("# A model\n")
    (made / "tokenizer.json").write_text("{}\n")
    return made


def test_a_repo_of_the_hub_is_resharded_with_what_lies_beside(
    hub: PullHub, repo: str, folder: Path, tmp_path: Path
) -> None:
    commit = hub.publish(repo, folder)
    want = saved(tmp_path / "want", 1, WHOLE)
    target, cache = tmp_path / "new", tmp_path / "cache"
    hub.call("reshard", repo, target, WHOLE, cache_dir=cache)
    beside = {"README.md": b"# A model\n", "tokenizer.json": b"{}\n"}
    assert files_of(target) == files_of(want) | beside
    hub.call("reshard", repo, tmp_path / "again", SHARDS, cache_dir=cache, revision=commit, local_files_only=True)
    assert hub.kinds() == {}
    assert files_of(tmp_path / "again") == files_of(folder)
    snapshot = cached(cache, repo, "snapshots")[0].parent
    assert hub.refused("reshard", repo, snapshot, WHOLE, cache_dir=cache).error == "InvalidArgumentError"
    assert hub.refused("reshard", repo, snapshot / "x", WHOLE, cache_dir=cache).error == "InvalidArgumentError"
    assert hub.refused("reshard", repo, target, WHOLE, cache_dir=cache, low_disk=True).error == "InvalidArgumentError"
    assert hub.refused("reshard", f"{repo}-x", target, WHOLE, cache_dir=cache).error == HubNotFoundError.__name__


def test_a_directory_hub_is_resharded_by_revision(folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "hub" / "model"
    first = push_checkpoint(folder, str(root), progress=False).commit
    push_checkpoint(saved(tmp_path / "second", 2, WHOLE), str(root), progress=False)
    for source in (str(root), f"file://{root}"):
        target = tmp_path / f"new-{source.count(':')}"
        hfshard.reshard_checkpoint(source, target, WHOLE, revision=first)
        assert files_of(target) == files_of(saved(tmp_path / "want", 1, WHOLE)) | {
            "README.md": b"# A model\n", "tokenizer.json": b"{}\n",
        }  # fmt: skip
    before = sorted(os.walk(root))
    for target in (root, root / "sub", Path(DirectoryHub.open(str(root)).snapshot())):
        with pytest.raises(SaveDirectoryError, match=r"which contains commits"):
            hfshard.reshard_checkpoint(root, target, WHOLE)
    assert sorted(os.walk(root)) == before
