"""Checkpoints go from a store to a repo of the Hugging Face Hub, and back, over HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hfshard
from tests.helpers import processes
from tests.servers.hub.hub_server import HubServer
from tests.stores.suite.conftest import Place

pytestmark = [pytest.mark.compat, pytest.mark.parametrize("scheme", ["s3"])]

CALLS = """
import json, sys
import hfshard, torch

def save(value):
    state = {"a": torch.full((3000,), value), "b": torch.ones(3000), "c": torch.ones(3000)}
    hfshard.save_state_dict(state, place, max_shard_size="16KB")

def push():
    pushed = hfshard.push_checkpoint(place, "org/name", progress=False)
    return pushed.is_new, pushed.sent_bytes

place = sys.argv[1]
save(1.0)
said = [push(), push()]
save(2.0)
said.append(push())
print(json.dumps([*said, hfshard.pull_checkpoint("org/name", f"{place}-back", progress=False)]))
"""


def test_push_and_pull_send_what_is_missing(
    store: Place, hub_server: HubServer, child_environment: dict[str, str], tmp_path: Path
) -> None:
    environment = {**child_environment, **hub_server.environment(home=tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    done = processes.run(["-c", CALLS, store.path], env=environment)
    assert done.returncode == 0, done.stderr
    first, again, moved, back = json.loads(done.stdout)

    assert first[0]
    assert first[1] > 36_000
    assert again == [False, 0]
    assert moved[0]
    assert 12_000 < moved[1] < 24_000
    assert sum(request.bytes_up for request in hub_server.log) < first[1] + moved[1] + 20_000
    assert [name for name in sorted(hub_server.repo("org/name").files()) if "model" in name] == [
        *(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    assert back == f"{store.path}-back"
    loaded = hfshard.load_state_dict(back, verify="full")
    assert (loaded["a"][0].item(), loaded["b"][0].item()) == (2, 1)
