"""Models that are pushed from memory over Xet: what is sent, and what comes of failures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hfshard
from tests.helpers import forkserver
from tests.hubserver.faults import Fault
from tests.hubserver.hub_server import HubServer

pytestmark = pytest.mark.compat

BYTES = 8_000_000
"""Of the weights."""
LARGEST_FILE = 500_000
"""Bytes that a file of the pushing process may have: hf_xet writes some notes and a log."""
PUSH = f"""
import json, resource, sys, time
import torch, hfshard
from torch import nn

class Model(hfshard.ShardedModelMixin, nn.Module):
    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.w = nn.ParameterList(nn.Parameter(torch.randn(250_000, generator=draw)) for _ in range(8))

options = json.loads(sys.argv[1])
model = Model()
model.w[3].data[: options.pop("changed", 0)] += 1
time.sleep = lambda seconds: None
resource.setrlimit(resource.RLIMIT_FSIZE, ({LARGEST_FILE}, resource.RLIM_INFINITY))
try:
    pushed = model.push_to_hub("org/m", max_shard_size="2.5MB", **options)
    print(json.dumps([pushed.oid, pushed.pr_url]))
except hfshard.HfshardError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


class Pusher:
    """A Hub with Xet, and processes that push to it with one cache."""

    def __init__(self, hub: HubServer, home: Path) -> None:
        self.hub, self.home = hub, home

    def push(self, *, token: str = "hf_write", environment: dict[str, str] | None = None, **options: Any) -> Any:
        """Push from a new process; gives the commit and the pull request, or the error and its message."""
        self.hub.clear_log()
        wanted = {"HFSHARD_XET": "1", "HF_XET_XORB_COMPRESSION_POLICY": "none"}
        variables = {**self.hub.environment(token, home=self.home), **wanted, **(environment or {})}
        done = forkserver.run(["-c", PUSH, json.dumps(options)], env=variables, cwd=self.home)
        assert done.returncode == 0, done.stderr
        assert "Falling back" not in done.stderr or "HFSHARD_XET" in (environment or {}), done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def pusher(tmp_path: Path) -> Iterator[Pusher]:
    with HubServer(tmp_path / "hub", has_xet=True) as hub:
        hub.create_repo("org/m")
        yield Pusher(hub, tmp_path)


def test_a_model_goes_by_xet_and_only_what_changed_goes_again(pusher: Pusher, tmp_path: Path) -> None:
    hub = pusher.hub
    first, _ = pusher.push()

    assert hub.count("lfs_batch") == hub.count("lfs_put") == 0
    assert BYTES < hub.bytes_up() < BYTES * 1.01
    files = {path: hub.repo("org/m").read(path) for path in hub.repo("org/m").files() if path != ".gitattributes"}
    assert len([path for path in files if path.endswith(".safetensors")]) == 4
    for path, raw in files.items():
        (tmp_path / "pulled").mkdir(exist_ok=True)
        (tmp_path / "pulled" / path).write_bytes(raw)
    assert hfshard.verify_checkpoint(tmp_path / "pulled").ok

    assert pusher.push()[0] == first  # no commit
    assert hub.bytes_up() < 10_000
    second, _ = pusher.push(changed=20_000)  # 1 % of the bytes
    assert second != first
    assert 80_000 < hub.bytes_up() < 500_000


def test_a_push_over_xet_goes_to_branches_and_pull_requests(pusher: Pusher) -> None:
    pusher.push(revision="dev")
    assert "model.safetensors.index.json" in pusher.hub.repo("org/m").files("dev")
    assert pusher.hub.count("lfs_put") == 0

    _, pull = pusher.push(create_pr=True)
    assert pull.endswith("/org/m/discussions/1")
    assert "model.safetensors.index.json" in pusher.hub.repo("org/m").files("refs/pr/1")
    assert "model.safetensors.index.json" not in pusher.hub.repo("org/m").files("main")


@pytest.mark.parametrize(
    ("fault", "expected", "message"),
    [
        ({"kind": "status", "status": 403}, "HubAccessError", "could not be sent to the Xet storage of 'org/m'"),
        ({"kind": "drop"}, "HubConnectionError", "Run it again, or push by LFS: HFSHARD_XET=0."),
    ],
)
def test_a_storage_that_fails_for_good_is_one_error(
    pusher: Pusher, fault: dict[str, Any], expected: str, message: str
) -> None:
    before = pusher.hub.repo("org/m").commits()[0].oid
    pusher.hub.fail(Fault(match=" xorb_put ", times=1000, **fault))

    error, said = pusher.push()

    assert error == expected
    assert message in said
    assert "Nothing was committed." in said
    assert "hf_write" not in said
    assert pusher.hub.repo("org/m").commits()[0].oid == before


@pytest.mark.parametrize("kind", ["xorb_put", "shard_put", "chunk_query"])
def test_a_storage_that_fails_once_is_asked_again(pusher: Pusher, kind: str) -> None:
    failed = pusher.hub.fail(Fault(match=f" {kind} ", kind="status", status=503))

    pusher.push()

    assert failed.reached.is_set()
    assert len(pusher.hub.repo("org/m").commits()) == 2


def test_lfs_is_used_where_xet_is_turned_off(pusher: Pusher) -> None:
    pusher.push(environment={"HFSHARD_XET": "0"})

    assert pusher.hub.count("xorb_put") == 0
    assert pusher.hub.count("lfs_put") == 4
