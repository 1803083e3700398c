"""Pushes over a bad line, that meet others, or of more shards than a commit takes: no commit is a mix or damaged."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import hfshard
from tests.hub.models import contents, digest_of_seed, saved
from tests.hub.push.conftest import FOUR, MANY, SINGLE, PushHub, differences
from tests.saving.helpers import flip

UPLOAD, COMMIT = "PUT lfs_put", "POST commit"
REQUESTS = ("POST create_repo", "GET info", "POST preupload", "POST lfs_batch", "POST lfs_verify")
SHARD = "model-00002-of-00004.safetensors"


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A saved model of 5 shards, which are sent in parts of 1 MB."""
    return saved(tmp_path / "save", 1, "5MB", size="large")


def shard_bytes(folder: Path) -> int:
    return sum(len(raw) for name, raw in contents(folder).items() if name.endswith(".safetensors"))


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("after", [0, 1, 8_192, 16_000])
def test_dropped_upload_is_sent_again_and_the_others_are_not(
    hub: PushHub, repo: str, folder: Path, how: str, after: int
) -> None:
    hub.fail(UPLOAD, "drop", after_bytes=after, how=how)
    hub.lands(folder, repo)
    assert hub.kinds()["lfs_put"] == 4 + 1
    assert hub.server.bytes_up("lfs_put") == shard_bytes(folder) + after
    assert len(hub.view(repo).commits()) == 2


@pytest.mark.compat
def test_upload_that_is_dropped_five_times_completes(hub: PushHub, repo: str, folder: Path) -> None:
    for after, how in ((100, "fin"), (5_000, "rst"), (3, "fin"), (16_000, "rst"), (12_345, "fin")):
        hub.fail(UPLOAD, "drop", after_bytes=after, how=how)
    hub.lands(folder, repo)
    assert hub.server.bytes_up("lfs_put") == shard_bytes(folder) + 100 + 5_000 + 3 + 16_000 + 12_345


@pytest.mark.compat
@pytest.mark.parametrize(
    ("match", "fault", "waits"),
    [(match, {"kind": "status", "status": 503, "times": 3}, 3) for match in (*REQUESTS, UPLOAD)]
    + [(match, {"kind": "status", "status": 429, "retry_after": 2}, 1) for match in (*REQUESTS, UPLOAD, COMMIT)]
    + [(match, {"kind": "drop", "how": "rst"}, None) for match in (*REQUESTS, COMMIT)],
)
def test_request_that_fails_is_made_again_and_a_rate_limit_is_kept_to(
    hub: PushHub, repo: str, folder: Path, match: str, fault: dict[str, Any], waits: int | None
) -> None:
    hub.fail(match, **fault)
    outcome = hub.lands(folder, repo)
    assert waits in (None, len(outcome.waits))
    assert "retry_after" not in fault or outcome.waits[0] >= 2  # seconds, as the server asked for
    assert len(hub.view(repo).commits()) == 2


@pytest.mark.parametrize("status", [500, 503, 504])
def test_server_error_at_the_commit_is_tried_again(hub: PushHub, repo: str, folder: Path, status: int) -> None:
    hub.fail(COMMIT, "status", status=status, times=3)
    hub.lands(folder, repo)
    assert statuses(hub) == [status] * 3 + [200]
    assert len(hub.view(repo).commits()) == 2


@pytest.mark.compat
def test_expired_upload_url_is_asked_for_anew(hub: PushHub, repo: str, folder: Path) -> None:
    hub.fail(UPLOAD, "expired", times=2)
    hub.lands(folder, repo)
    assert len(hub.view(repo).commits()) == 2


@pytest.mark.compat
def test_multipart_upload_survives_parts_that_fail(hub: PushHub, repo: str, large: Path) -> None:
    hub.fail("PUT lfs_part.*partNumber=2", "drop", after_bytes=700_000)
    hub.fail("PUT lfs_part.*partNumber=3", "drop", after_bytes=10_000, how="rst")
    hub.fail("PUT lfs_part.*partNumber=1", "status", status=503, skip=1)
    hub.fail("lfs_complete", "status", status=503)
    hub.lands(large, repo)
    # a part that fails costs a part, and not its file
    assert hub.server.bytes_up("lfs_part") <= shard_bytes(large) + 700_000 + 10_000 + 1_000_000


@pytest.mark.compat
def test_multipart_upload_survives_urls_that_expire(hub: PushHub, repo: str, large: Path) -> None:
    hub.fail("PUT lfs_part.*partNumber=2", "expired")
    hub.lands(large, repo)


@pytest.mark.compat
def test_push_that_is_killed_makes_no_commit_and_the_next_sends_what_is_missing(
    hub: PushHub, repo: str, large: Path
) -> None:
    shards = sorted(large.glob("*.safetensors"))
    assert len(shards) == 5
    # The second part of one shard is held; the other four shards arrive.
    sha256 = hashlib.sha256(shards[2].read_bytes()).hexdigest()
    arrived = hub.fail("POST lfs_verify", "slow", skip=3, after_bytes=1)
    with hub.held(f"{sha256}.*partNumber=2", 5_000, large, repo) as task:
        assert arrived.reached.wait(60)
        task.kill()
    assert hub.files(repo) == set()
    assert len(hub.view(repo).commits()) == 1
    hub.lands(large, repo)
    assert {one.path.split("?")[0].rpartition("/")[2] for one in hub.server.log if one.kind == "lfs_part"} == {sha256}
    assert hub.server.bytes_up("lfs_part") == shards[2].stat().st_size


def test_push_that_is_killed_at_the_commit_has_made_it_or_not(hub: PushHub, repo: str, folder: Path) -> None:
    with hub.held(COMMIT, 1_000, folder, repo) as task:
        task.kill()
        assert len(hub.view(repo).commits()) == 1
    hub.lands(folder, repo)
    assert hub.server.bytes_up("lfs_put") == 0


@pytest.mark.parametrize("at", [5_000, -1])
def test_shard_with_a_flipped_bit_is_not_committed(
    hub: PushHub, repo: str, folder: Path, tmp_path: Path, at: int
) -> None:
    hub.push(saved(tmp_path / "old", 2, FOUR), repo)
    flip(folder / SHARD, at)
    outcome = hub.refused("push", folder, repo)
    assert outcome.error in ("IntegrityError", "DamagedCheckpointError", "ShardMismatchError"), outcome
    assert SHARD in outcome.message
    assert len(hub.view(repo).commits()) == 2
    assert differences(hub, repo, contents(tmp_path / "old")) == {}
    assert outcome.waits == []  # it is not tried again: it would not get better


@pytest.mark.compat
def test_shard_with_a_flipped_bit_far_inside_is_found_while_it_is_sent(hub: PushHub, repo: str, large: Path) -> None:
    shard = sorted(large.glob("model-*"))[2]
    flip(shard, 500_000)  # no sample of the structure check holds it
    outcome = hub.refused("push", large, repo)
    assert outcome.error == "IntegrityError" and shard.name in outcome.message
    assert hub.files(repo) == set()
    assert outcome.waits == []


@pytest.mark.compat
def test_storage_that_refuses_for_good_is_an_error_and_no_commit(hub: PushHub, repo: str, folder: Path) -> None:
    hub.fail(UPLOAD, "status", status=403, times=1000)
    assert "403" in hub.refused("push", folder, repo).message
    assert len(hub.view(repo).commits()) == 1
    hub.server.clear_faults()
    hub.fail("POST lfs_batch", "drop", times=1000)
    assert hub.refused("push", folder, repo).error == "HubConnectionError"
    assert len(hub.view(repo).commits()) == 1


@pytest.mark.parametrize("limit", [FOUR, MANY])
def test_directory_that_is_saved_over_during_the_push_is_not_committed(
    hub: PushHub, repo: str, folder: Path, limit: str
) -> None:
    with hub.held("POST preupload", 100, folder, repo) as task:
        saved(folder, 2, limit)
    outcome = task.outcome()
    assert outcome.error is not None
    assert hub.files(repo) == set()
    assert outcome.is_ours and "Nothing was committed" in outcome.message, outcome.trace
    hub.lands(folder, repo)


@pytest.mark.compat
@pytest.mark.parametrize(("grown", "error"), [(1, None), (-1, "IntegrityError")])
def test_shard_that_grows_or_shrinks_during_the_push_is_not_committed(
    hub: PushHub, repo: str, folder: Path, grown: int, error: str | None
) -> None:
    with hub.held("POST preupload", 100, folder, repo) as task:
        os.truncate(folder / SHARD, (folder / SHARD).stat().st_size + grown)
    outcome = task.outcome()
    # What was added after the bytes that were announced is not sent; what is missing is noticed.
    assert outcome.error == error, outcome.trace


def test_file_that_vanishes_before_it_is_hashed_is_named(hub: PushHub, repo: str, folder: Path) -> None:
    (folder / "notes.txt").write_text("n")
    with hub.held("POST create_repo", 10, folder, repo) as task:
        (folder / "notes.txt").unlink()
    outcome = task.outcome()
    assert outcome.error == "IntegrityError" and "'notes.txt' was not pushed: it was removed" in outcome.message
    assert hub.files(repo) == set()


def statuses(hub: PushHub) -> list[int]:
    return [request.status for request in hub.server.log if request.kind == "commit"]


def race(hub: PushHub, repo: str, files: dict[str, bytes | None], match: str = COMMIT, skip: int = 0) -> None:
    """Let somebody else commit just before the next commit, or another request."""
    hub.fail(match, "race", skip=skip, action=lambda: hub.view(repo).commit(files, "theirs"))


@pytest.mark.parametrize(("ours", "theirs"), [(FOUR, FOUR), (FOUR, SINGLE), (SINGLE, MANY)])
def test_push_that_meets_other_weights_is_refused_and_theirs_stay_whole(
    hub: PushHub, repo: str, tmp_path: Path, ours: str, theirs: str
) -> None:
    hub.push(saved(tmp_path / "old", 1, FOUR), repo)
    new = contents(saved(tmp_path / "theirs", 2, theirs))
    gone = dict.fromkeys(hub.files(repo) - new.keys())
    race(hub, repo, {**new, **gone})
    folder = saved(tmp_path / "ours", 3, ours)
    hub.server.clear_log()
    outcome = hub.refused("push", folder, repo)
    assert (outcome.error, statuses(hub)) == ("RemoteChangedError", [412])
    assert "Another push to" in outcome.message and "push again" in outcome.message
    assert differences(hub, repo, new) == {}
    assert [commit.title for commit in hub.view(repo).commits()] == ["theirs", "Upload checkpoint", "initial commit"]
    # as the message says: pushed again, ours replace theirs
    hub.lands(folder, repo)


@pytest.mark.parametrize("path", ["config.json", "model.safetensors.index.json", "pytorch_model.bin"])
def test_push_that_meets_a_config_or_an_index_alone_is_refused(
    hub: PushHub, repo: str, single: Path, path: str
) -> None:
    hub.server.create_repo(repo)
    race(hub, repo, {path: b"{}"})
    outcome = hub.refused("push", single, repo)
    assert outcome.error == "RemoteChangedError" and f"'{path}'" in outcome.message
    assert len(hub.view(repo).commits()) == 2


@pytest.mark.compat
@pytest.mark.parametrize("task", ["push", "push_model"])
def test_push_that_meets_a_readme_and_a_variant_goes_on_top_and_sends_nothing_twice(
    hub: PushHub, repo: str, folder: Path, tmp_path: Path, task: str
) -> None:
    fp16 = {n: raw for n, raw in contents(saved(tmp_path / "fp16", 2, FOUR, variant="fp16")).items() if "fp16" in n}
    theirs = {"README.md": b"# Theirs\n", **fp16}
    race(hub, repo, dict(theirs))
    hub.done(task, folder if task == "push" else 1, repo, **({} if task == "push" else {"max_shard_size": FOUR}))
    assert statuses(hub) == [412, 200]
    assert differences(hub, repo, contents(folder) | theirs) == {}
    assert hub.kinds()["lfs_put"] == 4
    ours, first, _ = hub.view(repo).commits()
    assert ours.parents == (first.oid,)


def test_push_that_meets_its_own_bytes_is_done(hub: PushHub, repo: str, folder: Path) -> None:
    race(hub, repo, dict(contents(folder)))
    assert hub.done("push", folder, repo).result["is_new"] is False
    assert len(hub.view(repo).commits()) == 2


@pytest.mark.compat
def test_push_that_always_meets_others_gives_up_after_five_times(hub: PushHub, repo: str, single: Path) -> None:
    numbers = iter(range(100))
    hub.fail(COMMIT, "race", times=100, action=lambda: hub.view(repo).commit({"README.md": b"%d" % next(numbers)}, ""))
    outcome = hub.refused("push", single, repo)
    assert (outcome.error, statuses(hub)) == ("RemoteChangedError", [412] * 5)
    assert "Other pushes to" in outcome.message
    assert hub.files(repo) == {"README.md"}


@pytest.mark.compat
def test_two_pushes_at_once_never_mix(hub: PushHub, repo: str, folder: Path, tmp_path: Path) -> None:
    folders = [folder, saved(tmp_path / "second", 2, FOUR)]
    for name in (f"{repo}-{number}" for number in range(5)):
        tasks = [hub.start("push", one, name) for one in folders]
        outcomes = [task.outcome() for task in tasks]
        landed = [outcome.error is None for outcome in outcomes]
        assert any(landed)
        for outcome in outcomes:
            assert outcome.error in (None, "RemoteChangedError"), outcome.trace
        # each commit is one of the two, whole
        for commit in hub.view(name).commits()[:-1]:
            assert {} in [differences(hub, name, contents(one), commit.oid) for one in folders]
        assert len(hub.view(name).commits()) == 1 + sum(landed)


def test_two_equal_pushes_at_once_both_succeed(hub: PushHub, repo: str, folder: Path) -> None:
    for name in (f"{repo}-{number}" for number in range(3)):
        tasks = [hub.start("push", folder, name) for _ in range(2)]
        assert [task.outcome().error for task in tasks] == [None, None]
        assert len(hub.view(name).commits()) == 2


@pytest.mark.compat
def test_lost_answer_to_a_commit_is_recognised_as_landed(hub: PushHub, repo: str, folder: Path, tmp_path: Path) -> None:
    hub.push(saved(tmp_path / "old", 2, MANY), repo)  # so that the next deletes files, too
    hub.fail(COMMIT, "lost_answer")
    done = hub.lands(folder, repo).result
    assert (done["commit"], done["is_new"]) == (hub.view(repo).branches["main"], True)
    assert hub.kinds()["commit"] == 1
    assert len(hub.view(repo).commits()) == 3


def test_lost_answer_and_a_commit_of_somebody_on_top_is_recognised(hub: PushHub, repo: str, folder: Path) -> None:
    hub.server.create_repo(repo)
    hub.fail(COMMIT, "lost_answer")
    race(hub, repo, {"README.md": b"# Theirs"}, "GET info", skip=1)
    hub.lands(folder, repo, {"README.md": b"# Theirs"})
    assert [commit.title for commit in hub.view(repo).commits()] == ["theirs", "Upload checkpoint", "initial commit"]


@pytest.mark.compat
def test_lost_answer_to_a_pull_request_opens_no_second_one(hub: PushHub, repo: str, folder: Path) -> None:
    hub.server.create_repo(repo)
    hub.fail(COMMIT, "lost_answer")
    done = hub.lands(folder, repo, create_pr=True).result
    assert list(hub.view(repo).pull_requests) == [1]
    assert done["pr_url"].endswith(f"/{repo}/discussions/1")
    assert done["commit"] == hub.view(repo).pull_requests[1]
    assert hub.files(repo) == set()


@pytest.mark.compat
def test_server_error_at_a_commit_that_lands_all_the_same_is_recognised(hub: PushHub, repo: str, folder: Path) -> None:
    hub.server.create_repo(repo)
    hub.fail(COMMIT, "status", status=504)
    race(hub, repo, dict(contents(folder)), "GET info", skip=1)
    done = hub.push(folder, repo).result
    assert (statuses(hub), len(hub.view(repo).commits())) == ([504], 2)
    assert done["commit"] == hub.view(repo).branches["main"]


@pytest.mark.compat
def test_server_error_that_stays_is_an_error_and_no_commit(hub: PushHub, repo: str, folder: Path) -> None:
    hub.fail(COMMIT, "status", status=503, times=100)
    outcome = hub.refused("push", folder, repo)
    assert outcome.error == "HubConnectionError" and "503" in outcome.message
    assert (statuses(hub), len(hub.view(repo).commits())) == ([503] * 5, 1)


@pytest.mark.compat
def test_old_weights_load_while_a_push_is_refused(hub: PushHub, repo: str, tmp_path: Path) -> None:
    hub.push(saved(tmp_path / "old", 1, FOUR), repo)
    hub.fail(COMMIT, "status", status=400)
    assert hub.refused("push", saved(tmp_path / "new", 2, MANY), repo).error == "HubError"
    assert hub.loads(repo) == digest_of_seed(1)


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
    hub.lands(many(1, 260), repo, open_files=360)  # the check before a push holds all shards open at once
    assert hub.kinds()["lfs_put"] == 260 + 1  # and the index, which is large enough for LFS
    commits = hub.view(repo).commits()[::-1]
    shards = [f"Upload checkpoint (shards, part {number} of 2)" for number in (1, 2)]
    assert [commit.title for commit in commits] == ["initial commit", *shards, "Upload checkpoint"]
    assert [commit.parents for commit in commits[1:]] == [(before.oid,) for before in commits[:-1]]
    assert [len(commit.files) - 1 for commit in commits] == [0, 256, 260, 262]  # and .gitattributes


@pytest.mark.compat
def test_no_commit_of_a_new_repo_is_a_mix(hub: PushHub, repo: str, many: Many) -> None:
    hub.lands(many(1), repo, commit_files=A_COMMIT)
    commits = hub.view(repo).commits()[::-1]
    assert [len(commit.files) - 1 for commit in commits] == [0, A_COMMIT, SHARDS, SHARDS + 2]  # and .gitattributes
    assert [seen(hub, repo, commit.oid) for commit in commits] == ["CheckpointNotFoundError"] * 3 + ["1.0"]


@pytest.mark.parametrize(
    ("before", "after", "count"),
    # of the same names: all in one commit, or main would be a mix
    [(1, SHARDS, 3), (SHARDS - 2, SHARDS, 3), (SHARDS, SHARDS, 1), (SHARDS, 1, 1)],
)
def test_no_commit_of_an_old_repo_is_a_mix(
    hub: PushHub, repo: str, many: Many, before: int, after: int, count: int
) -> None:
    put(hub, repo, many(1, before))
    old = len(hub.view(repo).commits())
    hub.lands(many(2, after), repo, commit_files=A_COMMIT)
    commits = hub.view(repo).commits()[::-1][old - 1 :]
    assert len(commits) == 1 + count
    assert [seen(hub, repo, commit.oid) for commit in commits] == ["1.0"] * count + ["2.0"]


def test_push_that_dies_between_its_commits_is_repaired_by_the_next(hub: PushHub, repo: str, many: Many) -> None:
    put(hub, repo, many(1, SHARDS - 2))
    with hub.held(COMMIT, 500, many(2), repo, skip=1, commit_files=A_COMMIT) as task:
        task.kill()
    head = hub.view(repo).branches["main"]
    assert len(hub.files(repo)) == SHARDS - 2 + 2 + A_COMMIT
    assert seen(hub, repo, head) == "1.0"
    hub.lands(many(3, SHARDS - 3), repo, commit_files=A_COMMIT)
    assert seen(hub, repo, hub.view(repo).branches["main"]) == "3.0"


def test_many_shards_that_meet_a_readme_go_on_top(hub: PushHub, repo: str, many: Many) -> None:
    hub.server.create_repo(repo)
    race(hub, repo, {"README.md": b"# Theirs"}, skip=1)
    hub.lands(many(2), repo, {"README.md": b"# Theirs"}, commit_files=A_COMMIT)
    assert hub.kinds()["lfs_put"] == SHARDS  # none is sent twice


def test_many_shards_as_a_pull_request_open_one(hub: PushHub, repo: str, many: Many) -> None:
    done = hub.lands(many(2), repo, create_pr=True, commit_files=A_COMMIT).result
    assert list(hub.view(repo).pull_requests) == [1]
    assert hub.files(repo) == set()
    assert done["pr_url"].endswith("/discussions/1") and done["commit"] == hub.view(repo).pull_requests[1]
