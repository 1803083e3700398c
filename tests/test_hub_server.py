"""The Hub server of the tests: stock huggingface_hub works with it, and each fault does what it says."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.hub_server import Fault, HubServer, Request

pytestmark = pytest.mark.compat

WEIGHTS = bytes(range(256)) * 1000  # 256,000 bytes, no two neighbours alike
TOKEN = {"Authorization": "Bearer hf_write"}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub", multipart_bytes=100_000, page_size=3) as server:
        yield server


def run(hub: HubServer, home: Path, script: str, token: str | None = "hf_write") -> Any:
    """Run a script with stock huggingface_hub in a child; gives what it assigned to `result`."""
    before = "import json, os, sys\nfrom pathlib import Path\nfrom huggingface_hub import *\nhome = Path(sys.argv[1])\n"
    after = "\nprint(json.dumps(result))"
    environment = {**hub.environment(token, home=home), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", before + script + after, str(home)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr + "\n".join(map(str, hub.log))
    return json.loads(done.stdout.splitlines()[-1])


def ask(method: str, url: str, body: bytes | None = None, **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Send one request on a connection of its own."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=30)
    try:
        connection.request(method, f"{parts.path}?{parts.query}", body, {**TOKEN, **headers})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def storage_url(hub: HubServer, path: str = "model.safetensors") -> str:
    """Resolve a file of org/model to its signed URL."""
    status, headers, _ = ask("HEAD", f"{hub.endpoint}/org/model/resolve/main/{path}")
    assert status == 302
    return headers["Location"]


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


@pytest.fixture
def model(hub: HubServer) -> HubServer:
    """A hub with org/model, which has the weights and a config."""
    hub.create_repo("org/model").commit({"model.safetensors": WEIGHTS, "config.json": b"{}"}, "weights")
    return hub


def receive_all(connection: socket.socket) -> tuple[bytes, str]:
    """Read to the end of a connection, and say how it ended."""
    received = bytearray()
    try:
        while piece := connection.recv(65_536):
            received += piece
    except ConnectionResetError:
        return bytes(received), "rst"
    return bytes(received), "fin"


@pytest.mark.parametrize("how", ["fin", "rst"])
def test_drop_ends_an_answer_after_so_many_bytes(model: HubServer, how: str) -> None:
    url = storage_url(model)
    model.fail(Fault(match="storage_get", kind="drop", after_bytes=70_000, how=how))
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
        connection.sendall(f"GET {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
        received, ending = receive_all(connection)
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"Content-Length: 256000" in head
    assert body == WEIGHTS[:70_000]
    assert ending == how
    assert model.log[-1].bytes_down == 70_000
    assert ask("GET", url)[2] == WEIGHTS


@pytest.mark.parametrize("how", ["fin", "rst"])
def test_drop_ends_an_upload_after_so_many_bytes(model: HubServer, how: str) -> None:
    content = b"new" * 20_000
    url = upload_url(model, content)
    model.fail(Fault(match="PUT lfs_put", kind="drop", after_bytes=50_000, how=how))
    with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
        ask("PUT", url, content)
    assert (model.log[-1].bytes_up, model.log[-1].status) == (50_000, 0)
    assert ask("PUT", url, content)[0] == 200
    assert ask("PUT", url, b"old" * 20_000)[0] == 400
    assert [request.bytes_up for request in model.log if request.kind == "lfs_put"] == [50_000, 60_000, 60_000]


def upload_url(hub: HubServer, content: bytes) -> str:
    request = {"operation": "upload", "objects": [{"oid": hashlib.sha256(content).hexdigest(), "size": len(content)}]}
    _, _, answer = ask("POST", f"{hub.endpoint}/org/model.git/info/lfs/objects/batch", json.dumps(request).encode())
    url: str = json.loads(answer)["objects"][0]["actions"]["upload"]["href"]
    return url


def test_status_refuses_so_many_requests_after_so_many(model: HubServer) -> None:
    model.fail(Fault(match="GET info", kind="status", status=429, retry_after=2, skip=1, times=2))
    answers = [ask("GET", f"{model.endpoint}/api/models/org/model") for _ in range(4)]
    assert [status for status, _, _ in answers] == [200, 429, 429, 200]
    assert [headers["Retry-After"] for _, headers, _ in answers] == [None, "2", "2", None]


def test_slow_waits_at_the_gate_after_so_many_bytes(model: HubServer) -> None:
    url, gate = storage_url(model), threading.Event()
    fault = model.fail(Fault(match="storage_get", kind="slow", after_bytes=100_000, gate=gate))
    answers: list[bytes] = []
    thread = threading.Thread(target=lambda: answers.append(ask("GET", url)[2]))
    thread.start()
    assert fault.reached.wait(30)
    assert (model.log[-1].bytes_down, answers) == (100_000, [])
    gate.set()
    thread.join()
    assert answers == [WEIGHTS]


def test_corrupt_and_truncate_spoil_one_answer(model: HubServer) -> None:
    url = storage_url(model)
    model.fail(Fault(match="storage_get", kind="corrupt", offset=200_000))
    model.fail(Fault(match="storage_get", kind="truncate", after_bytes=10))
    spoiled = ask("GET", url)[2]
    assert [place for place in range(256_000) if spoiled[place] != WEIGHTS[place]] == [200_000]
    with pytest.raises(http.client.IncompleteRead) as error:
        ask("GET", url)
    assert (error.value.partial, error.value.expected) == (WEIGHTS[:10], 255_990)
    assert ask("GET", url, Range="bytes=-3")[2] == WEIGHTS[-3:]


def test_corrupt_store_keeps_size_and_digest(model: HubServer) -> None:
    model.repo("org/model").corrupt("model.safetensors", at=77)
    _, headers, _ = ask("HEAD", f"{model.endpoint}/org/model/resolve/main/model.safetensors")
    assert headers["X-Linked-Etag"] == f'"{hashlib.sha256(WEIGHTS).hexdigest()}"'
    assert headers["X-Linked-Size"] == "256000"
    content = ask("GET", headers["Location"])[2]
    assert (len(content), content[77], WEIGHTS[77]) == (256_000, 76, 77)


def test_expired_url_stays_dead_and_a_new_one_works(model: HubServer) -> None:
    url = storage_url(model)
    model.fail(Fault(match="storage_get", kind="expired"))
    assert [ask("GET", url)[0] for _ in range(2)] == [403, 403]
    assert ask("GET", storage_url(model))[2] == WEIGHTS
    assert ask("GET", storage_url(model).replace("X-Expires=1", "X-Expires=2"))[0] == 403
    assert ask("PUT", storage_url(model), b"other")[0] == 403


def commit_body(**header: str) -> bytes:
    file = {"path": "b.txt", "content": "Yg==", "encoding": "base64"}
    lines = [{"key": "header", "value": {"summary": "b", **header}}, {"key": "file", "value": file}]
    return b"\n".join(json.dumps(line).encode() for line in lines)


def test_lost_answer_leaves_the_commit_made(model: HubServer) -> None:
    model.fail(Fault(match="POST commit", kind="lost_answer"))
    with pytest.raises(http.client.RemoteDisconnected):
        ask("POST", f"{model.endpoint}/api/models/org/model/commit/main", commit_body())
    assert model.repo("org/model").read("b.txt") == b"b"
    assert model.log[-1].status == 0


def test_race_commits_before_the_request_is_handled(model: HubServer) -> None:
    view, url = model.repo("org/model"), f"{model.endpoint}/api/models/org/model/commit/main"
    parent = view.commits()[0].oid
    model.fail(Fault(match="POST commit", kind="race", action=lambda: view.commit({"c.txt": b"c"}, "theirs")))
    assert ask("POST", url, commit_body(parentCommit=parent))[0] == 412
    assert [commit.title for commit in view.commits()] == ["theirs", "weights", "initial commit"]
    assert ask("POST", url, commit_body(parentCommit=view.branches["main"]))[0] == 200


def test_commit_is_refused_whole(model: HubServer) -> None:
    url, before = f"{model.endpoint}/api/models/org/model/commit/main", model.repo("org/model").branches["main"]
    missing = {"path": "x.bin", "algo": "sha256", "oid": "0" * 64, "size": 1}
    below = {"path": "config.json/x", "content": "", "encoding": "base64"}
    above = {"path": "../x", "content": "", "encoding": "base64"}
    for key, value in (("lfsFile", missing), ("file", below), ("file", above), ("unknown", {"path": "x"})):
        body = commit_body() + b"\n" + json.dumps({"key": key, "value": value}).encode()
        assert ask("POST", url, body)[0] == 400
    assert model.repo("org/model").branches["main"] == before
