"""The mirror image of upstream's rows on the Hub: requests and bytes, counted on the wire by the server.

Upstream's figures (transformers 5.23, huggingface_hub 2.4, 8 shards; S = shards) stand beside ours. The other entries
of that list have their tests where the part is tested:

- 22 = 6 + 2S requests to a new repo, 7 for an unchanged push; a whole copy in a temporary folder, read again to be
  hashed; no `parent_commit`; two racing pushes both land; a lost answer to a commit raises; uploads fail with hf_xet
  against a server without Xet; more than one batch of files is not atomic: tests/hub/push
- a killed download starts again from zero; a reset raises ReadError; 503 gives up at once; Retry-After is ignored; an
  expired URL is not asked for again; a corrupt file of the right size is taken: tests/hub/pull
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hub.pull.pull_hub import PullHub
from tests.hub.server_fixture import hub_fixtures, new_repo_id
from tests.servers.hub.hub_server import HubServer, RepoView

pytestmark = pytest.mark.compat

hub, _ = hub_fixtures(PullHub)

SETUP = """
import json, sys, torch, hfshard
from transformers import BertConfig, BertModel

class Bert(hfshard.ShardedModelMixin, BertModel): ...

torch.manual_seed(0)
config = BertConfig(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512, vocab_size=512)
model = Bert(config).eval()
"""
SHARDED, OTHER = 550_000, 1_200_000
"""Limits: 8 shards; 4."""
S = 8


class Client:
    """Runs code in new processes, each with the model, the name of a repo, and a folder for a cache that is empty."""

    def __init__(self, hub: PullHub, folder: Path) -> None:
        self.hub, self.folder, self.name = hub, folder, new_repo_id()

    @property
    def server(self) -> HubServer:
        """The Hub that all clients talk to."""
        return self.hub.server

    @property
    def repo(self) -> RepoView:
        """The repo of this test."""
        return self.server.repo(self.name)

    def run(self, code: str) -> str:
        """Run code after SETUP, with an empty log; gives what it printed."""
        self.server.clear_log()
        names = f"repo, fresh = {self.name!r}, {str(self.folder / 'fresh')!r}\n"
        return self.hub.interpret(SETUP + names + code)

    def push(self, limit: int, more: str = "") -> None:
        """Push the model."""
        self.run(f"{more}\nmodel.push_to_hub(repo, max_shard_size={limit})")

    @property
    def weights(self) -> list[str]:
        """The weights in the repo, with their index."""
        return sorted(path for path in self.repo.files() if path.startswith("model"))


@pytest.fixture
def client(hub: PullHub, tmp_path: Path) -> Client:
    """A repo that does not exist yet, and what runs clients of it."""
    return Client(hub, tmp_path)


def shards(count: int) -> list[str]:
    """The names of so many shards, and of their index."""
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    return [*names, "model.safetensors.index.json"]


def test_one_changed_tensor_sends_its_shard_alone(client: Client) -> None:
    client.push(SHARDED)
    client.push(SHARDED, "with torch.no_grad(): model.pooler.dense.bias += 1")
    assert len(client.server.log) == 7  # upstream: 8; create, info, preupload, batch, put, verify, commit
    [put] = [request for request in client.server.log if request.kind == "lfs_put"]
    files = client.repo.files()
    [holder] = [path for path in client.weights if files[path].size == put.bytes_up]
    assert client.server.bytes_up() <= files[holder].size + 20_000  # upstream: the whole shard, too


def test_another_shard_size_leaves_no_old_shard(client: Client) -> None:
    client.push(SHARDED)
    client.push(OTHER)
    assert client.weights == shards(4)  # upstream: all 8 old ones stay beside the new ones
    assert client.server.count("commit") == 1


def test_single_file_leaves_no_shard_and_no_index(client: Client) -> None:
    client.push(SHARDED)
    client.push(10**9)
    assert client.weights == ["model.safetensors"]  # upstream: index and shards stay
    assert len(client.server.log) == 7  # upstream: 8


def test_sharded_push_over_a_single_file_is_what_stock_loads(client: Client) -> None:
    client.push(10**9)
    client.push(SHARDED, "with torch.no_grad(): model.pooler.dense.bias.fill_(7)")
    assert client.weights == shards(S)
    seen = client.run("print(BertModel.from_pretrained(repo, cache_dir=fresh).pooler.dense.bias.unique().tolist())")
    assert json.loads(seen) == [7.0]  # upstream (D1): the old weights, of the single file that stays


def test_loads_cold_warm_and_pinned(client: Client) -> None:
    client.push(SHARDED)
    head = client.repo.commits()[0].oid
    client.run("Bert.from_pretrained(repo, cache_dir=fresh)")
    assert len(client.server.log) <= 5 + S  # upstream: 25 = 9 + 2S
    client.run("Bert.from_pretrained(repo, cache_dir=fresh)")
    assert len(client.server.log) == 1  # upstream: 1
    client.run(f"Bert.from_pretrained(repo, cache_dir=fresh, revision='{head}')")
    assert client.server.log == []  # upstream: 0


def test_push_to_hub_takes_a_variant_and_save_pretrained_a_revision(client: Client) -> None:
    client.run(
        "model.push_to_hub(repo, variant='fp16', max_shard_size=10**9)\n"
        f"model.save_pretrained({str(client.folder / 'm')!r}, push_to_hub=True, repo_id=repo, revision='dev')"
    )  # upstream: no such argument; TypeError
    assert client.weights == ["model.fp16.safetensors"]
    assert client.repo.files("dev").keys() >= {"model.fp16.safetensors", "model.safetensors"}
