"""What a push can be told: where to, as whom, how it is called; and what is said when that does not work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.hub.models import contents, digest_of_seed, saved
from tests.hub.push.push_hub import PushHub, differences
from tests.hub.server_fixture import new_repo_id
from tests.hubserver.hub_server import Commit, Fault

pytestmark = pytest.mark.compat

SINGLE, FOUR = "10MB", "20KB"


def test_branch_is_made_where_it_is_missing_and_main_stays(hub: PushHub, repo: str, tmp_path: Path) -> None:
    first, second = saved(tmp_path / "first", 1, FOUR), saved(tmp_path / "second", 2, SINGLE)
    hub.push(first, repo)
    main = hub.view(repo).branches["main"]
    hub.push(second, repo, revision="dev/next")
    assert hub.view(repo).branches["main"] == main
    assert differences(hub, repo, contents(second), "dev/next") == {}
    assert hub.view(repo).commits("dev/next")[0].parents == (main,)
    assert hub.kinds()["branch"] == 1
    hub.push(first, repo, revision="dev/next")
    assert hub.kinds()["branch"] == 0
    assert differences(hub, repo, contents(first), "dev/next") == {}
    assert hub.loads(repo, revision="dev/next") == digest_of_seed(1)


@pytest.mark.parametrize("kind", ["tag", "commit"])
def test_tag_or_commit_as_revision_is_an_error_that_says_so(hub: PushHub, repo: str, tmp_path: Path, kind: str) -> None:
    folder = saved(tmp_path / "save", 1, FOUR)
    view = hub.server.create_repo(repo)
    view.commit({"README.md": b"# Mine"}, "readme")
    view._repo.set_ref("tags", "v1.0", view.branches["main"])
    outcome = hub.refused("push", folder, repo, revision="v1.0" if kind == "tag" else view.branches["main"])
    assert outcome.error == "HubError" and f"is a {kind}" in outcome.message and "Give a branch" in outcome.message
    assert hub.server.bytes_up("lfs_put") == 0, "it is said before anything is sent"
    assert len(view.commits()) == 2 and set(view.branches) == {"main"}


@dataclass(frozen=True)
class PullRequest:
    """A pull request that a push opened and another one updated, and what was on the Hub after each."""

    repo: str
    opened: dict[str, Any]
    main: set[str]
    """Files of the main branch."""
    first: Commit
    wrong: list[dict[str, str]]
    """After each push: file -> how it differs from the save and the README."""
    pushed: dict[str, Any]


@pytest.fixture(scope="module")
def pull_request(module_hub: PushHub, tmp_path_factory: pytest.TempPathFactory) -> PullRequest:
    """A pull request with a commit of seed 1 and one of seed 2."""
    hub, root, repo = module_hub, tmp_path_factory.mktemp("pull_request"), new_repo_id()
    first = saved(root / "first", 1, FOUR)
    second = saved(root / "second", 2, SINGLE)
    readme = {"README.md": b"# Mine"}
    hub.server.create_repo(repo).commit(dict(readme), "readme")
    opened = hub.push(first, repo, create_pr=True, commit_message="Please", commit_description="Why").result
    main = hub.files(repo)
    wrong = [differences(hub, repo, contents(first) | readme, "refs/pr/1")]
    commit = hub.view(repo).commits("refs/pr/1")[0]
    pushed = hub.push(second, repo, revision="refs/pr/1").result
    wrong.append(differences(hub, repo, contents(second) | readme, "refs/pr/1"))
    return PullRequest(repo, opened, main, commit, wrong, pushed)


def test_pull_request_is_opened_and_main_stays(pull_request: PullRequest) -> None:
    assert pull_request.opened["pr_url"].endswith(f"/{pull_request.repo}/discussions/1")
    assert pull_request.main == {"README.md"}
    assert pull_request.wrong[0] == {}
    assert (pull_request.first.title, pull_request.first.description) == ("Please", "Why")


def test_pull_request_is_pushed_to(hub: PushHub, pull_request: PullRequest) -> None:
    assert pull_request.wrong[1] == {}
    assert pull_request.pushed["commit"] == hub.view(pull_request.repo).pull_requests[1]
    assert hub.loads(pull_request.repo, revision="refs/pr/1") == digest_of_seed(2)


def test_model_is_pushed_as_the_next_pull_request(hub: PushHub, pull_request: PullRequest) -> None:
    model = hub.call("push_model", 3, pull_request.repo, create_pr=True).result
    assert (model["pr_num"], model["pr_url"].rpartition("/")[2]) == (2, "2")


def test_pull_request_that_is_not_there_and_one_on_a_branch_are_refused(
    hub: PushHub, repo: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "save", 1, SINGLE)
    hub.push(folder, repo)
    outcome = hub.refused("push", folder, repo, revision="refs/pr/7")
    assert outcome.error == "HubNotFoundError" and "create_pr=True" in outcome.message
    outcome = hub.refused("push", folder, repo, revision="dev", create_pr=True)
    assert outcome.error == "InvalidArgumentError"


def test_variants_live_beside_each_other(hub: PushHub, repo: str, tmp_path: Path) -> None:
    plain, fp16 = saved(tmp_path / "plain", 1, FOUR), saved(tmp_path / "fp16", 2, FOUR, variant="fp16")
    hub.push(plain, repo)
    hub.push(fp16, repo)
    assert (hub.loads(repo), hub.loads(repo, variant="fp16")) == (digest_of_seed(1), digest_of_seed(2))
    hub.call("push_model", 3, repo, variant="fp16", max_shard_size=SINGLE)
    assert (hub.loads(repo), hub.loads(repo, variant="fp16")) == (digest_of_seed(1), digest_of_seed(3))
    assert {name for name in hub.files(repo) if "fp16" in name} == {"model.fp16.safetensors"}


def test_folder_of_a_repo_is_pushed_to_alone(hub: PushHub, repo: str, tmp_path: Path) -> None:
    plain, sub = saved(tmp_path / "plain", 1, FOUR), saved(tmp_path / "sub", 2, FOUR)
    hub.push(plain, repo)
    hub.push(sub, repo, path_in_repo="a/b c/")
    hub.push(saved(tmp_path / "next", 3, SINGLE), repo, path_in_repo="./a/b c")
    expected = {f"a/b c/{name}": raw for name, raw in contents(tmp_path / "next").items()}
    assert differences(hub, repo, contents(plain) | expected) == {}
    assert hub.loads(repo) == digest_of_seed(1)
    assert hub.loads(repo, subfolder="a/b c") == digest_of_seed(3)
    for outside in ("..", "a/../../b"):
        assert hub.refused("push", sub, repo, path_in_repo=outside).error == "InvalidArgumentError"
    hub.call("push_model", 4, repo, path_in_repo="model")
    assert hub.loads(repo, subfolder="model") == digest_of_seed(4)
    assert hub.loads(repo) == digest_of_seed(1)


def test_repo_is_made_private_where_it_is_asked_for(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1)
    hub.push(folder, f"{repo}-private", private=True)
    hub.push(folder, f"{repo}-public")
    assert (hub.view(f"{repo}-private").private, hub.view(f"{repo}-public").private) == (True, False)
    assert hub.loads(f"{repo}-private") == digest_of_seed(1)
    hub.call("push_model", 2, f"{repo}-private")
    assert hub.view(f"{repo}-private").private


def test_repo_without_namespace_is_the_users_own(hub: PushHub, repo: str, tmp_path: Path) -> None:
    name = repo.rpartition("/")[2]
    done = hub.push(saved(tmp_path / "save", 1), name).result
    assert hub.files(f"alice/{name}") == {"config.json", "model.safetensors"}
    assert f"/alice/{name}/commit/" in done["url"]


def test_message_and_description_are_those_of_the_commit(hub: PushHub, repo: str, tmp_path: Path) -> None:
    words = {"commit_message": "Ünser Modell\nzweite Zeile", "commit_description": "a\n\nb"}
    hub.push(saved(tmp_path / "save", 1), repo, **words)
    commit = hub.view(repo).commits()[0]
    assert (commit.title, commit.description) == (words["commit_message"], words["commit_description"])
    hub.call("push_model", 2, repo)
    assert hub.view(repo).commits()[0].title == "Upload model"


WRONG = "hf_wrong-token-x9Yz"


def test_wrong_token_is_named_with_where_it_came_from(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1)
    token_file = hub.home / "token"
    said = [hub.refused("push", folder, repo, token=WRONG)]
    said += [hub.refused("push", folder, repo, environment={"HF_TOKEN": WRONG})]
    token_file.write_text(WRONG)
    try:
        said += [hub.refused("push", folder, repo, environment={"HF_TOKEN": None})]
    finally:
        token_file.unlink()
    said += [hub.refused("push", folder, repo, environment={"HF_TOKEN": None})]
    said += [hub.refused("push", folder, repo, token=False)]
    origins = ("that was passed", "HF_TOKEN", str(token_file), "none is saved", "token=False was passed")
    for outcome, origin in zip(said, origins):
        assert outcome.error == "HubAccessError"
        assert origin in outcome.message and "hf auth login" in outcome.message
        assert WRONG not in outcome.message + outcome.trace + "".join(outcome.log)
        assert ("x9Yz" in outcome.message) == (origin in origins[:3])
        assert outcome.waits == []
    assert set(hub.kinds()) == {"create_repo", "info"}  # huggingface_hub looks whether the repo is there all the same


def test_token_without_the_right_to_write_is_an_error_that_says_so(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1)
    hub.server.create_repo(repo)
    for token in ("hf_read", "hf_member"):
        for name in (repo, f"{repo}-new"):
            outcome = hub.refused("push", folder, name, token=token)
            assert outcome.error == "HubAccessError"
            assert "right to write" in outcome.message and "write token" in outcome.message
    outcome = hub.refused("push", folder, "bob/model")
    assert outcome.error == "HubAccessError" and "'bob'" in outcome.message
    assert len(hub.view(repo).commits()) == 1


@pytest.mark.parametrize("name", ["a/b/c", "-x", "org/", "org/a..b", "", "org/mo del", "ftp://x/y"])
def test_name_that_no_repo_has_is_an_error_before_anything_is_asked(hub: PushHub, tmp_path: Path, name: str) -> None:
    expected = "InvalidArgumentError" if name else "InvalidPathError"
    assert hub.refused("push", saved(tmp_path / "save", 1), name).error == expected
    assert hub.server.count() == 0


def test_save_pretrained_pushes_what_it_saved_and_nothing_else(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 9, FOUR, variant="fp16")
    (folder / "secret.txt").write_text("not for the Hub")
    hub.call(
        "save_and_push", 1, folder, repo_id=repo, revision="dev", commit_message="Mine", commit_description="More",
        private=True, tags=["t"], max_shard_size=FOUR, token="hf_write",
    )  # fmt: skip
    assert hub.files(repo) == set()
    commit, _ = hub.view(repo).commits("dev")
    assert (commit.title, commit.description) == ("Mine", "More")
    plain = {name: raw for name, raw in contents(folder).items() if "fp16" not in name and name != "secret.txt"}
    assert differences(hub, repo, plain | {"README.md": hub.view(repo).read("README.md", "dev")}, "dev") == {}
    assert len(plain) == 4 + 2
    assert hub.view(repo).private
    assert hub.loads(repo, revision="dev") == digest_of_seed(1)


def test_save_pretrained_pushes_to_the_directorys_name(hub: PushHub, repo: str, tmp_path: Path) -> None:
    name = repo.rpartition("/")[2]
    hub.call("save_and_push", 1, tmp_path / name, variant="fp16", create_pr=True)
    assert hub.files(f"alice/{name}", "refs/pr/1") == {"README.md", "config.json", "model.fp16.safetensors"}
    assert hub.files(f"alice/{name}") == set()


def test_server_without_xet_costs_one_line_of_log(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1, FOUR)
    outcome = hub.push(folder, repo)
    assert len(outcome.log) == 1 and "Xet" in outcome.log[0]
    assert hub.kinds()["xet_token"] == 0
    outcome = hub.call("push_model", 2, repo, max_shard_size=FOUR)
    assert len(outcome.log) == 1 and "Xet" in outcome.log[0]


def test_server_is_asked_for_xet_where_that_is_wished(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1, FOUR)
    outcome = hub.push(folder, repo, environment={"HFSHARD_XET": "1"})
    assert hub.kinds()["xet_token"] == 1
    assert len(outcome.log) == 1
    assert differences(hub, repo, contents(folder)) == {}
    hub.server.fail(Fault(match="xet_token", kind="status", status=500, times=100))
    hub.push(saved(tmp_path / "next", 2, FOUR), repo, environment={"HFSHARD_XET": "1"})
    assert differences(hub, repo, contents(tmp_path / "next")) == {}
