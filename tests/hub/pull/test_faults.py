"""Pulls that are disturbed: broken connections, busy servers, expired URLs, kills, damaged bytes; counted in bytes."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.hub.models import files_of, saved
from tests.hub.pull.pull_hub import PullHub, cached
from tests.hub.server_fixture import Outcome
from tests.hubserver.hub_server import Fault

pytestmark = pytest.mark.compat
SHARDS = 5
LIMIT = 4_300_000
"""Bytes: the large model of 16.9 MB of weights then has 5 shards."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model of 5 shards."""
    folder = saved(tmp_path_factory.mktemp("weights"), 1, LIMIT, size="large")
    assert len(list(folder.glob("*.safetensors"))) == SHARDS
    return folder


def size_of(folder: Path) -> int:
    """Bytes of all shards."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def drops(match: str, how: str) -> list[Fault]:
    """Five broken connections, at other bytes each."""
    return [Fault(match=match, kind="drop", after_bytes=at, how=how) for at in (1, 70_000, 300_001, 900_000, 1_500_000)]


def faults_for(match: str) -> dict[str, list[Fault]]:
    """Name -> what goes wrong, so that each pull still completes."""
    return {
        "fin": drops(match, "fin"),
        "rst": drops(match, "rst"),
        "busy": [Fault(match=match, kind="status", status=503, times=3)],
        "limited": [Fault(match=match, kind="status", status=429, retry_after=2.0)],
        "expired": [Fault(match=match, kind="expired", times=3)],
        "truncated": [Fault(match=match, kind="truncate", after_bytes=100_000)],
        "no batch": [Fault(match=match, kind="status", status=404, times=9)],
    }


def test_pull_completes_through_every_fault_and_fetches_nothing_twice(
    hub: PullHub, repo: str, weights: Path, tmp_path: Path
) -> None:
    # All at once: each waits for itself.
    size, names = size_of(weights), list(faults_for(""))
    tasks = {}
    for number, name in enumerate(names):
        one = f"{repo}-{number}"
        hub.publish(one, weights)
        for fault in faults_for(f"storage_get /{one}/" if name != "no batch" else f"lfs_batch /{one}.git/")[name]:
            hub.server.fail(fault)
    for number, name in enumerate(names):
        tasks[name] = hub.start("pull", f"{repo}-{number}", cache_dir=tmp_path / name)

    outcomes: dict[str, Outcome] = {name: task.outcome() for name, task in tasks.items()}

    for number, name in enumerate(names):
        one, outcome = f"{repo}-{number}", outcomes[name]
        assert outcome.error is None, f"{name}: {outcome.trace}"
        assert size <= hub.weights_down(one) <= size * 1.05, name
        pulled = files_of(Path(outcome.result))
        assert {path: pulled[path] for path in files_of(weights)} == files_of(weights), name
        hit = [request for request in hub.requests_of(one) if request.fault]
        assert len(hit) == {"fin": 5, "rst": 5, "busy": 3, "limited": 1, "expired": 3, "truncated": 1}.get(name, 1)
    assert outcomes["limited"].seconds >= 2
    kinds = [request.kind for request in hub.requests_of(f"{repo}-{names.index('expired')}")]
    assert kinds.count("lfs_batch") == 4  # one for all, and one for each that had expired
    kinds = [request.kind for request in hub.requests_of(f"{repo}-{names.index('no batch')}")]
    assert kinds.count("lfs_batch") == 1
    assert kinds.count("resolve_get") == SHARDS + 3  # config, index and .gitattributes are not of LFS


def test_killed_pull_goes_on_where_it_stopped(hub: PullHub, repo: str, weights: Path, tmp_path: Path) -> None:
    hub.publish(repo, weights)
    sent = 1_000_000
    gates = [
        hub.server.fail(Fault(match=f"storage_get /{repo}/", kind="slow", after_bytes=sent, gate=threading.Event()))
        for _ in range(SHARDS)
    ]
    task = hub.start("pull", repo, cache_dir=tmp_path)
    for gate in gates:
        assert gate.reached.wait(30)
    while sum(path.stat().st_size >= sent for path in cached(tmp_path, repo)) < SHARDS:
        time.sleep(0.01)  # what is on the wire is not the client's yet
    task.kill()
    hub.server.clear_faults()
    assert hub.weights_down(repo) == SHARDS * sent
    assert cached(tmp_path, repo, "refs") == []

    directory = hub.start("pull", repo, cache_dir=tmp_path).outcome().result

    assert [request.range for request in hub.requests_of(repo) if request.range] == ["bytes=1000000-"] * SHARDS
    assert hub.weights_down(repo) == size_of(weights)
    assert files_of(Path(directory)).items() >= files_of(weights).items()
    assert not [path for path in cached(tmp_path, repo) if path.name.endswith("incomplete")]


def test_damaged_bytes_are_refused_and_only_that_shard_is_fetched_again(
    hub: PullHub, repo: str, weights: Path, tmp_path: Path
) -> None:
    hub.publish(repo, weights)
    shard = "model-00003-of-00005.safetensors"
    entry = hub.view(repo).files()[shard]
    hub.view(repo).corrupt(shard, at=1_000_000)

    outcome = hub.refused("pull", repo, cache_dir=tmp_path)

    assert outcome.error == "IntegrityError"
    assert f"'{shard}' of '{repo}' arrived damaged: its sha256 is " in outcome.message
    assert f"and the Hub lists {entry.sha256} ({hub.server.endpoint}/{repo}/resolve/" in outcome.message
    assert len(cached(tmp_path, repo)) == SHARDS - 1 + 2  # the whole shards, config and index
    assert not [path for path in cached(tmp_path, repo) if path.name.startswith(entry.sha256)]
    hub.view(repo).mend(shard, (weights / shard).read_bytes())
    directory = hub.call("pull", repo, cache_dir=tmp_path)
    assert hub.kinds()["storage_get"] == 1
    assert hub.weights_down(repo) == (weights / shard).stat().st_size
    assert files_of(Path(directory)).items() >= files_of(weights).items()


def test_torn_remains_of_an_earlier_pull_are_fetched_again(
    hub: PullHub, repo: str, weights: Path, tmp_path: Path
) -> None:
    hub.publish(repo, weights)
    entry = hub.view(repo).files()["model-00001-of-00005.safetensors"]
    blobs = tmp_path / ("models--" + repo.replace("/", "--")) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{entry.sha256}.hfshard.incomplete").write_bytes(bytes(500_000))

    directory = hub.call("pull", repo, cache_dir=tmp_path)

    assert files_of(Path(directory)).items() >= files_of(weights).items()
    assert hub.weights_down(repo) == size_of(weights) + entry.size - 500_000


def test_what_keeps_failing_is_given_up_and_what_came_is_kept(hub: PullHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", 1)
    repos = {name: f"{repo}-{name}" for name in ("storage", "info", "nobody")}
    for one in repos.values():
        hub.publish(one, folder)
    storage = f"_get /{repos['storage']}/.*(safetensors|X-)"
    hub.server.fail(Fault(match=storage, kind="drop", after_bytes=10_000))
    hub.server.fail(Fault(match=storage, kind="status", status=502, times=99))
    hub.server.fail(Fault(match=f"info .*{repos['info']}", kind="status", status=503, times=99))
    nobody = {"ENDPOINT": "http://127.0.0.1:9"}
    # All at once: each would wait 15.5 s in all.
    tasks = {
        name: hub.start("load_hastily", one, tmp_path / name, settings=nobody if name == "nobody" else {})
        for name, one in repos.items()
    }

    outcomes = {name: task.outcome() for name, task in tasks.items()}

    assert {name: outcome.error for name, outcome in outcomes.items()} == dict.fromkeys(repos, "HubConnectionError")
    assert "the connection failed 6 times in a row, the last time with: HTTP 502" in outcomes["storage"].message
    assert "10,000 bytes are kept in '" in outcomes["storage"].message
    assert outcomes["storage"].message.endswith("check the network and run it again, it continues from there.")
    assert "could not answer" in outcomes["info"].message
    assert "The connection to http://127.0.0.1:9 failed" in outcomes["nobody"].message
    hub.server.clear_faults()
    hub.call("load", repos["storage"], tmp_path / "storage")
    assert hub.weights_down(repos["storage"]) == (folder / "model.safetensors").stat().st_size - 10_000


def test_pull_stays_at_the_commit_that_it_began_with(hub: PullHub, repo: str, weights: Path, tmp_path: Path) -> None:
    first = hub.publish(repo, weights)
    other = saved(tmp_path / "other", 2, LIMIT, size="large")
    gate = hub.server.fail(Fault(match=f"lfs_batch /{repo}.git", kind="race", action=lambda: hub.publish(repo, other)))

    directory = hub.call("pull", repo, cache_dir=tmp_path / "cache", verify="full")

    assert gate.reached.is_set()
    assert Path(directory).name == first
    assert files_of(Path(directory)).items() >= files_of(weights).items()


def test_token_stays_with_the_hub(hub: PullHub, repo: str, weights: Path, tmp_path: Path) -> None:
    hub.publish(repo, weights, private=True)
    hub.server.fail(Fault(match=f"lfs_batch /{repo}.git/", kind="status", status=404))

    hub.call("pull", repo, cache_dir=tmp_path / "resolved")
    redirected = {(request.origin, request.token) for request in hub.server.log}
    hub.call("pull", repo, cache_dir=tmp_path / "batched")

    assert redirected == {("api", "hf_write"), ("storage", None)}
    assert {(request.origin, request.token) for request in hub.server.log} == redirected
