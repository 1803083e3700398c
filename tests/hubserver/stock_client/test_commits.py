"""Stock huggingface_hub makes commits, branches, tags and pull requests on the Hub server of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.hubserver.hub_server import HubServer
from tests.hubserver.stock_client.scripts import SERVER, files_of, kinds, run

pytestmark = pytest.mark.compat

COMMIT = """
api = HfApi()
api.create_repo("org/model")
weights = home / "w.safetensors"
weights.write_bytes(b"w" * 1000)
def commit(message, *operations, **more):
    return api.create_commit("org/model", operations, commit_message=message, **more)
one = commit("one", CommitOperationAdd("a/w.safetensors", weights), CommitOperationAdd("b.txt", b"b"))
two = commit("two", CommitOperationDelete("b.txt"), CommitOperationAdd("c.txt", b"c"), parent_commit=one.oid)
errors = {}
def refused(name, function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        errors[name] = [type(error).__name__, error.response.status_code, error.server_message]
refused("stale", commit, "stale", CommitOperationAdd("d.txt", b"d"), parent_commit=one.oid)
refused("missing", commit, "missing", CommitOperationDelete("nothing.txt"))
refused("no branch", commit, "no branch", CommitOperationAdd("d.txt", b"d"), revision="nowhere")
three = commit("three", CommitOperationCopy("a/w.safetensors", "copy.safetensors"))
four = commit("four", CommitOperationDelete("a/"), commit_description="folder")
api.create_branch("org/model", branch="dev/x", revision=one.oid)
refused("branch", api.create_branch, "org/model", branch="dev/x")
api.create_branch("org/model", branch="dev/x", exist_ok=True)
commit("on dev", CommitOperationAdd("dev.txt", b"dev"), revision="dev/x")
api.create_tag("org/model", tag="v1", revision=one.oid)
api.create_tag("org/model", tag="v2"); api.delete_tag("org/model", tag="v2")
api.create_branch("org/model", branch="gone"); api.delete_branch("org/model", branch="gone")
pull = commit("pull", CommitOperationAdd("pr.txt", b"pr"), create_pr=True)
commit("more", CommitOperationAdd("pr2.txt", b"pr2"), revision=pull.pr_revision)
opened = api.create_pull_request("org/model", title="by hand")
refs = api.list_repo_refs("org/model", include_pull_requests=True)
path = hf_hub_download("org/model", "pr2.txt", revision="refs/pr/1")
result = {
    "errors": errors, "oids": [one.oid, two.oid, three.oid, four.oid], "pr": [pull.pr_num, opened.num],
    "refs": [[r.name for r in some] for some in (refs.branches, refs.tags, refs.pull_requests)],
    "history": [c.title for c in api.list_repo_commits("org/model")],
    "tag": sorted(api.list_repo_files("org/model", revision="v1")),
    "info": [p.path for p in api.get_paths_info("org/model", ["c.txt", "no"], revision="main")],
    "pr2": Path(path).read_text(),
    "discussions": [d.title for d in api.get_repo_discussions("org/model")],
}
"""


Committed = tuple[HubServer, dict[str, Any]]
"""A Hub, and what the script on it reports."""


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Committed]:
    """A Hub with commits, branches, tags and pull requests of the stock client."""
    root = tmp_path_factory.mktemp("committed")
    with HubServer(root / "hub", **SERVER) as hub:
        yield hub, run(hub, root / "home", COMMIT)


def test_stock_client_is_told_what_it_cannot_commit(committed: Committed) -> None:
    stale = "A commit has happened since. Please refresh and try again."
    assert committed[1]["errors"] == {
        "stale": ["HfHubHTTPError", 412, stale],
        "missing": ["RemoteEntryNotFoundError", 404, "A file with this name doesn't exist: nothing.txt"],
        "no branch": ["RevisionNotFoundError", 404, "Invalid rev id: nowhere"],
        "branch": ["HfHubHTTPError", 409, "Reference already exists: dev/x"],
    }


def test_history_has_every_commit_in_order(committed: Committed) -> None:
    hub, result = committed
    commits = hub.repo("org/model").commits()
    assert [commit.oid for commit in reversed(commits[:-1])] == result["oids"]
    assert commits[0].description == "folder"
    assert result["history"] == ["four", "three", "two", "one", "initial commit"]


def test_main_branch_and_pull_request_have_their_own_files(committed: Committed) -> None:
    hub, _ = committed
    main = {"c.txt": b"c", "copy.safetensors": b"w" * 1000}
    assert files_of(hub) == main
    assert files_of(hub, "dev/x") == {"a/w.safetensors": b"w" * 1000, "b.txt": b"b", "dev.txt": b"dev"}
    assert files_of(hub, "refs/pr/1") == {**main, "pr.txt": b"pr", "pr2.txt": b"pr2"}


def test_stock_client_lists_refs_files_and_discussions(committed: Committed) -> None:
    hub, result = committed
    expected = {
        "pr": [1, 2],
        "refs": [["main", "dev/x"], ["v1"], ["refs/pr/1", "refs/pr/2"]],
        "tag": [".gitattributes", "a/w.safetensors", "b.txt"],
        "info": ["c.txt"],
        "pr2": "pr2",
        "discussions": ["by hand", "pull"],
    }
    assert {name: result[name] for name in expected} == expected
    assert "other" not in kinds(hub.log)
