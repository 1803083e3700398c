"""The Hub server of the tests works with stock huggingface_hub and transformers, of both ends of what is supported."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import forkserver
from tests.hubserver.hub_server import Fault, HubServer, Request

pytestmark = pytest.mark.compat

WEIGHTS = bytes(range(256)) * 1000  # 256,000 bytes, no two neighbours alike


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub", multipart_bytes=100_000, page_size=3) as server:
        yield server


def run(hub: HubServer, home: Path, script: str, token: str | None = "hf_write") -> Any:
    """Run a script with stock huggingface_hub in a child; gives what it assigned to `result`."""
    before = "import json, os, sys\nfrom pathlib import Path\nfrom huggingface_hub import *\nhome = Path(sys.argv[1])\n"
    after = "\nprint(json.dumps(result))"
    environment = {**hub.environment(token, home=home), "HF_HUB_DISABLE_XET": "1"}
    done = forkserver.run(["-c", before + script + after, home], env=environment, timeout=60)
    assert done.returncode == 0, done.stderr + "\n".join(map(str, hub.log))
    return json.loads(done.stdout.splitlines()[-1])


def kinds(requests: list[Request]) -> list[str]:
    return [request.kind for request in requests]


def files_of(hub: HubServer, revision: str = "main") -> dict[str, bytes]:
    view = hub.repo("org/model")
    return {path: view.read(path, revision) for path in view.files(revision) if path != ".gitattributes"}


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


def test_stock_client_pushes_a_folder_and_pulls_it(hub: HubServer, tmp_path: Path) -> None:
    first, again = run(hub, tmp_path / "home", PUSH)
    assert first == again == hub.repo("org/model").commits()[0].oid
    assert [commit.title for commit in hub.repo("org/model").commits()] == [
        "Upload folder using huggingface_hub",
        "initial commit",
    ]
    entry = hub.repo("org/model").files()["model.safetensors"]
    assert (entry.size, entry.is_lfs) == (256_000, True)
    assert entry.sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    assert files_of(hub) == {"config.json": b"{}", "model.safetensors": WEIGHTS, "sub/small.safetensors": b"small"}
    # 256,000 bytes in parts of 100,000, and one small file in one piece; nothing of it a second time.
    assert [request.bytes_up for request in hub.log if request.kind == "lfs_part"] == [100_000, 100_000, 56_000]
    assert [request.bytes_up for request in hub.log if request.kind == "lfs_put"] == [5]
    counts = {"lfs_complete": 1, "lfs_verify": 2, "lfs_batch": 2, "preupload": 2, "commit": 1, "create_repo": 2}
    assert {kind: hub.count(kind) for kind in counts} == counts
    assert "other" not in kinds(hub.log)

    hub.clear_log()
    weights, files, revision = run(hub, tmp_path / "empty", PULL, token=None)
    assert bytes.fromhex(weights) == WEIGHTS
    assert {path: bytes.fromhex(content) for path, content in files.items() if path != ".gitattributes"} == files_of(
        hub
    )
    assert revision == first
    # The tree has 5 entries (a folder among them) in pages of 3; the weights are downloaded once.
    assert kinds(hub.log)[:5] == ["resolve_head", "storage_get", "info", "tree", "tree"]
    assert hub.bytes_down("storage_get") == 256_000 + 5
    assert {request.token for request in hub.log} == {None}


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


def test_stock_client_commits_branches_tags_and_pull_requests(hub: HubServer, tmp_path: Path) -> None:
    result = run(hub, tmp_path / "home", COMMIT)
    stale = "A commit has happened since. Please refresh and try again."
    assert result["errors"] == {
        "stale": ["HfHubHTTPError", 412, stale],
        "missing": ["RemoteEntryNotFoundError", 404, "A file with this name doesn't exist: nothing.txt"],
        "no branch": ["RevisionNotFoundError", 404, "Invalid rev id: nowhere"],
        "branch": ["HfHubHTTPError", 409, "Reference already exists: dev/x"],
    }
    view = hub.repo("org/model")
    assert [commit.oid for commit in reversed(view.commits()[:-1])] == result["oids"]
    assert files_of(hub) == {"c.txt": b"c", "copy.safetensors": b"w" * 1000}
    assert files_of(hub, "dev/x") == {"a/w.safetensors": b"w" * 1000, "b.txt": b"b", "dev.txt": b"dev"}
    assert files_of(hub, "refs/pr/1") == {**files_of(hub), "pr.txt": b"pr", "pr2.txt": b"pr2"}
    assert view.commits()[0].description == "folder"
    assert result["pr"] == [1, 2]
    assert result["refs"] == [["main", "dev/x"], ["v1"], ["refs/pr/1", "refs/pr/2"]]
    assert result["history"] == ["four", "three", "two", "one", "initial commit"]
    assert result["tag"] == [".gitattributes", "a/w.safetensors", "b.txt"]
    assert result["info"] == ["c.txt"]
    assert result["pr2"] == "pr2"
    assert result["discussions"] == ["by hand", "pull"]
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
HfApi().update_repo_settings("org/hidden", private=False)
HfApi().delete_repo("org/fenced")
result = errors
"""


def test_stock_client_is_refused_what_it_may_not_see_or_write(hub: HubServer, tmp_path: Path) -> None:
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
    assert not hub.repo("org/hidden").private
    with pytest.raises(KeyError):
        hub.repo("org/fenced")


def test_stock_client_resumes_a_dropped_download(hub: HubServer, tmp_path: Path) -> None:
    content = WEIGHTS[:65_536] * 192  # 12 MiB: the client keeps what it got in pieces of 10 MiB, and no less
    hub.create_repo("org/model").commit({"model.safetensors": content}, "weights")
    hub.fail(Fault(match="GET storage_get", kind="drop", after_bytes=11_000_000))
    script = 'import hashlib\nfile = Path(hf_hub_download("org/model", "model.safetensors"))\n'
    script += "result = hashlib.sha256(file.read_bytes()).hexdigest()"
    assert run(hub, tmp_path / "home", script) == hashlib.sha256(content).hexdigest()
    first, second = (request for request in hub.log if request.kind == "storage_get")
    assert (first.bytes_down, first.fault, first.range) == (11_000_000, "drop", None)
    assert (second.bytes_down, second.status, second.range) == (2_097_152, 206, "bytes=10485760-")
    assert {first.token, second.token} == {None}


def test_repositories_are_there_after_a_restart(tmp_path: Path) -> None:
    with HubServer(tmp_path / "hub") as hub:
        view = hub.create_repo("org/model", private=True)
        oid = view.commit({"model.safetensors": WEIGHTS, "a.txt": b"a"}, "one")
        view.commit({"a.txt": None}, "two")
    with HubServer(tmp_path / "hub") as hub:
        view = hub.repo("org/model")
        assert (view.private, [commit.title for commit in view.commits()]) == (True, ["two", "one", "initial commit"])
        assert view.read("a.txt", oid) == b"a"
        assert files_of(hub) == {"model.safetensors": WEIGHTS}


TRANSFORMERS = """
import torch
from transformers import BertConfig, BertModel
config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
model = BertModel(config)
model.push_to_hub("org/model", max_shard_size="50KB")
loaded = BertModel.from_pretrained("org/model").state_dict()
result = all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())
"""


def test_stock_transformers_pushes_and_loads_a_sharded_model(hub: HubServer, tmp_path: Path) -> None:
    assert run(hub, tmp_path / "home", TRANSFORMERS)
    shards = [path for path in hub.repo("org/model").files() if path.endswith(".safetensors")]
    # The position embeddings (512 x 32 floats, 65,536 bytes) fill a shard of their own.
    assert sorted(shards) == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    # 6 requests and 2 for each shard, counted by hand in transformers' source.
    pushed = kinds(hub.log)[: 6 + 2 * 3]
    assert (pushed.count("lfs_put"), pushed.count("lfs_verify"), pushed[-1]) == (3, 3, "commit")
    assert hub.count("storage_get") == 3
    assert {"other", "lfs_complete"} & set(kinds(hub.log)) == set()
