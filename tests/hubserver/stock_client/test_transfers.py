"""Stock huggingface_hub pushes a folder to the Hub server of the tests, and pulls it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.hubserver.hub_server import HubServer, Request
from tests.hubserver.stock_client.scripts import SERVER, WEIGHTS, files_of, kinds, run

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
