"""Runs on a Hub: pushed checkpoint by checkpoint, and resumed from there on a machine that has nothing."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hfshard.format.index import sha256_of
from hfshard.format.strict_json import dump_json
from tests.hub.models import contents
from tests.servers.hub.hub_server import Fault
from tests.training.run.run_hub import RunHub

TITLES = ["initial commit", "Checkpoint at step 1", "Checkpoint at step 2", "Checkpoint at step 3"]


@pytest.mark.compat
def test_each_push_is_one_commit_that_leaves_nothing_of_the_checkpoint_before(
    hub: RunHub, repo: str, tmp_path: Path
) -> None:
    users = {"README.md": b"# Mine\n", "tokenizer.json": b"{}\n", "optimizer.bin": b"of another tool"}
    hub.push(repo, 1)
    first = hub.checkpoint(1)
    last = {
        "model-00011-of-00011.safetensors",
        "optimizer-00019-of-00019.safetensors",
        "state-00003-of-00003.safetensors",
    }
    assert last <= first.keys()
    assert hub.held(repo) == first
    hub.view(repo).commit(users, "Add files")

    hub.push(repo, 2)

    assert hub.held(repo) == {**hub.checkpoint(2), **users}
    assert {"model.safetensors", "optimizer.safetensors", "state.safetensors"} <= hub.checkpoint(2).keys()
    hub.push(repo, 3)
    assert hub.held(repo) == {**hub.checkpoint(3), **users}
    assert hub.titles(repo) == [*TITLES[:2], "Add files", *TITLES[2:]]
    loaded = hub.done("load_stock", repo, settings={"HF_HUB_CACHE": str(tmp_path)}).result
    assert loaded == hub.models["3"]


def test_unchanged_push_makes_no_commit_and_sends_nothing(hub: RunHub, repo: str) -> None:
    first = hub.push(repo)
    assert first["is_new"]
    assert first["sent_bytes"] == sum(map(len, hub.checkpoint(3).values()))
    again = hub.push(repo)
    assert (again["is_new"], again["commit"], again["sent_bytes"]) == (False, first["commit"], 0)
    kinds = hub.kinds()
    assert kinds["commit"] == kinds["lfs_put"] == kinds["preupload"] == kinds["lfs_batch"] == 0
    assert hub.titles(repo) == [TITLES[0], TITLES[3]]


def test_push_takes_the_latest_or_the_best_and_a_message(hub: RunHub, repo: str) -> None:
    hub.push(repo)
    hub.push(repo, "best")
    hub.push(repo, 1, commit_message="The first", revision="old", private=True)
    assert hub.titles(repo) == [TITLES[0], TITLES[3], TITLES[2]]  # the least loss is that of step 2
    assert hub.titles(repo, "old")[-1] == "The first"
    assert hub.held(repo, "old") == hub.checkpoint(1)


def test_push_to_a_pull_request_leaves_main(hub: RunHub, repo: str) -> None:
    hub.push(repo, 1)
    pushed = hub.push(repo, 2, create_pr=True)
    assert pushed["pr_url"].endswith("/discussions/1")
    assert hub.held(repo) == hub.checkpoint(1)
    assert hub.held(repo, "refs/pr/1") == hub.checkpoint(2)


@pytest.mark.compat
def test_all_are_pushed_in_order_and_none_twice(hub: RunHub, repo: str) -> None:
    assert len(hub.push(repo, "all")) == 3
    assert hub.titles(repo) == TITLES
    commits = hub.view(repo).commits()
    for step in (1, 2, 3):
        assert hub.held(repo, commits[3 - step].oid) == hub.checkpoint(step)
    assert hub.push(repo, "all") == []
    assert hub.kinds()["commit"] == 0


def test_all_skips_what_the_branch_has(hub: RunHub, repo: str) -> None:
    assert len(hub.push(repo, 2)) > 0
    assert len(hub.push(repo, "all")) == 1
    assert hub.titles(repo) == [TITLES[0], TITLES[2], TITLES[3]]
    assert len(hub.push(repo, "all", revision="copy")) == 0  # a new branch begins at main


def test_all_goes_on_after_a_checkpoint_that_is_gone_here(hub: RunHub, repo: str, tmp_path: Path) -> None:
    hub.push(repo, 2)
    hub.done("train", tmp_path / "moved", first=3)  # what a new machine saves: its first checkpoint is of step 3
    assert len(hub.push(repo, "all", run=tmp_path / "moved")) == 1
    assert hub.titles(repo) == [TITLES[0], TITLES[2], TITLES[3]]


def test_all_of_an_older_copy_is_refused(hub: RunHub, repo: str, tmp_path: Path) -> None:
    hub.push(repo)
    hub.done("train", tmp_path / "copy", last=2)
    outcome = hub.refused("push", tmp_path / "copy", repo, "all")
    assert outcome.error == "HubError"
    assert outcome.message == (
        f"'{repo}' is at the checkpoint of step 3, which is newer than all of these and not one of them. Push to "
        "another revision; or, to replace it with one of these, pass its step."
    )
    assert hub.titles(repo) == [TITLES[0], TITLES[3]]


def test_damaged_checkpoint_is_not_pushed(hub: RunHub, repo: str, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        for name, raw in hub.checkpoint(step).items():
            path = tmp_path / f"checkpoint-{step:08d}" / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(raw)
    optimizer = tmp_path / "checkpoint-00000002" / "optimizer.safetensors"
    damaged = bytearray(optimizer.read_bytes())
    damaged[60_000] ^= 1
    optimizer.write_bytes(damaged)
    for wanted in (2, "all"):
        outcome = hub.refused("push", tmp_path, repo, wanted)
        assert outcome.error == "IntegrityError"
        assert str(optimizer) in outcome.message
    assert hub.server.bytes_up("lfs_put") == 0
    (tmp_path / "checkpoint-00000003" / "checkpoint.json").unlink()
    assert hub.refused("push", tmp_path, repo).error == "MissingShardError"


def test_killed_push_leaves_the_old_checkpoint_and_the_next_one_sends_the_rest(hub: RunHub, repo: str) -> None:
    hub.push(repo, 1)
    hub.server.clear_log()
    before = hub.held(repo)
    gate = threading.Event()
    fault = hub.server.fail(Fault(match="POST commit", kind="slow", after_bytes=1_000, gate=gate))
    task = hub.start("push", hub.run, repo, 2)
    assert fault.reached.wait(60)
    task.kill()
    sent = sum(len(raw) for name, raw in hub.checkpoint(2).items() if name.endswith(".safetensors"))
    assert hub.server.bytes_up("lfs_put") == sent
    assert hub.held(repo) == before
    gate.set()
    hub.push(repo, 2)
    assert hub.held(repo) == hub.checkpoint(2)
    assert hub.server.bytes_up("lfs_put") == 0
    assert hub.titles(repo) == TITLES[:3]


@pytest.mark.compat
def test_run_resumes_exactly_on_an_empty_machine(hub: RunHub, repo: str, tmp_path: Path) -> None:
    commit = hub.push(repo, "all")[2]["commit"]
    resumed = hub.resume(repo, tmp_path)
    assert (resumed["step"], resumed["metrics"]) == (3, {"loss": 0.75})
    assert (resumed["restored"], resumed["end"]) == (hub.digests["3"], hub.digests["4"])
    assert resumed["path"].endswith(f"/snapshots/{commit}")
    kinds = hub.kinds()
    assert (kinds["info"], kinds["resolve_head"]) == (1, 0)


def test_run_resumes_exactly_from_an_older_commit(hub: RunHub, repo: str, tmp_path: Path) -> None:
    commit = hub.push(repo, "all")[0]["commit"]
    older = hub.resume(f"{repo}@{commit}", tmp_path)
    assert (older["step"], older["restored"], older["end"]) == (1, hub.digests["1"], hub.digests["4"])


@pytest.mark.compat
def test_what_is_in_the_cache_is_not_downloaded_again(hub: RunHub, repo: str, tmp_path: Path) -> None:
    commit = hub.push(repo)["commit"]
    hub.resume(repo, tmp_path)

    assert hub.resume(repo, tmp_path)["step"] == 3
    assert hub.kinds() == {"info": 1}
    assert hub.resume(f"{repo}@{commit}", tmp_path)["step"] == 3
    assert hub.kinds() == {}  # a commit never changes: no request at all


def test_offline_the_cache_serves(hub: RunHub, repo: str, tmp_path: Path) -> None:
    hub.push(repo, 2)
    offline = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": True}
    outcome = hub.refused_resume(repo, tmp_path, settings=offline)
    assert outcome.error == "CheckpointNotFoundError"
    assert "offline mode is on" in outcome.message
    hub.resume(repo, tmp_path)
    hub.server.clear_log()
    resumed = hub.done("restore", tmp_path / "no run", repo, settings=offline).result
    assert resumed["restored"] == hub.digests["2"]
    assert hub.server.log == []


def test_what_is_no_training_checkpoint_is_told(hub: RunHub, repo: str, tmp_path: Path) -> None:
    model = {name: raw for name, raw in hub.checkpoint(2).items() if name in ("model.safetensors", "config.json")}
    hub.server.create_repo(repo).commit(model, "A model")
    outcome = hub.refused_resume(repo, tmp_path)
    assert outcome.error == "CheckpointNotFoundError"
    assert f"'{repo}' (commit " in outcome.message
    assert ") holds no training checkpoint: there is no checkpoint.json. It has 'model.safetensors'." in (
        outcome.message
    )
    assert hub.server.bytes_down("storage_get") == 0


def test_parts_of_ranks_on_a_hub_are_told(hub: RunHub, repo: str, tmp_path: Path) -> None:
    parts = {".metadata": b"x", "__0_0.distcp": b"x"}
    hub.server.create_repo(repo).commit({f"step-9/{name}": raw for name, raw in parts.items()}, "DCP")

    outcome = hub.refused_resume(repo, tmp_path)

    assert outcome.error == "CheckpointNotFoundError"
    assert "tensors that torch.distributed.checkpoint (DCP) saved in parts in 'step-9'" in outcome.message
    assert "hfshard convert --weights DIR/step-9 OUT" in outcome.message
    assert "Only the program that saved the optimizer and the rest of the run can resume them" in outcome.message


def test_repos_that_nobody_may_read_or_that_lack_are_told(hub: RunHub, repo: str, tmp_path: Path) -> None:
    assert hub.refused_resume(repo, tmp_path).error == "HubNotFoundError"
    hub.push(repo, 1)
    assert hub.refused_resume(f"{repo}@nowhere", tmp_path).error == "HubNotFoundError"
    hub.view(repo).private = True
    assert hub.refused_resume(repo, tmp_path, token="hf_read").error == "HubNotFoundError"
    assert hub.resume(repo, tmp_path, token="hf_write")["step"] == 1
    assert hub.refused("push", hub.run, repo, 2, token="hf_member").error == "HubAccessError"


@pytest.mark.parametrize(
    "name", [pytest.param("optimizer.safetensors", marks=pytest.mark.compat), "training_state.json"]
)
def test_corrupt_byte_on_the_way_restores_nothing(hub: RunHub, repo: str, tmp_path: Path, name: str) -> None:
    hub.push(repo, 2)
    raw = hub.checkpoint(2)[name]
    hub.view(repo).corrupt(name, at=len(raw) // 2)
    outcome = hub.refused_resume(repo, tmp_path)  # the state is as it was: the task looks
    assert outcome.error == "IntegrityError"
    assert outcome.message.startswith(f"'{name}' of '{repo}' arrived damaged")
    hub.view(repo).mend(name, raw)
    assert hub.resume(repo, tmp_path)["restored"] == hub.digests["2"]


def test_what_rotted_in_the_cache_is_told_and_fetched_anew_when_asked_for(
    hub: RunHub, repo: str, tmp_path: Path
) -> None:
    hub.push(repo, 2)
    path = Path(hub.resume(f"{repo}@main", tmp_path)["path"]) / "optimizer.safetensors"
    blob = path.resolve()
    assert blob != path  # the cache's own, to which the snapshot has a link
    raw = bytearray(blob.read_bytes())
    raw[-1] ^= 1
    blob.write_bytes(raw)
    outcome = hub.refused_resume(f"{repo}@main", tmp_path)
    assert outcome.error == "IntegrityError"
    assert outcome.message.endswith(
        f"To download it again, run: hfshard pull {repo} --revision main --include '*' --force-download"
    )
    cache = {"HF_HUB_CACHE": str(tmp_path)}
    hub.done("pull", repo, revision="main", allow_patterns="*", force_download=True, settings=cache)
    assert hub.resume(repo, tmp_path)["restored"] == hub.digests["2"]


def test_file_that_somebody_changed_on_the_hub_restores_nothing(hub: RunHub, repo: str, tmp_path: Path) -> None:
    hub.push(repo, 2)
    raw = bytearray(hub.checkpoint(2)["state.safetensors"])
    raw[-1] ^= 1
    hub.view(repo).commit({"state.safetensors": bytes(raw)}, "Mine")
    outcome = hub.refused_resume(repo, tmp_path)
    assert outcome.error == "IntegrityError"
    assert "state.safetensors' is not the file that was saved" in outcome.message
    hub.push(repo, 2)  # puts it right
    assert hub.held(repo) == hub.checkpoint(2)


@dataclass(frozen=True, slots=True)
class Hostile:
    """A checkpoint.json that a stranger put on the Hub."""

    raw: bytes
    error: str


def manifest(files: dict[str, bytes], **changes: Any) -> bytes:
    """A manifest that names these files, with its right checksum."""
    table = {name: {"size": len(raw), "sha256": sha256_of(raw)} for name, raw in files.items()}
    body = {"format": 1, "step": 9, "save_number": 9, "metrics": {}, "files": table, **changes}
    return json.dumps({**body, "checksum": sha256_of(dump_json(body))}).encode()


HOSTILE = {
    "leaves the cache": Hostile(manifest({"../../../../evil": b"x"}), "UnsafePathError"),
    "names what is not there": Hostile(manifest({"model.safetensors": b"x"}), "CheckpointNotFoundError"),
    "is no JSON": Hostile(b"\x00" * 100, "DamagedCheckpointError"),
    "has another checksum": Hostile(manifest({}).replace(b'"step": 9', b'"step": 8'), "IntegrityError"),
    "is of another tool": Hostile(b'{"step": 9}', "DamagedCheckpointError"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_manifest_restores_nothing_and_is_pushed_over(
    hub: RunHub, repo: str, tmp_path: Path, kind: str
) -> None:
    hostile = HOSTILE[kind]
    hub.server.create_repo(repo).commit({"checkpoint.json": hostile.raw, "notes.txt": b"mine"}, "Attack")
    assert hub.refused_resume(repo, tmp_path).error == hostile.error
    hub.push(repo, 2)
    assert hub.held(repo) == {**hub.checkpoint(2), "notes.txt": b"mine"}


def test_what_the_manifest_before_names_goes_unless_it_was_changed_or_is_a_users(hub: RunHub, repo: str) -> None:
    named = {"trainer_state.json": b"{}", "vocab.txt": b"a\n", "README.md": b"# Run\n", "big.safetensors": b"x" * 9}
    files = {**named, "checkpoint.json": manifest(named), "vocab.txt": b"changed\n", "notes.txt": b"never named"}
    hub.server.create_repo(repo).commit(files, "A run")
    hub.push(repo, 2)
    left = {name: files[name] for name in ("vocab.txt", "README.md", "notes.txt")}
    assert hub.held(repo) == {**hub.checkpoint(2), **left}


def test_pull_brings_the_model_alone_or_all_that_is_asked_for(hub: RunHub, repo: str, tmp_path: Path) -> None:
    hub.push(repo, 3)
    hub.view(repo).commit({"tokenizer.json": b"{}\n"}, "Add the tokenizer")
    assert hub.done("pull", repo, tmp_path / "model").result is True
    model = {name: raw for name, raw in hub.checkpoint(3).items() if name.startswith(("model", "config"))}
    assert contents(tmp_path / "model") == {**model, "tokenizer.json": b"{}\n"}
    assert hub.done("pull", repo, tmp_path / "all", allow_patterns="*").result is True
    assert contents(tmp_path / "all") == {**hub.checkpoint(3), "tokenizer.json": b"{}\n"}


def test_saves_are_pushed_as_they_are_made(hub: RunHub, repo: str, tmp_path: Path) -> None:
    outcome = hub.done("train", tmp_path / "run", push_to_hub=repo, max_to_keep=1)
    assert outcome.result["error"] == ""
    assert hub.titles(repo) == TITLES
    assert hub.held(repo) == contents(tmp_path / "run" / "checkpoint-00000003")
    assert outcome.log == []


def test_push_that_fails_stops_no_save_and_the_next_one_is_pushed(hub: RunHub, repo: str, tmp_path: Path) -> None:
    hub.server.fail(Fault(match="POST create_repo", kind="status", status=403, times=2))
    outcome = hub.done("train", tmp_path / "run", push_to_hub=f"{repo}@runs")
    assert outcome.result["error"] == ""  # the last one went well
    assert len(outcome.log) == 2
    assert outcome.log[0].startswith(
        f"WARNING hfshard.training.run.push_run: The checkpoint of step 1 was saved, but not pushed to '{repo}': "
    )
    assert len(list((tmp_path / "run").glob("checkpoint-*/checkpoint.json"))) == 3
    assert hub.titles(repo, "runs") == [TITLES[0], TITLES[3]]


def test_error_of_the_last_push_is_raised_by_waiting(hub: RunHub, repo: str, tmp_path: Path) -> None:
    outcome = hub.done("train", tmp_path / "run", push_to_hub=repo, environment={"HF_TOKEN": "hf_read"})
    assert outcome.result["error"] == "HubAccessError"
    assert outcome.result["digests"] == hub.digests  # training went on, and nothing of it changed
    assert len(outcome.log) == 3
