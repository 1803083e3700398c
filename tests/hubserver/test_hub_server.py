"""The Hub server of the tests works with stock huggingface_hub and transformers, of both ends of what is supported."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hubserver.hub_server import Fault, HubServer
from tests.hubserver.stock_client.scripts import SERVER, WEIGHTS, files_of, kinds, run

pytestmark = pytest.mark.compat


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub", **SERVER) as server:
        yield server


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
