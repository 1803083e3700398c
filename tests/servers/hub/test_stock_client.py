"""Stock huggingface_hub works with the Hub server, of both ends of what is supported."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.servers.hub.hub_server import HubServer, Request
from tests.servers.stock_client import SERVER, WEIGHTS, files_of, kinds, run

pytestmark = pytest.mark.compat

PUSH = """
api = HfApi()
assert api.whoami()["name"] == "alice"
api.create_repo("org/model")
api.create_repo("org/model", exist_ok=True)
folder = home / "folder"
(folder / "sub").mkdir(parents=True)
(folder / "config.json").write_text("{}")
(folder / "model.safetensors").write_bytes(bytes(range(256)) * 1000)
(folder / "sub/small.safetensors").write_bytes(b"small")
first = api.upload_folder(repo_id="org/model", folder_path=folder)
again = api.upload_folder(repo_id="org/model", folder_path=folder)
result = [first.oid, again.oid]
"""

PULL = """
path = hf_hub_download("org/model", "model.safetensors")
snapshot = Path(snapshot_download("org/model"))
files = {str(one.relative_to(snapshot)): one.read_bytes().hex() for one in snapshot.rglob("*") if one.is_file()}
result = [Path(path).read_bytes().hex(), files, snapshot.name]
"""


@dataclass(frozen=True)
class Transfers:
    """A push of a folder by the stock client, and a pull of it without a token into an empty cache."""

    hub: HubServer
    first: str
    again: str
    pushed: list[Request]
    weights: bytes
    files: dict[str, bytes]
    revision: str
    pulled: list[Request]


@pytest.fixture(scope="module")
def transfers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Transfers]:
    """One push of a folder and one pull, with the requests of each."""
    root = tmp_path_factory.mktemp("transfers")
    with HubServer(root / "hub", **SERVER) as hub:
        first, again = run(hub, root / "home", PUSH)
        pushed = hub.log
        hub.clear_log()
        weights, files, revision = run(hub, root / "empty", PULL, token=None)
        pulled = {path: bytes.fromhex(content) for path, content in files.items() if path != ".gitattributes"}
        yield Transfers(hub, first, again, pushed, bytes.fromhex(weights), pulled, revision, hub.log)


def test_stock_client_pushes_a_folder_as_one_commit(transfers: Transfers) -> None:
    commits = transfers.hub.repo("org/model").commits()
    assert transfers.first == transfers.again == commits[0].oid
    assert [commit.title for commit in commits] == ["Upload folder using huggingface_hub", "initial commit"]


def test_pushed_files_are_kept_with_size_and_hash(transfers: Transfers) -> None:
    entry = transfers.hub.repo("org/model").files()["model.safetensors"]
    assert (entry.size, entry.is_lfs) == (256_000, True)
    assert entry.sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    expected = {"config.json": b"{}", "model.safetensors": WEIGHTS, "sub/small.safetensors": b"small"}
    assert files_of(transfers.hub) == expected


def test_large_file_goes_up_in_parts_and_nothing_a_second_time(transfers: Transfers) -> None:
    # 256,000 bytes in parts of 100,000, and one small file in one piece.
    sizes = {
        kind: [request.bytes_up for request in transfers.pushed if request.kind == kind]
        for kind in ("lfs_part", "lfs_put")
    }
    assert sizes == {"lfs_part": [100_000, 100_000, 56_000], "lfs_put": [5]}
    counts = {"lfs_complete": 1, "lfs_verify": 2, "lfs_batch": 2, "preupload": 2, "commit": 1, "create_repo": 2}
    made = Counter(kinds(transfers.pushed))
    assert {kind: made[kind] for kind in counts} == counts
    assert "other" not in made


def test_stock_client_pulls_what_was_pushed(transfers: Transfers) -> None:
    assert transfers.weights == WEIGHTS
    assert transfers.files == files_of(transfers.hub)
    assert transfers.revision == transfers.first


def test_pull_lists_pages_and_downloads_the_weights_once_without_a_token(transfers: Transfers) -> None:
    # The tree has 5 entries (a folder among them) in pages of 3; the weights are downloaded once.
    assert kinds(transfers.pulled)[:5] == ["resolve_head", "storage_get", "info", "tree", "tree"]
    downloads = [request.bytes_down for request in transfers.pulled if request.kind == "storage_get"]
    assert sum(downloads) == 256_000 + 5
    assert {request.token for request in transfers.pulled} == {None}


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
pull = commit("pull", CommitOperationAdd("pr.txt", b"pr"), create_pr=True)
commit("more", CommitOperationAdd("pr2.txt", b"pr2"), revision=pull.pr_revision)
refs = api.list_repo_refs("org/model", include_pull_requests=True)
path = hf_hub_download("org/model", "pr2.txt", revision="refs/pr/1")
result = {
    "errors": errors, "oids": [one.oid, two.oid, three.oid, four.oid], "pr": pull.pr_num,
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
        "pr": 1,
        "refs": [["main", "dev/x"], ["v1"], ["refs/pr/1"]],
        "tag": [".gitattributes", "a/w.safetensors", "b.txt"],
        "info": ["c.txt"],
        "pr2": "pr2",
        "discussions": ["pull"],
    }
    assert {name: result[name] for name in expected} == expected
    assert "other" not in kinds(hub.log)


REFUSED = """
from huggingface_hub.errors import HfHubHTTPError
errors = {}
def refused(name, function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except HfHubHTTPError as error:
        errors[name] = [type(error).__name__, error.response.status_code]
for token in ("hf_wrong", "hf_read", "hf_member", False):
    api = HfApi(token=token)
    for name in ("hidden", "fenced", "nothing"):
        refused(f"{token} {name}", api.model_info, f"org/{name}")
    refused(f"{token} fenced file", get_hf_file_metadata, hf_hub_url("org/fenced", "a.txt"), token=token)
    refused(f"{token} create", api.create_repo, "org/new")
    refused(f"{token} commit", api.upload_file, path_or_fileobj=b"x", path_in_repo="x.txt", repo_id="org/fenced")
refused("revision", get_hf_file_metadata, hf_hub_url("org/fenced", "a.txt", revision="nowhere"))
refused("entry", get_hf_file_metadata, hf_hub_url("org/fenced", "nothing.txt"))
refused("dataset", HfApi().create_repo, "org/data", repo_type="dataset")
refused("namespace", HfApi().create_repo, "bob/mine")
HfApi().delete_repo("org/fenced")
result = errors
"""


def test_stock_client_is_refused_what_it_may_not_see_or_write(hub_server: HubServer, tmp_path: Path) -> None:
    hub = hub_server
    hub.create_repo("org/hidden", private=True)
    hub.create_repo("org/fenced", gated=True).commit({"a.txt": b"a"}, "a")
    errors = run(hub, tmp_path / "home", REFUSED)
    names = ("hidden", "fenced", "nothing", "fenced file", "create", "commit")
    table = {
        token: [errors.pop(f"{token} {name}", None) for name in names]
        for token in ("hf_wrong", "hf_read", "hf_member", "False")
    }
    unknown, repo_401 = ["HfHubHTTPError", 401], ["RepositoryNotFoundError", 401]
    repo_404, forbidden = ["RepositoryNotFoundError", 404], ["HfHubHTTPError", 403]
    gated_401, gated_403 = ["GatedRepoError", 401], ["GatedRepoError", 403]
    assert table == {
        "hf_wrong": [unknown] * 6,
        "hf_read": [repo_404, None, repo_404, gated_403, forbidden, forbidden],
        "hf_member": [None, None, repo_404, None, forbidden, forbidden],
        "False": [repo_401, None, repo_401, gated_401, unknown, unknown],
    }
    assert errors == {
        "revision": ["RevisionNotFoundError", 404],
        "entry": ["RemoteEntryNotFoundError", 404],
        "dataset": ["BadRequestError", 400],
        "namespace": ["HfHubHTTPError", 403],
    }
    with pytest.raises(KeyError):
        hub.repo("org/fenced")
