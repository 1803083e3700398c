"""More shards than one commit takes: shards of new names go ahead, and main is never a mix at any commit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

import hfshard
from tests.hub.models import contents
from tests.hub.push.push_hub import PushHub, differences
from tests.hubserver.hub_server import Fault

A_COMMIT = 8
"""Files that one commit takes in most of these tests: as with the 256 of a real one, a few more make two."""
SHARDS = 12


Many = Callable[..., Path]
"""`save_many`, once for each checkpoint."""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Many:
    """Checkpoints by number and count, which nobody changes."""
    folder = tmp_path_factory.mktemp("many")

    @cache
    def made(value: float, count: int = SHARDS) -> Path:
        return save_many(folder / f"{value}-{count}", value, count)

    return made


def save_many(folder: Path, value: float, count: int) -> Path:
    """A checkpoint of one tensor of 4 bytes a shard; each tensor is one number."""
    tensors = {f"w{number:04d}": torch.full((1,), value) for number in range(count)}
    hfshard.save_state_dict(tensors, folder, max_shard_size=4 if count > 1 else 10**6)
    (folder / "config.json").write_text('{"model_type": "bert"}')
    return folder


def put(hub: PushHub, repo: str, folder: Path) -> None:
    """Make a repo with the files of a directory: an old checkpoint, whoever pushed it."""
    hub.server.create_repo(repo).commit(dict(contents(folder)), "Old")


def seen(hub: PushHub, repo: str, commit: str) -> str:
    """What stock and hfshard read of a commit: the number that it is full of, or the error's name, and both agree."""
    blobs = hub.root / f"cache-{repo.replace('/', '-')}"  # its own for each repo: blobs lie there by what they hold
    tasks = [hub.start(task, repo, blobs / task, revision=commit) for task in ("read_ours", "read_stock")]
    ours, stock = (task.outcome() for task in tasks)
    assert (ours.error is None) == (stock.error is None), f"{ours.trace}\n{stock.trace}"
    assert ours.error is None or ours.is_ours, ours.trace
    assert ours.result == stock.result
    return str(ours.error or ours.result)


def test_one_commit_takes_256_files_and_few_are_open(hub: PushHub, repo: str, many: Many) -> None:
    folder = many(1, 260)
    hub.push(folder, repo, open_files=360)  # the check before a push holds all shards open at once
    assert differences(hub, repo, contents(folder)) == {}
    assert hub.kinds()["lfs_put"] == 260 + 1  # and the index, which is large enough for LFS
    commits = list(reversed(hub.view(repo).commits()))
    assert [commit.title for commit in commits] == [
        "initial commit",
        "Upload checkpoint (shards, part 1 of 2)",
        "Upload checkpoint (shards, part 2 of 2)",
        "Upload checkpoint",
    ]
    assert [commit.parents for commit in commits[1:]] == [(before.oid,) for before in commits[:-1]]
    assert [len(commit.files) - 1 for commit in commits] == [0, 256, 260, 262]  # and .gitattributes


@pytest.mark.compat
def test_no_commit_of_a_new_repo_is_a_mix(hub: PushHub, repo: str, many: Many) -> None:
    folder = many(1)
    hub.push(folder, repo, commit_files=A_COMMIT)
    assert differences(hub, repo, contents(folder)) == {}
    commits = list(reversed(hub.view(repo).commits()))
    assert [len(commit.files) - 1 for commit in commits] == [0, A_COMMIT, SHARDS, SHARDS + 2]  # and .gitattributes
    found = [seen(hub, repo, commit.oid) for commit in commits]
    assert found == ["CheckpointNotFoundError"] * 3 + ["1.0"]


@pytest.mark.parametrize(
    ("before", "after", "count"),
    [
        (1, SHARDS, 3),
        (SHARDS - 2, SHARDS, 3),
        (SHARDS, SHARDS, 1),  # of the same names: all in one commit, or main would be a mix
        (SHARDS, 1, 1),
    ],
)
def test_no_commit_of_an_old_repo_is_a_mix(
    hub: PushHub, repo: str, many: Many, before: int, after: int, count: int
) -> None:
    put(hub, repo, many(1, before))
    old = len(hub.view(repo).commits())
    folder = many(2, after)
    hub.push(folder, repo, commit_files=A_COMMIT)
    assert differences(hub, repo, contents(folder)) == {}
    commits = list(reversed(hub.view(repo).commits()))[old - 1 :]
    assert len(commits) == 1 + count
    found = [seen(hub, repo, commit.oid) for commit in commits]
    assert found == ["1.0"] * count + ["2.0"]


def test_push_that_dies_between_its_commits_is_repaired_by_the_next(hub: PushHub, repo: str, many: Many) -> None:
    put(hub, repo, many(1, SHARDS - 2))
    gate = threading.Event()
    held = hub.server.fail(Fault(match="POST commit", kind="slow", skip=1, after_bytes=500, gate=gate))
    task = hub.start("push", many(2), repo, commit_files=A_COMMIT)
    assert held.reached.wait(60)
    task.kill()
    gate.set()
    head = hub.view(repo).branches["main"]
    assert len(hub.files(repo)) == SHARDS - 2 + 2 + A_COMMIT
    assert seen(hub, repo, head) == "1.0"
    folder = many(3, SHARDS - 3)
    hub.push(folder, repo, commit_files=A_COMMIT)
    assert differences(hub, repo, contents(folder)) == {}
    assert seen(hub, repo, hub.view(repo).branches["main"]) == "3.0"


def test_many_shards_that_meet_a_readme_go_on_top(hub: PushHub, repo: str, many: Many) -> None:
    hub.server.create_repo(repo)
    theirs: dict[str, bytes | None] = {"README.md": b"# Theirs"}
    hub.server.fail(
        Fault(match="POST commit", kind="race", skip=1, action=lambda: hub.view(repo).commit(theirs, "theirs"))
    )
    folder = many(2)
    hub.push(folder, repo, commit_files=A_COMMIT)
    assert differences(hub, repo, contents(folder) | {"README.md": b"# Theirs"}) == {}
    assert hub.kinds()["lfs_put"] == SHARDS  # none is sent twice


def test_many_shards_as_a_pull_request_open_one(hub: PushHub, repo: str, many: Many) -> None:
    folder = many(2)
    done = hub.push(folder, repo, create_pr=True, commit_files=A_COMMIT).result
    assert list(hub.view(repo).pull_requests) == [1]
    assert differences(hub, repo, contents(folder), "refs/pr/1") == {}
    assert hub.files(repo) == set()
    assert done["pr_url"].endswith("/discussions/1") and done["commit"] == hub.view(repo).pull_requests[1]
