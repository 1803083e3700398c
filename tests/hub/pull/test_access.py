"""What a pull says when it can't have what it wants: no repo, no right, no network, not all of it in the cache."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import forkserver
from tests.hub.models import saved
from tests.hub.pull.pull_hub import PullHub, cached
from tests.hub.server_fixture import Outcome, new_repo_id
from tests.hubserver.hub_server import Fault

pytestmark = pytest.mark.compat
OFFLINE = {"HF_HUB_OFFLINE": True}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small model of 9 shards."""
    return saved(tmp_path_factory.mktemp("weights"), 1, 10_000)


@pytest.mark.parametrize("task", ["load", "load_auto", "read", "read by ranges"])
def test_repo_that_is_not_there(task: str, hub: PullHub, tmp_path: Path) -> None:
    ranges = {"ranges": True} if "ranges" in task else {}

    outcome = hub.refused(task.split()[0], "org/no-such", tmp_path, **ranges)

    assert outcome.error == "HubNotFoundError"
    assert outcome.message.startswith(f"There is no repo 'org/no-such' on {hub.server.endpoint}, or it is private")
    assert "the token '…' of the environment variable HF_TOKEN" in outcome.message
    assert hub.server.count() == 1
    assert list(tmp_path.iterdir()) == []


def test_private_repo_and_whose_token_it_was(hub: PullHub, repo: str, weights: Path, tmp_path: Path) -> None:
    hub.publish(repo, weights, private=True)

    of_nobody = hub.refused("load", repo, tmp_path, token=False)
    of_another = hub.refused("load", repo, tmp_path, token="hf_read")
    unknown = hub.refused("load", repo, tmp_path, token="hf_never")

    assert of_nobody.error == "HubAccessError"
    assert "no token, as token=False was passed" in of_nobody.message
    assert of_another.error == "HubNotFoundError"
    assert "the token '…' that was passed" in of_another.message
    assert unknown.error == "HubAccessError"
    assert "the token '…' that was passed" in unknown.message
    assert hub.call("load", repo, tmp_path, token="hf_member")


def test_gated_repo_says_where_to_ask(hub: PullHub, repo: str, weights: Path, tmp_path: Path) -> None:
    hub.publish(repo, weights, gated=True)

    outcome = hub.refused("load", repo, tmp_path, token="hf_read")

    assert outcome.error == "HubAccessError"
    assert f"'{repo}' is gated" in outcome.message
    assert f"Accept its conditions on {hub.server.endpoint}/{repo}" in outcome.message


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
    options: dict[str, object], error: str, says: str, hub: PullHub, repo: str, weights: Path, tmp_path: Path
) -> None:
    hub.publish(repo, weights)

    outcome = hub.refused("load", repo, tmp_path, **options)

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
    where = {"subfolder": subfolder} if subfolder else {}
    arguments = (repo, repo) if task == "diff" else (repo, tmp_path / "to")

    outcome = hub.refused(task, *arguments, **where)

    assert outcome.error == "CheckpointNotFoundError"
    place = f"{repo}/{subfolder}" if subfolder else repo
    assert outcome.message.startswith(
        f"'{place}' holds a model that DeepSpeed has saved in parts for each rank in 'global_step9', and hfshard "
        "cannot read these yet. Download it to a directory DIR. Merge them with DeepSpeed's script: "
        "python -m deepspeed.utils.zero_to_fp32 DIR OUT (it unpickles"
    )


def test_revision_in_the_name_is_told_where_it_goes(hub: PullHub, tmp_path: Path) -> None:
    outcome = hub.refused("load", "org/m@v1", tmp_path)

    assert "A revision goes by itself: 'org/m' with revision='v1' (--revision v1)." in outcome.message
    assert hub.kinds() == {}


def test_index_that_names_a_shard_that_is_not_there(hub: PullHub, repo: str, weights: Path, tmp_path: Path) -> None:
    hub.publish(repo, weights)
    hub.view(repo).commit({"model-00002-of-00009.safetensors": None}, "Lose a shard")

    outcome = hub.refused("load", repo, tmp_path)

    assert outcome.error == "CheckpointNotFoundError"
    assert f"'{repo}' lacks 'model-00002-of-00009.safetensors', which its index names" in outcome.message
    assert hub.kinds()["storage_get"] == 0


@dataclass(frozen=True)
class Lack:
    """Loads that may not download: from an empty cache, and from one that lacks a shard; and one that may."""

    repo: str
    cache: Path
    empty: Outcome
    a_part: Outcome
    asked: int
    """Requests of a load that may not download."""
    repaired: Counter[str]
    """Requests of the load that may download, by kind."""
    words: tuple[str, str]
    """Why nothing may be downloaded, and how to let it be."""


@pytest.fixture(scope="module", params=["offline", "local only"])
def lack(
    request: pytest.FixtureRequest, module_hub: PullHub, weights: Path, tmp_path_factory: pytest.TempPathFactory
) -> Lack:
    """An incomplete cache, and a load that may not download."""
    hub, repo, cache = module_hub, new_repo_id(), tmp_path_factory.mktemp("lack")
    options: dict[str, object] = {"local_files_only": True}
    words = ("local_files_only=True allows no download", "without local_files_only")
    if request.param == "offline":
        options = {"settings": OFFLINE, "environment": {"HF_HUB_OFFLINE": "1"}}
        words = ("offline mode is on (HF_HUB_OFFLINE)", "with HF_HUB_OFFLINE unset")
    hub.publish(repo, weights)
    empty = hub.refused("load", repo, cache, **options)
    hub.call("load", repo, cache)
    link = next(path for path in cached(cache, repo, "snapshots") if path.name.startswith("model-00004"))
    link.resolve().unlink()
    a_part = hub.refused("load", repo, cache, **options)
    asked = hub.server.count()
    hub.call("load", repo, cache)
    return Lack(repo, cache, empty, a_part, asked, hub.kinds(), words)


def test_empty_cache_is_told_by_name(lack: Lack) -> None:
    assert lack.empty.error == "CheckpointNotFoundError"
    assert f"'{lack.repo}' at revision 'main' is not in the cache '{lack.cache}'" in lack.empty.message


def test_shard_that_the_cache_lacks_is_told_by_name(lack: Lack) -> None:
    assert lack.a_part.error == "CheckpointNotFoundError"
    assert "it lacks 'model-00004-of-00009.safetensors'" in lack.a_part.message
    assert f"'{lack.repo}' (commit " in lack.a_part.message


def test_incomplete_cache_says_why_nothing_is_downloaded_and_what_to_do(lack: Lack) -> None:
    why, todo = lack.words
    for outcome in (lack.empty, lack.a_part):
        assert why in outcome.message
        assert f"Run it once {todo}; to see the files of the repo, run: hf models ls {lack.repo}" in outcome.message


def test_hub_is_asked_only_for_what_an_incomplete_cache_lacks_and_only_where_it_may_be(lack: Lack) -> None:
    assert lack.asked == 0
    assert lack.repaired == {"info": 1, "lfs_batch": 1, "storage_get": 1}


def test_offline_variable_is_obeyed_by_a_process_of_its_own(
    hub: PullHub, repo: str, weights: Path, tmp_path: Path
) -> None:
    hub.publish(repo, weights)
    hub.call("read", repo, tmp_path)
    code = f"import hfshard; print(len(hfshard.load_state_dict({repo!r}, cache_dir={str(tmp_path)!r})))"

    environment = {**hub.environment, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "error"}
    done = forkserver.run(["-c", code], env=environment)

    assert (done.returncode, done.stdout) == (0, "23\n"), done.stderr
    assert hub.server.count() == 13  # those of the call before


@pytest.mark.parametrize("failure", ["refused", "busy"])
def test_complete_cache_serves_where_the_hub_does_not_answer(
    failure: str, hub: PullHub, repo: str, weights: Path, tmp_path: Path
) -> None:
    hub.publish(repo, weights)
    before = hub.call("load", repo, tmp_path)
    hub.server.clear_log()
    if failure == "busy":
        hub.server.fail(Fault(match=f"info .*{repo}", kind="status", status=503, times=99))
    settings = {"ENDPOINT": "http://127.0.0.1:9"} if failure == "refused" else {}

    outcome = hub.start("load", repo, tmp_path, settings=settings).outcome()

    assert (outcome.error, outcome.result) == (None, before)
    (warning,) = outcome.log
    assert "The files in the cache are used: commit " in warning
    assert hub.server.count() == (1 if failure == "busy" else 0)


def test_no_right_is_no_failure_of_the_network(hub: PullHub, repo: str, weights: Path, tmp_path: Path) -> None:
    hub.publish(repo, weights)
    hub.call("load", repo, tmp_path)
    hub.view(repo).private = True

    outcome = hub.refused("load", repo, tmp_path, token="hf_read")

    assert outcome.error == "HubNotFoundError"
