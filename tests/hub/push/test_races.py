"""Pushes that meet others, and answers that are lost: one lands or both do, and no commit is a mix."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hub.models import contents, digest_of_seed, saved
from tests.hub.push.push_hub import PushHub, differences
from tests.hubserver.hub_server import Fault

SINGLE, FOUR, MANY = "10MB", "20KB", "9KB"
COMMIT = "POST commit"


def statuses(hub: PushHub) -> list[int]:
    return [request.status for request in hub.server.log if request.kind == "commit"]


def race(hub: PushHub, repo: str, files: dict[str, bytes | None], times: int = 1) -> None:
    """Let somebody else commit just before the next commits."""
    hub.server.fail(
        Fault(match=COMMIT, kind="race", times=times, action=lambda: hub.view(repo).commit(files, "theirs"))
    )


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
    assert "Somebody else pushed" in outcome.message and "push again" in outcome.message
    assert differences(hub, repo, new) == {}
    assert [commit.title for commit in hub.view(repo).commits()] == ["theirs", "Upload checkpoint", "initial commit"]
    # as the message says: pushed again, ours replace theirs
    hub.push(folder, repo)
    assert differences(hub, repo, contents(folder)) == {}


def test_push_that_meets_a_config_or_an_index_alone_is_refused(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "ours", 3, SINGLE)
    for number, path in enumerate(("config.json", "model.safetensors.index.json", "pytorch_model.bin")):
        hub.server.create_repo(f"{repo}-{number}")
        race(hub, f"{repo}-{number}", {path: b"{}"})
        outcome = hub.refused("push", folder, f"{repo}-{number}")
        assert outcome.error == "RemoteChangedError" and f"'{path}'" in outcome.message
        assert len(hub.view(f"{repo}-{number}").commits()) == 2


@pytest.mark.compat
@pytest.mark.parametrize("task", ["push", "push_model"])
def test_push_that_meets_a_readme_and_a_variant_goes_on_top_and_sends_nothing_twice(
    hub: PushHub, repo: str, tmp_path: Path, task: str
) -> None:
    folder = saved(tmp_path / "ours", 1, FOUR)
    fp16 = {n: raw for n, raw in contents(saved(tmp_path / "fp16", 2, FOUR, variant="fp16")).items() if "fp16" in n}
    theirs = {"README.md": b"# Theirs\n", **fp16}
    race(hub, repo, dict(theirs))
    if task == "push":
        hub.call("push", folder, repo)
    else:
        hub.call("push_model", 1, repo, max_shard_size=FOUR)
    assert statuses(hub) == [412, 200]
    assert differences(hub, repo, contents(folder) | theirs) == {}
    assert hub.kinds()["lfs_put"] == 4
    ours, first, _ = hub.view(repo).commits()
    assert ours.parents == (first.oid,)


def test_push_that_meets_its_own_bytes_is_done(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "ours", 1, FOUR)
    race(hub, repo, dict(contents(folder)))
    assert hub.call("push", folder, repo).result["is_new"] is False
    assert len(hub.view(repo).commits()) == 2


@pytest.mark.compat
def test_push_that_always_meets_others_gives_up_after_five_times(hub: PushHub, repo: str, tmp_path: Path) -> None:
    numbers = iter(range(100))

    def change() -> None:
        hub.view(repo).commit({"README.md": b"%d" % next(numbers)}, "theirs")

    hub.server.fail(Fault(match=COMMIT, kind="race", times=100, action=change))
    outcome = hub.refused("push", saved(tmp_path / "ours", 1), repo)
    assert (outcome.error, statuses(hub)) == ("RemoteChangedError", [412] * 5)
    assert "Others pushed" in outcome.message
    assert hub.files(repo) == {"README.md"}


@pytest.mark.compat
def test_two_pushes_at_once_never_mix(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folders = [saved(tmp_path / "first", 1, FOUR), saved(tmp_path / "second", 2, FOUR)]
    for number in range(5):
        name = f"{repo}-{number}"
        tasks = [hub.start("push", folder, name) for folder in folders]
        outcomes = [task.outcome() for task in tasks]
        landed = [outcome.error is None for outcome in outcomes]
        assert any(landed)
        for outcome in outcomes:
            assert outcome.error in (None, "RemoteChangedError"), outcome.trace
        # each commit is one of the two, whole
        for commit in hub.view(name).commits()[:-1]:
            problems = [differences(hub, name, contents(folder), commit.oid) for folder in folders]
            assert {} in problems
        assert len(hub.view(name).commits()) == 1 + sum(landed)


def test_two_equal_pushes_at_once_both_succeed(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "first", 1, FOUR)
    for number in range(3):
        tasks = [hub.start("push", folder, f"{repo}-{number}") for _ in range(2)]
        assert [task.outcome().error for task in tasks] == [None, None]
        assert len(hub.view(f"{repo}-{number}").commits()) == 2


@pytest.mark.compat
def test_lost_answer_to_a_commit_is_recognised_as_landed(hub: PushHub, repo: str, tmp_path: Path) -> None:
    hub.push(saved(tmp_path / "old", 1, MANY), repo)  # so that the next deletes files, too
    hub.server.fail(Fault(match=COMMIT, kind="lost_answer"))
    folder = saved(tmp_path / "new", 2, FOUR)
    done = hub.push(folder, repo).result
    assert (done["commit"], done["is_new"]) == (hub.view(repo).branches["main"], True)
    assert hub.kinds()["commit"] == 1
    assert len(hub.view(repo).commits()) == 3
    assert differences(hub, repo, contents(folder)) == {}


def test_lost_answer_and_a_commit_of_somebody_on_top_is_recognised(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "new", 2, FOUR)
    hub.server.create_repo(repo)
    hub.server.fail(Fault(match=COMMIT, kind="lost_answer"))
    theirs: dict[str, bytes | None] = {"README.md": b"# Theirs"}
    hub.server.fail(
        Fault(match="GET info", kind="race", skip=1, action=lambda: hub.view(repo).commit(theirs, "theirs"))
    )
    hub.push(folder, repo)
    assert [commit.title for commit in hub.view(repo).commits()] == ["theirs", "Upload checkpoint", "initial commit"]
    assert differences(hub, repo, contents(folder) | {"README.md": b"# Theirs"}) == {}


@pytest.mark.compat
def test_lost_answer_to_a_pull_request_opens_no_second_one(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "new", 2, FOUR)
    hub.server.create_repo(repo)
    hub.server.fail(Fault(match=COMMIT, kind="lost_answer"))
    done = hub.push(folder, repo, create_pr=True).result
    assert list(hub.view(repo).pull_requests) == [1]
    assert done["pr_url"].endswith(f"/{repo}/discussions/1")
    assert done["commit"] == hub.view(repo).pull_requests[1]
    assert differences(hub, repo, contents(folder), "refs/pr/1") == {}
    assert hub.files(repo) == set()


@pytest.mark.parametrize("status", [500, 503, 504])
def test_server_error_at_the_commit_is_tried_again(hub: PushHub, repo: str, tmp_path: Path, status: int) -> None:
    hub.server.fail(Fault(match=COMMIT, kind="status", status=status, times=3))
    folder = saved(tmp_path / "new", 2, FOUR)
    hub.push(folder, repo)
    assert statuses(hub) == [status] * 3 + [200]
    assert len(hub.view(repo).commits()) == 2
    assert differences(hub, repo, contents(folder)) == {}


@pytest.mark.compat
def test_server_error_at_a_commit_that_lands_all_the_same_is_recognised(
    hub: PushHub, repo: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "new", 2, FOUR)
    hub.server.create_repo(repo)
    files: dict[str, bytes | None] = dict(contents(folder))
    hub.server.fail(Fault(match=COMMIT, kind="status", status=504))
    hub.server.fail(
        Fault(match="GET info", kind="race", skip=1, action=lambda: hub.view(repo).commit(files, "landed late"))
    )
    done = hub.push(folder, repo).result
    assert (statuses(hub), len(hub.view(repo).commits())) == ([504], 2)
    assert done["commit"] == hub.view(repo).branches["main"]


@pytest.mark.compat
def test_server_error_that_stays_is_an_error_and_no_commit(hub: PushHub, repo: str, tmp_path: Path) -> None:
    hub.server.fail(Fault(match=COMMIT, kind="status", status=503, times=100))
    outcome = hub.refused("push", saved(tmp_path / "new", 2, FOUR), repo)
    assert outcome.error == "HubConnectionError" and "503" in outcome.message
    assert (statuses(hub), len(hub.view(repo).commits())) == ([503] * 5, 1)


@pytest.mark.compat
def test_old_weights_load_while_a_push_is_refused(hub: PushHub, repo: str, tmp_path: Path) -> None:
    hub.push(saved(tmp_path / "old", 1, FOUR), repo)
    hub.server.fail(Fault(match=COMMIT, kind="status", status=400))
    assert hub.refused("push", saved(tmp_path / "new", 2, MANY), repo).error == "HubError"
    assert hub.loads(repo) == digest_of_seed(1)
