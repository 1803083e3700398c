"""What a push can be told: where to, as whom, how it is called; what is said when that does not work."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers.utils import hub as transformers_hub

from tests.hub.models import contents, digest_of_seed, saved
from tests.hub.push.conftest import FOUR, SINGLE, PushHub, differences
from tests.hub.server_fixture import new_repo_id

pytestmark = pytest.mark.compat


def test_branch_is_made_where_it_is_missing_and_main_stays(
    hub: PushHub, repo: str, folder: Path, tmp_path: Path
) -> None:
    hub.push(folder, repo)
    main = hub.view(repo).branches["main"]
    hub.lands(saved(tmp_path / "second", 2, SINGLE), repo, revision="dev/next")
    assert hub.view(repo).branches["main"] == main
    assert hub.view(repo).commits("dev/next")[0].parents == (main,)
    assert hub.kinds()["branch"] == 1
    hub.lands(folder, repo, revision="dev/next")
    assert hub.kinds()["branch"] == 0
    assert hub.loads(repo, revision="dev/next") == digest_of_seed(1)


@pytest.mark.parametrize("kind", ["tag", "commit"])
def test_tag_or_commit_as_revision_is_an_error_that_says_so(hub: PushHub, repo: str, folder: Path, kind: str) -> None:
    view = hub.server.create_repo(repo)
    view.commit({"README.md": b"# Mine"}, "readme")
    view._repo.set_ref("tags", "v1.0", view.branches["main"])
    outcome = hub.refused("push", folder, repo, revision="v1.0" if kind == "tag" else view.branches["main"])
    assert outcome.error == "HubError" and f"is a {kind}" in outcome.message and "Pass a branch" in outcome.message
    assert hub.server.bytes_up("lfs_put") == 0, "it is said before anything is sent"
    assert len(view.commits()) == 2 and set(view.branches) == {"main"}


@pytest.fixture(scope="module")
def pull_request(module_hub: PushHub, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A pull request that a push of seed 1 opened and one of seed 2 updated, and what was on the Hub after each."""
    hub, root, repo = module_hub, tmp_path_factory.mktemp("pull_request"), new_repo_id()
    readme = {"README.md": b"# Mine"}
    hub.server.create_repo(repo).commit(dict(readme), "readme")
    words = {"commit_message": "Please", "commit_description": "Why"}
    opened = hub.lands(saved(root / "first", 1, FOUR), repo, readme, create_pr=True, **words).result
    main, first = hub.files(repo), hub.view(repo).commits("refs/pr/1")[0]
    pushed = hub.lands(saved(root / "second", 2, SINGLE), repo, readme, revision="refs/pr/1").result
    return SimpleNamespace(repo=repo, opened=opened, main=main, first=first, pushed=pushed)


def test_pull_request_is_opened_and_main_stays(pull_request: SimpleNamespace) -> None:
    assert pull_request.opened["pr_url"].endswith(f"/{pull_request.repo}/discussions/1")
    assert pull_request.main == {"README.md"}
    assert (pull_request.first.title, pull_request.first.description) == ("Please", "Why")


def test_pull_request_is_pushed_to(hub: PushHub, pull_request: SimpleNamespace) -> None:
    assert pull_request.pushed["commit"] == hub.view(pull_request.repo).pull_requests[1]
    assert hub.loads(pull_request.repo, revision="refs/pr/1") == digest_of_seed(2)


def test_model_is_pushed_as_the_next_pull_request(hub: PushHub, pull_request: SimpleNamespace) -> None:
    model = hub.done("push_model", 3, pull_request.repo, create_pr=True).result
    assert (model["pr_num"], model["pr_url"].rpartition("/")[2]) == (2, "2")


def test_pull_request_that_is_not_there_and_one_on_a_branch_are_refused(hub: PushHub, repo: str, single: Path) -> None:
    hub.push(single, repo)
    outcome = hub.refused("push", single, repo, revision="refs/pr/7")
    assert outcome.error == "HubNotFoundError" and "create_pr=True" in outcome.message
    outcome = hub.refused("push", single, repo, revision="dev", create_pr=True)
    assert outcome.error == "InvalidArgumentError"


def test_variants_live_beside_each_other(hub: PushHub, repo: str, folder: Path, tmp_path: Path) -> None:
    hub.push(folder, repo)
    hub.push(saved(tmp_path / "fp16", 2, FOUR, variant="fp16"), repo)
    assert (hub.loads(repo), hub.loads(repo, variant="fp16")) == (digest_of_seed(1), digest_of_seed(2))
    hub.done("push_model", 3, repo, variant="fp16", max_shard_size=SINGLE)
    assert (hub.loads(repo), hub.loads(repo, variant="fp16")) == (digest_of_seed(1), digest_of_seed(3))
    assert {name for name in hub.files(repo) if "fp16" in name} == {"model.fp16.safetensors"}


def test_folder_of_a_repo_is_pushed_to_alone(hub: PushHub, repo: str, folder: Path, tmp_path: Path) -> None:
    sub, last = saved(tmp_path / "sub", 2, FOUR), saved(tmp_path / "next", 3, SINGLE)
    hub.push(folder, repo)
    hub.push(sub, repo, path_in_repo="a/b c/")
    hub.push(last, repo, path_in_repo="./a/b c")
    expected = {f"a/b c/{name}": raw for name, raw in contents(last).items()}
    assert differences(hub, repo, contents(folder) | expected) == {}
    assert hub.loads(repo) == digest_of_seed(1)
    assert hub.loads(repo, subfolder="a/b c") == digest_of_seed(3)
    for outside in ("..", "a/../../b"):
        assert hub.refused("push", sub, repo, path_in_repo=outside).error == "InvalidArgumentError"
    hub.done("push_model", 4, repo, path_in_repo="model")
    assert hub.loads(repo, subfolder="model") == digest_of_seed(4)
    assert hub.loads(repo) == digest_of_seed(1)


def test_repo_is_made_private_where_it_is_asked_for(hub: PushHub, repo: str, single: Path) -> None:
    hub.push(single, f"{repo}-private", private=True)
    hub.push(single, f"{repo}-public")
    assert (hub.view(f"{repo}-private").private, hub.view(f"{repo}-public").private) == (True, False)
    assert hub.loads(f"{repo}-private") == digest_of_seed(1)
    hub.done("push_model", 2, f"{repo}-private")
    assert hub.view(f"{repo}-private").private


def test_repo_without_namespace_is_the_users_own(hub: PushHub, repo: str, single: Path) -> None:
    name = repo.rpartition("/")[2]
    done = hub.push(single, name).result
    assert hub.files(f"alice/{name}") == {"config.json", "model.safetensors"}
    assert f"/alice/{name}/commit/" in done["url"]


def test_message_and_description_are_those_of_the_commit(hub: PushHub, repo: str, tmp_path: Path) -> None:
    words = {"commit_message": "Ünser Modell\nzweite Zeile", "commit_description": "a\n\nb"}
    hub.push(saved(tmp_path / "save", 1), repo, **words)
    commit = hub.view(repo).commits()[0]
    assert (commit.title, commit.description) == (words["commit_message"], words["commit_description"])
    hub.done("push_model", 2, repo)
    assert hub.view(repo).commits()[0].title == "Upload model"


WRONG = "hf_wrong-token-x9Yz"


def test_wrong_token_is_named_with_where_it_came_from(hub: PushHub, repo: str, single: Path) -> None:
    token_file = hub.home / "token"
    said = [hub.refused("push", single, repo, token=WRONG)]
    said += [hub.refused("push", single, repo, environment={"HF_TOKEN": WRONG})]
    token_file.write_text(WRONG)
    try:
        said += [hub.refused("push", single, repo, environment={"HF_TOKEN": None})]
    finally:
        token_file.unlink()
    said += [hub.refused("push", single, repo, environment={"HF_TOKEN": None})]
    said += [hub.refused("push", single, repo, token=False)]
    origins = ("that was passed", "HF_TOKEN", str(token_file), "none is saved", "token=False was passed")
    for outcome, origin in zip(said, origins, strict=True):
        assert outcome.error == "HubAccessError"
        assert origin in outcome.message and "hf auth login" in outcome.message
        assert WRONG not in outcome.message + outcome.trace + "".join(outcome.log)
        assert ("x9Yz" in outcome.message) == (origin in origins[:3])
        assert outcome.waits == []
    assert set(hub.kinds()) == {"create_repo", "info"}  # huggingface_hub looks whether the repo is there all the same


def test_token_without_the_right_to_write_is_an_error_that_says_so(hub: PushHub, repo: str, single: Path) -> None:
    hub.server.create_repo(repo)
    for token in ("hf_read", "hf_member"):
        for name in (repo, f"{repo}-new"):
            outcome = hub.refused("push", single, name, token=token)
            assert outcome.error == "HubAccessError"
            assert "write access" in outcome.message and "write token" in outcome.message
    outcome = hub.refused("push", single, "bob/model")
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
    words = {"commit_message": "Mine", "commit_description": "More"}
    options = {"revision": "dev", "private": True, "tags": ["t"], "max_shard_size": FOUR, "token": "hf_write"}
    hub.done("save_and_push", 1, folder, repo_id=repo, **words, **options)
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
    hub.done("save_and_push", 1, tmp_path / name, variant="fp16", create_pr=True)
    assert hub.files(f"alice/{name}", "refs/pr/1") == {"README.md", "config.json", "model.fp16.safetensors"}
    assert hub.files(f"alice/{name}") == set()


def test_server_without_xet_costs_one_line_of_log(hub: PushHub, repo: str, folder: Path) -> None:
    outcome = hub.push(folder, repo)
    assert len(outcome.log) == 1 and "Xet" in outcome.log[0]
    assert hub.kinds()["xet_token"] == 0
    outcome = hub.done("push_model", 2, repo, max_shard_size=FOUR)
    assert len(outcome.log) == 1 and "Xet" in outcome.log[0]


def test_server_is_asked_for_xet_where_that_is_wished(hub: PushHub, repo: str, folder: Path, tmp_path: Path) -> None:
    outcome = hub.lands(folder, repo, environment={"HFSHARD_XET": "1"})
    assert hub.kinds()["xet_token"] == 1
    assert len(outcome.log) == 1
    hub.fail("xet_token", "status", status=500, times=100)
    hub.lands(saved(tmp_path / "next", 2, FOUR), repo, environment={"HFSHARD_XET": "1"})


def test_a_push_makes_stocks_commit(hub: PushHub, repo: str) -> None:
    other = f"{repo}-stock"
    options = {"max_shard_size": "9KB", "tags": ["one"], "private": True}
    hub.done("push_stock", 1, other, **options)
    hub.done("push_installed", 1, repo, **options)

    assert hub.files(repo) == hub.files(other)
    weights = {name for name in hub.files(repo) if name.startswith("model")}
    assert len(weights) > 5
    for name in hub.files(repo) - weights:
        assert hub.view(repo).read(name) == hub.view(other).read(name)
    assert [one.title for one in hub.view(repo).commits()] == [one.title for one in hub.view(other).commits()]
    assert hub.view(repo).private
    assert hub.loads(repo) == digest_of_seed(1)
    assert hub.done("load_installed", other, hub.root / f"{other}-cache").result == digest_of_seed(1)

    hub.done("push_installed", 2, repo)
    assert hub.files(repo) == {"README.md", "config.json", "model.safetensors"}


@pytest.mark.skipif(not hasattr(transformers_hub, "resolve_revision"), reason="this transformers resolves no revision")
def test_a_revision_that_was_resolved_stays_what_it_was(hub: PushHub, repo: str) -> None:
    hub.done("push_installed", 1, repo)

    loaded = hub.done("load_after_push", 2, repo, hub.root / f"{repo}-cache").result

    assert loaded == digest_of_seed(1) != hub.loads(repo)


def test_a_save_that_pushes_makes_stocks_commit(hub: PushHub, repo: str, tmp_path: Path) -> None:
    hub.done("push_installed", 1, repo, tmp_path / "out", commit_message="mine", create_pr=False)
    hub.done("push_installed", 1, f"{repo}-of-arguments", tmp_path / "out", private=True, space_sdk=None)

    for one in (repo, f"{repo}-of-arguments"):
        assert hub.files(one) == {"README.md", "config.json", "model.safetensors"}
        assert hub.loads(one) == digest_of_seed(1)
    assert hub.view(repo).commits()[0].title == "mine"
    assert hub.view(f"{repo}-of-arguments").private
