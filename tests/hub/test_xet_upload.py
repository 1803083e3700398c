"""Models and directories that are pushed over Xet: what is sent, and what comes of failures."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hfshard
from tests.helpers import processes
from tests.hub.models import files_of
from tests.saving.helpers import flip
from tests.servers.faults import Fault
from tests.servers.hub.hub_server import HubServer

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
if options.pop("is_torn", False):  # somebody trains on, between the hashing and the sending
    from hfshard.hub import xet_upload
    upstream = xet_upload._fetch_upload_modes
    xet_upload._fetch_upload_modes = lambda **given: model.w[5].data.add_(1) is None or upstream(**given)
model.w[3].data[: options.pop("changed", 0)] += 1
time.sleep = lambda seconds: None
resource.setrlimit(resource.RLIMIT_FSIZE, ({LARGEST_FILE}, resource.RLIM_INFINITY))
try:
    pushed = model.push_to_hub("org/m", **{{"max_shard_size": "2.5MB", **options}})
    print(json.dumps([pushed.oid, pushed.pr_url]))
except hfshard.HfshardError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""
PUSH_DIRECTORY = """
import json, sys, time
import hfshard

time.sleep = lambda seconds: None
try:
    pushed = hfshard.push_checkpoint("out", "org/m")
    from hfshard.stores.xet import SESSIONS
    print(json.dumps([pushed.commit, pushed.sent_bytes, [memory for _, memory in SESSIONS._sessions]]))
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
        variables = {**self.variables(token), **(environment or {})}
        done = processes.run(["-c", PUSH, json.dumps(options)], env=variables, cwd=self.home)
        assert done.returncode == 0, done.stderr
        assert "Falling back" not in done.stderr or "HFSHARD_XET" in (environment or {}), done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def start_directory(self) -> processes.Child:
        """Begin to push the directory "out"."""
        self.hub.clear_log()
        command, pipe = ["-c", PUSH_DIRECTORY], subprocess.PIPE
        return processes.start(command, env=self.variables(), cwd=self.home, stdout=pipe, stderr=pipe)

    def push_directory(self) -> Any:
        """Push the directory "out"; gives the commit, the bytes that were sent, and what hf_xet may take in memory, or
        the error and its message."""
        return outcome_of(self.start_directory())

    def save(self, changed: int = 0) -> list[Path]:
        """Save into the directory "out", 1,000,000 bytes a tensor; gives its four shards."""
        draw = torch.Generator().manual_seed(1)
        state_dict = {f"w.{number}": torch.randn(250_000, generator=draw) for number in range(8)}
        state_dict["w.3"][:changed] += 1
        hfshard.save_state_dict(state_dict, self.home / "out", max_shard_size="2.5MB")
        return sorted((self.home / "out").glob("model-*.safetensors"))

    def pull(self, folder: Path) -> Path:
        """Write the files of the repo, without the one that the Hub makes."""
        folder.mkdir()
        repo = self.hub.repo("org/m")
        for path in repo.files().keys() - {".gitattributes"}:
            (folder / path).write_bytes(repo.read(path))
        return folder

    def variables(self, token: str = "hf_write") -> dict[str, str]:
        """The environment of such a process."""
        wanted = {"HFSHARD_XET": "1", "HF_XET_XORB_COMPRESSION_POLICY": "none"}
        return {**self.hub.environment(token, home=self.home), **wanted}


def outcome_of(child: processes.Child) -> Any:
    """What a push of a directory printed."""
    out, err = child.communicate(timeout=100)
    assert child.returncode == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.fixture
def pusher(tmp_path: Path) -> Iterator[Pusher]:
    with HubServer(tmp_path / "hub", has_xet=True) as hub:
        hub.create_repo("org/m")
        yield Pusher(hub, tmp_path)


def test_a_model_goes_by_one_upload_and_only_what_changed_goes_again(pusher: Pusher, tmp_path: Path) -> None:
    hub = pusher.hub
    around = {"create_repo": 1, "info": 1, "xet_token": 1, "preupload": 1, "commit": 1}
    first, _ = pusher.push()

    kinds = dict(Counter(request.kind for request in hub.log))
    assert kinds == {**around, "chunk_query": 4, "xorb_grant": 1, "xorb_put": 1, "shard_put": 1}
    assert hub.count("lfs_batch") == hub.count("lfs_put") == 0
    assert BYTES < hub.bytes_up() < BYTES * 1.01
    pulled = pusher.pull(tmp_path / "pulled")
    assert len(list(pulled.glob("*.safetensors"))) == 4
    assert hfshard.verify_checkpoint(pulled).ok

    assert pusher.push()[0] == first  # no commit
    assert hub.bytes_up() < 10_000
    second, _ = pusher.push(changed=20_000)  # 1 % of the bytes
    assert second != first
    assert 80_000 < hub.bytes_up() < 500_000
    pusher.push(changed=20_000, max_shard_size="1.2MB")  # 8 files of bytes that the storage has, nearly all
    assert (hub.count("xorb_put"), hub.count("shard_put")) == (1, 1)


def test_an_upload_commit_that_fails_is_made_again(pusher: Pusher, tmp_path: Path) -> None:
    pusher.hub.fail(Fault(match=" shard_put ", kind="status", status=503, times=6))  # as often as hf_xet asks

    pusher.push()

    assert hfshard.verify_checkpoint(pusher.pull(tmp_path / "pulled")).ok
    assert len(pusher.hub.repo("org/m").commits()) == 2
    assert pusher.hub.count("shard_put") == 7


def test_a_file_that_changes_while_it_is_sent_stops_the_push(pusher: Pusher) -> None:
    error, said = pusher.push(is_torn=True)

    assert error == "IntegrityError"
    assert "'model-00003-of-00004.safetensors' was not pushed: its bytes do not match its checksum" in said
    assert pusher.hub.count("shard_put") == 0
    assert len(pusher.hub.repo("org/m").commits()) == 1


@pytest.mark.parametrize("kind", ["chunk_query", "shard_put"])
def test_ctrl_c_ends_a_push_that_waits_for_the_network(pusher: Pusher, kind: str) -> None:
    gate = threading.Event()
    fault = pusher.hub.fail(Fault(match=f" {kind} ", kind="slow", gate=gate, times=100))
    child = processes.start(["-c", PUSH, "{}"], env=pusher.variables(), cwd=pusher.home)
    assert fault.reached.wait(60)
    child.send_signal(signal.SIGINT)

    # The gate is still shut: the server, which is not asked again, would fail if it opened by itself.
    assert child.wait(100) == -signal.SIGINT
    gate.set()
    assert len(pusher.hub.repo("org/m").commits()) == 1


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
        ({"kind": "drop"}, "HubConnectionError", "Try again, or push with LFS: HFSHARD_XET=0."),
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


def test_a_directory_goes_by_one_upload_and_only_what_changed_goes_again(pusher: Pusher, tmp_path: Path) -> None:
    hub = pusher.hub
    pusher.save()
    _, sent, memory = pusher.push_directory()

    assert (hub.count("xorb_put"), hub.count("shard_put"), hub.count("lfs_put")) == (1, 1, 0)
    assert BYTES < sent < BYTES * 1.01
    assert memory == [805_306_368]  # no tensors are beside: several blocks go at once
    assert files_of(pusher.pull(tmp_path / "pulled")) == files_of(pusher.home / "out")

    pusher.save(changed=20_000)  # 1 % of the bytes
    _, sent, _ = pusher.push_directory()
    assert 80_000 < sent < 500_000


def test_a_shard_that_was_damaged_far_inside_is_not_pushed(pusher: Pusher) -> None:
    flip(pusher.save()[1], 1_500_000)  # no fingerprint has it
    error, said = pusher.push_directory()

    assert error == "IntegrityError"
    assert "'model-00002-of-00004.safetensors' was not pushed: its bytes do not match its checksum" in said
    assert pusher.hub.count("shard_put") == 0
    assert len(pusher.hub.repo("org/m").commits()) == 1


def test_a_shard_that_vanishes_during_the_push_is_named(pusher: Pusher) -> None:
    shard = pusher.save()[1]
    gate = threading.Event()
    held = pusher.hub.fail(Fault(match="POST preupload", kind="slow", after_bytes=100, gate=gate))
    child = pusher.start_directory()
    assert held.reached.wait(60)
    shard.unlink()
    gate.set()
    error, said = outcome_of(child)

    assert error == "IntegrityError"
    assert f"'{shard.name}' was not pushed: it was removed during the push" in said
    assert len(pusher.hub.repo("org/m").commits()) == 1


def test_a_storage_that_refuses_a_directory_is_one_error(pusher: Pusher) -> None:
    pusher.save()
    pusher.hub.fail(Fault(match=" shard_put ", times=1000, kind="status", status=403))
    error, said = pusher.push_directory()

    assert error == "HubAccessError"
    assert "and 3 more could not be sent to the Xet storage of 'org/m'" in said
    assert "Nothing was committed." in said
    assert len(pusher.hub.repo("org/m").commits()) == 1
