"""Pulls that are disturbed, and what a pull says when it can't have what it wants; counted in bytes."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import processes
from tests.hub.models import files_of, saved
from tests.hub.pull.pull_hub import PullHub, cached
from tests.hub.server_fixture import new_repo_id

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


DROPS = (1, 70_000, 300_001, 900_000, 1_500_000)
FAULTS: dict[str, list[dict[str, Any]]] = {
    "fin": [{"kind": "drop", "after_bytes": at, "how": "fin"} for at in DROPS],
    "rst": [{"kind": "drop", "after_bytes": at, "how": "rst"} for at in DROPS],
    "busy": [{"kind": "status", "status": 503, "times": 3}],
    "limited": [{"kind": "status", "status": 429, "retry_after": 2.0}],
    "expired": [{"kind": "expired", "times": 3}],
    "truncated": [{"kind": "truncate", "after_bytes": 100_000}],
    "no batch": [{"kind": "status", "status": 404, "times": 9}],
}
"""Name -> what goes wrong, so that each pull still completes."""


@pytest.fixture(scope="module")
def disturbed(
    module_hub: PullHub, weights: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, SimpleNamespace]:
    """Name of what goes wrong -> a pull through it."""
    hub, root = module_hub, tmp_path_factory.mktemp("disturbed")
    hub.server.clear_log()
    # All at once: each waits for itself.
    repos = {name: new_repo_id() for name in FAULTS}
    for name, one in repos.items():
        hub.publish(one, weights)
        for fault in FAULTS[name]:
            hub.fail(f"storage_get /{one}/" if name != "no batch" else f"lfs_batch /{one}.git/", **fault)
    tasks = {name: hub.start("pull", one, cache_dir=root / name) for name, one in repos.items()}
    outcomes = {name: task.outcome() for name, task in tasks.items()}
    return {
        name: SimpleNamespace(
            outcome=outcomes[name],
            kinds=Counter(request.kind for request in hub.requests_of(one)),
            hits=sum(bool(request.fault) for request in hub.requests_of(one)),
            weights_down=hub.weights_down(one),
        )
        for name, one in repos.items()
    }


def test_pull_completes_through_every_fault(disturbed: dict[str, SimpleNamespace], weights: Path) -> None:
    for name, one in disturbed.items():
        assert one.outcome.error is None, f"{name}: {one.outcome.trace}"
        assert files_of(Path(one.outcome.result)).items() >= files_of(weights).items(), name


def test_pull_fetches_nothing_twice_through_any_fault(disturbed: dict[str, SimpleNamespace], weights: Path) -> None:
    size = size_of(weights)
    for name, one in disturbed.items():
        assert size <= one.weights_down <= size * 1.05, name


def test_every_fault_hits_as_often_as_it_should(disturbed: dict[str, SimpleNamespace]) -> None:
    hits = {name: one.hits for name, one in disturbed.items()}
    assert hits == {"fin": 5, "rst": 5, "busy": 3, "limited": 1, "expired": 3, "truncated": 1, "no batch": 1}


def test_pull_waits_as_long_as_the_hub_asks(disturbed: dict[str, SimpleNamespace]) -> None:
    assert disturbed["limited"].outcome.seconds >= 2


def test_expired_urls_are_asked_for_again_one_by_one(disturbed: dict[str, SimpleNamespace]) -> None:
    assert disturbed["expired"].kinds["lfs_batch"] == 4  # one for all, and one for each that had expired


def test_pull_resolves_each_shard_where_the_hub_has_no_batches(disturbed: dict[str, SimpleNamespace]) -> None:
    assert disturbed["no batch"].kinds["lfs_batch"] == 1
    # config, index and .gitattributes are not of LFS
    assert disturbed["no batch"].kinds["resolve_get"] == SHARDS + 3


def test_killed_pull_goes_on_where_it_stopped(hub: PullHub, repo: str, weights: Path, tmp_path: Path) -> None:
    hub.publish(repo, weights)
    sent = 1_000_000
    gates = [hub.fail(f"storage_get /{repo}/", "slow", after_bytes=sent, gate=Event()) for _ in range(SHARDS)]
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


@pytest.fixture(scope="module")
def damage(module_hub: PullHub, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A pull that met one damaged shard and what the cache kept of it, and the pull after the shard was mended."""
    hub, repo, cache = module_hub, new_repo_id(), tmp_path_factory.mktemp("damage")
    hub.publish(repo, weights)
    sha256 = hub.view(repo).files()[DAMAGED].sha256
    hub.view(repo).corrupt(DAMAGED, at=1_000_000)
    found = SimpleNamespace(repo=repo, endpoint=hub.server.endpoint, sha256=sha256)
    found.refused = hub.refused("pull", repo, cache_dir=cache)
    found.kept = [path.name for path in cached(cache, repo)]
    hub.view(repo).mend(DAMAGED, (weights / DAMAGED).read_bytes())
    found.directory = Path(hub.call("pull", repo, cache_dir=cache))
    found.storage_gets, found.weights_down = hub.kinds()["storage_get"], hub.weights_down(repo)
    return found


def test_damaged_bytes_are_refused_with_both_hashes(damage: SimpleNamespace) -> None:
    assert damage.refused.error == "IntegrityError"
    assert f"'{DAMAGED}' of '{damage.repo}' arrived damaged: its sha256 is " in damage.refused.message
    listed = f"but the Hub lists {damage.sha256} ({damage.endpoint}/{damage.repo}/resolve/"
    assert listed in damage.refused.message


def test_cache_keeps_all_but_the_damaged_shard(damage: SimpleNamespace) -> None:
    assert len(damage.kept) == SHARDS - 1 + 2  # the whole shards, config and index
    assert not [name for name in damage.kept if name.startswith(damage.sha256)]


def test_only_the_damaged_shard_is_fetched_again(damage: SimpleNamespace, weights: Path) -> None:
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
    hub.fail(storage, "drop", after_bytes=10_000)
    hub.fail(storage, "status", status=502, times=99)
    hub.fail(f"info .*{repos['info']}", "status", status=503, times=99)
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
    assert outcomes["storage"].message.endswith("Check the network and try again: the download continues from there.")
    assert "could not handle the request" in outcomes["info"].message
    assert "The connection to http://127.0.0.1:9 failed" in outcomes["nobody"].message
    hub.server.clear_faults()
    hub.call("load", repos["storage"], tmp_path / "storage")
    assert hub.weights_down(repos["storage"]) == (folder / "model.safetensors").stat().st_size - 10_000


def test_pull_stays_at_the_commit_that_it_began_with(hub: PullHub, repo: str, weights: Path, tmp_path: Path) -> None:
    first = hub.publish(repo, weights)
    other = saved(tmp_path / "other", 2, LIMIT, size="large")
    gate = hub.fail(f"lfs_batch /{repo}.git", "race", action=lambda: hub.publish(repo, other))

    directory = hub.call("pull", repo, cache_dir=tmp_path / "cache", verify="full")

    assert gate.reached.is_set()
    assert Path(directory).name == first
    assert files_of(Path(directory)).items() >= files_of(weights).items()


def test_token_stays_with_the_hub(hub: PullHub, repo: str, weights: Path, tmp_path: Path) -> None:
    hub.publish(repo, weights, private=True)
    hub.fail(f"lfs_batch /{repo}.git/", "status", status=404)

    hub.call("pull", repo, cache_dir=tmp_path / "resolved")
    redirected = {(request.origin, request.token) for request in hub.server.log}
    hub.call("pull", repo, cache_dir=tmp_path / "batched")

    assert redirected == {("api", "hf_write"), ("storage", None)}
    assert {(request.origin, request.token) for request in hub.server.log} == redirected


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small model of 9 shards."""
    return saved(tmp_path_factory.mktemp("weights"), 1, 10_000)


@pytest.mark.parametrize("task", ["load", "load_auto", "read", "read by ranges"])
def test_repo_that_is_not_there(task: str, hub: PullHub, tmp_path: Path) -> None:
    ranges = {"ranges": True} if "ranges" in task else {}

    outcome = hub.refused(task.split()[0], "org/no-such", tmp_path, **ranges)

    assert outcome.error == "HubNotFoundError"
    assert outcome.message.startswith(f"There is no repo 'org/no-such' on {hub.server.endpoint}, or it is private")
    assert "the token '…' from the environment variable HF_TOKEN" in outcome.message
    assert hub.server.count() == 1
    assert list(tmp_path.iterdir()) == []


def test_private_repo_and_whose_token_it_was(hub: PullHub, repo: str, small: Path, tmp_path: Path) -> None:
    hub.publish(repo, small, private=True)

    of_nobody = hub.refused("load", repo, tmp_path, token=False)
    of_another = hub.refused("load", repo, tmp_path, token="hf_read")
    unknown = hub.refused("load", repo, tmp_path, token="hf_never")

    assert of_nobody.error == "HubAccessError"
    assert "no token, because token=False was passed" in of_nobody.message
    assert of_another.error == "HubNotFoundError"
    assert "the token '…' that was passed" in of_another.message
    assert unknown.error == "HubAccessError"
    assert "the token '…' that was passed" in unknown.message
    assert hub.call("load", repo, tmp_path, token="hf_member")


def test_gated_repo_says_where_to_ask(hub: PullHub, repo: str, small: Path, tmp_path: Path) -> None:
    hub.publish(repo, small, gated=True)

    outcome = hub.refused("load", repo, tmp_path, token="hf_read")

    assert outcome.error == "HubAccessError"
    assert f"'{repo}' is gated" in outcome.message
    assert f"Accept its conditions on {hub.server.endpoint}/{repo}" in outcome.message


@pytest.fixture
def published(hub: PullHub, repo: str, small: Path) -> str:
    """A repo with a small model of 9 shards."""
    hub.publish(repo, small)
    return repo


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"revision": "v9"}, "HubNotFoundError", "has no revision 'v9'"),
        ({"revision": "f" * 40}, "HubNotFoundError", f"has no revision '{'f' * 40}'"),
        ({"variant": "fp16"}, "CheckpointNotFoundError", "has no weights of variant 'fp16': none of model.fp16"),
        ({"subfolder": "sub"}, "CheckpointNotFoundError", "has no weights in the folder 'sub'"),
        ({"subfolder": "../up"}, "InvalidArgumentError", "subfolder must be a folder of the repo"),
        ({"subfolder": "a//b"}, "InvalidArgumentError", "got 'a//b'"),
        ({"use_safetensors": False}, "CheckpointNotFoundError", "none of pytorch_model.bin"),
    ],
    ids=str,
)
def test_what_the_repo_has_not(
    options: dict[str, object], error: str, says: str, hub: PullHub, published: str, tmp_path: Path
) -> None:
    outcome = hub.refused("load", published, tmp_path, **options)

    assert (outcome.error, says in outcome.message) == (error, True), outcome.message
    assert hub.kinds()["storage_get"] == 0


@pytest.mark.parametrize(("task", "subfolder"), [("load", ""), ("load", "run"), ("read", ""), ("diff", "")])
def test_parts_of_ranks_are_not_called_no_weights(
    task: str, subfolder: str, hub: PullHub, repo: str, tmp_path: Path
) -> None:
    folder = tmp_path / "files" / subfolder
    for name in ("global_step9/zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_to_fp32.py", "latest"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    hub.publish(repo, tmp_path / "files")
    options = {"subfolder": subfolder} if subfolder else {}

    outcome = hub.refused(task, repo, repo if task == "diff" else tmp_path / "to", **options)

    assert outcome.error == "CheckpointNotFoundError"
    place = f"{repo}/{subfolder}" if subfolder else repo
    assert outcome.message.startswith(
        f"'{place}' contains a model that DeepSpeed saved in parts for each rank in 'global_step9'. Download it to a "
        "directory DIR. To load the weights, pass 'DIR/global_step9'"
    )


def test_revision_in_the_name_is_told_where_it_goes(hub: PullHub, tmp_path: Path) -> None:
    outcome = hub.refused("load", "org/m@v1", tmp_path)

    assert "Pass revisions separately: 'org/m' with revision='v1' (--revision v1)." in outcome.message
    assert hub.kinds() == {}


def test_index_that_names_a_shard_that_is_not_there(hub: PullHub, published: str, tmp_path: Path) -> None:
    hub.view(published).commit({"model-00002-of-00009.safetensors": None}, "Lose a shard")

    outcome = hub.refused("load", published, tmp_path)

    assert outcome.error == "CheckpointNotFoundError"
    assert f"'{published}' lacks 'model-00002-of-00009.safetensors', which its index names" in outcome.message
    assert hub.kinds()["storage_get"] == 0


@pytest.fixture(scope="module", params=["offline", "local only"])
def lack(
    request: pytest.FixtureRequest, module_hub: PullHub, small: Path, tmp_path_factory: pytest.TempPathFactory
) -> SimpleNamespace:
    """Loads that may not download, from an empty cache and from one that lacks a shard, and one that may."""
    hub, repo, cache = module_hub, new_repo_id(), tmp_path_factory.mktemp("lack")
    options: dict[str, object] = {"local_files_only": True}
    words = ("local_files_only=True allows no download", "without local_files_only")
    if request.param == "offline":
        options = {"settings": {"HF_HUB_OFFLINE": True}, "environment": {"HF_HUB_OFFLINE": "1"}}
        words = ("offline mode is on (HF_HUB_OFFLINE)", "with HF_HUB_OFFLINE unset")
    hub.publish(repo, small)
    found = SimpleNamespace(repo=repo, cache=cache, words=words)
    found.empty = hub.refused("load", repo, cache, **options)
    hub.call("load", repo, cache)
    next(path for path in cached(cache, repo, "snapshots") if path.name.startswith("model-00004")).resolve().unlink()
    found.a_part = hub.refused("load", repo, cache, **options)
    found.asked = hub.server.count()
    hub.call("load", repo, cache)
    found.repaired = hub.kinds()
    return found


def test_empty_cache_is_told_by_name(lack: SimpleNamespace) -> None:
    assert lack.empty.error == "CheckpointNotFoundError"
    assert f"'{lack.repo}' at revision 'main' is not in the cache '{lack.cache}'" in lack.empty.message


def test_shard_that_the_cache_lacks_is_told_by_name(lack: SimpleNamespace) -> None:
    assert lack.a_part.error == "CheckpointNotFoundError"
    assert "it lacks 'model-00004-of-00009.safetensors'" in lack.a_part.message
    assert f"'{lack.repo}' (commit " in lack.a_part.message


def test_incomplete_cache_says_why_nothing_is_downloaded_and_what_to_do(lack: SimpleNamespace) -> None:
    why, todo = lack.words
    for outcome in (lack.empty, lack.a_part):
        assert why in outcome.message
        assert f"Load it once {todo}; to list the files of the repo, run: hf models ls {lack.repo}" in outcome.message


def test_hub_is_asked_only_for_what_an_incomplete_cache_lacks_and_only_where_it_may_be(lack: SimpleNamespace) -> None:
    assert lack.asked == 0
    assert lack.repaired == {"info": 1, "lfs_batch": 1, "storage_get": 1}


def test_offline_variable_is_obeyed_by_a_process_of_its_own(hub: PullHub, published: str, tmp_path: Path) -> None:
    hub.call("read", published, tmp_path)
    code = f"import hfshard; print(len(hfshard.load_state_dict({published!r}, cache_dir={str(tmp_path)!r})))"

    environment = {**hub.environment, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "error"}
    done = processes.run(["-c", code], env=environment)

    assert (done.returncode, done.stdout) == (0, "23\n"), done.stderr
    assert hub.server.count() == 13  # those of the call before


@pytest.mark.parametrize("failure", ["refused", "busy"])
def test_complete_cache_serves_where_the_hub_does_not_answer(
    failure: str, hub: PullHub, published: str, tmp_path: Path
) -> None:
    before = hub.call("load", published, tmp_path)
    hub.server.clear_log()
    if failure == "busy":
        hub.fail(f"info .*{published}", "status", status=503, times=99)
    settings = {"ENDPOINT": "http://127.0.0.1:9"} if failure == "refused" else {}

    outcome = hub.start("load", published, tmp_path, settings=settings).outcome()

    assert (outcome.error, outcome.result) == (None, before)
    (warning,) = outcome.log
    assert "Using the files in the cache: commit " in warning
    assert hub.server.count() == (1 if failure == "busy" else 0)


def test_no_right_is_no_failure_of_the_network(hub: PullHub, published: str, tmp_path: Path) -> None:
    hub.call("load", published, tmp_path)
    hub.view(published).private = True

    assert hub.refused("load", published, tmp_path, token="hf_read").error == "HubNotFoundError"
