"""Pulls that are disturbed: broken connections, busy servers, expired URLs, kills, damaged bytes; counted in bytes."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hub.models import files_of, saved
from tests.hub.pull.pull_hub import PullHub, cached
from tests.hub.server_fixture import Outcome, new_repo_id
from tests.hubserver.hub_server import Fault, Request

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


@dataclass(frozen=True)
class Disturbed:
    """A pull through a fault."""

    outcome: Outcome
    requests: list[Request]
    weights_down: int

    def count(self, kind: str) -> int:
        """Count its requests of one kind."""
        return [request.kind for request in self.requests].count(kind)


@pytest.fixture(scope="module")
def disturbed(module_hub: PullHub, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Disturbed]:
    """Name of what goes wrong -> a pull through it."""
    hub, root = module_hub, tmp_path_factory.mktemp("disturbed")
    hub.server.clear_log()
    # All at once: each waits for itself.
    repos = {name: new_repo_id() for name in faults_for("")}
    for name, one in repos.items():
        hub.publish(one, weights)
        for fault in faults_for(f"storage_get /{one}/" if name != "no batch" else f"lfs_batch /{one}.git/")[name]:
            hub.server.fail(fault)
    tasks = {name: hub.start("pull", one, cache_dir=root / name) for name, one in repos.items()}
    outcomes = {name: task.outcome() for name, task in tasks.items()}
    return {name: Disturbed(outcomes[name], hub.requests_of(one), hub.weights_down(one)) for name, one in repos.items()}


def test_pull_completes_through_every_fault(disturbed: dict[str, Disturbed], weights: Path) -> None:
    expected = files_of(weights)
    for name, one in disturbed.items():
        assert one.outcome.error is None, f"{name}: {one.outcome.trace}"
        pulled = files_of(Path(one.outcome.result))
        assert {path: pulled[path] for path in expected} == expected, name


def test_pull_fetches_nothing_twice_through_any_fault(disturbed: dict[str, Disturbed], weights: Path) -> None:
    size = size_of(weights)
    for name, one in disturbed.items():
        assert size <= one.weights_down <= size * 1.05, name


def test_every_fault_hits_as_often_as_it_should(disturbed: dict[str, Disturbed]) -> None:
    hits = {name: sum(bool(request.fault) for request in one.requests) for name, one in disturbed.items()}
    assert hits == {"fin": 5, "rst": 5, "busy": 3, "limited": 1, "expired": 3, "truncated": 1, "no batch": 1}


def test_pull_waits_as_long_as_the_hub_asks(disturbed: dict[str, Disturbed]) -> None:
    assert disturbed["limited"].outcome.seconds >= 2


def test_expired_urls_are_asked_for_again_one_by_one(disturbed: dict[str, Disturbed]) -> None:
    assert disturbed["expired"].count("lfs_batch") == 4  # one for all, and one for each that had expired


def test_pull_resolves_each_shard_where_the_hub_has_no_batches(disturbed: dict[str, Disturbed]) -> None:
    assert disturbed["no batch"].count("lfs_batch") == 1
    # config, index and .gitattributes are not of LFS
    assert disturbed["no batch"].count("resolve_get") == SHARDS + 3


def test_killed_pull_goes_on_where_it_stopped(hub: PullHub, repo: str, weights: Path, tmp_path: Path) -> None:
    hub.publish(repo, weights)
    sent = 1_000_000
    gates = [
        hub.server.fail(Fault(match=f"storage_get /{repo}/", kind="slow", after_bytes=sent, gate=threading.Event()))
        for _ in range(SHARDS)
    ]
    task = hub.start("pull", repo, cache_dir=tmp_path)
    for gate in gates:
        assert gate.reached.wait(60)
    while sum(path.stat().st_size >= sent for path in cached(tmp_path, repo)) < SHARDS:
        assert task.runs()
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


DAMAGED = "model-00003-of-00005.safetensors"


@dataclass(frozen=True)
class Damage:
    """A pull that met one damaged shard, and the pull after the shard was mended."""

    repo: str
    endpoint: str
    sha256: str
    """Of the shard, as the Hub lists it."""
    refused: Outcome
    kept: list[str]
    """Blobs in the cache after the refusal."""
    directory: Path
    storage_gets: int
    weights_down: int
    """Of the pull after the shard was mended, as above."""


@pytest.fixture(scope="module")
def damage(module_hub: PullHub, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Damage:
    """A shard is damaged, refused, mended and pulled again."""
    hub, repo, cache = module_hub, new_repo_id(), tmp_path_factory.mktemp("damage")
    hub.publish(repo, weights)
    sha256 = hub.view(repo).files()[DAMAGED].sha256
    hub.view(repo).corrupt(DAMAGED, at=1_000_000)
    refused = hub.refused("pull", repo, cache_dir=cache)
    kept = [path.name for path in cached(cache, repo)]
    hub.view(repo).mend(DAMAGED, (weights / DAMAGED).read_bytes())
    directory = Path(hub.call("pull", repo, cache_dir=cache))
    gets, down = hub.kinds()["storage_get"], hub.weights_down(repo)
    return Damage(repo, hub.server.endpoint, sha256, refused, kept, directory, gets, down)


def test_damaged_bytes_are_refused_with_both_hashes(damage: Damage) -> None:
    assert damage.refused.error == "IntegrityError"
    assert f"'{DAMAGED}' of '{damage.repo}' arrived damaged: its sha256 is " in damage.refused.message
    listed = f"and the Hub lists {damage.sha256} ({damage.endpoint}/{damage.repo}/resolve/"
    assert listed in damage.refused.message


def test_cache_keeps_all_but_the_damaged_shard(damage: Damage) -> None:
    assert len(damage.kept) == SHARDS - 1 + 2  # the whole shards, config and index
    assert not [name for name in damage.kept if name.startswith(damage.sha256)]


def test_only_the_damaged_shard_is_fetched_again(damage: Damage, weights: Path) -> None:
    assert damage.storage_gets == 1
    assert damage.weights_down == (weights / DAMAGED).stat().st_size
    assert files_of(damage.directory).items() >= files_of(weights).items()


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
