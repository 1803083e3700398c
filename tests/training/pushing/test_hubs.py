"""Runs on a Hub: pushed checkpoint by checkpoint, and resumed from there on a machine that has nothing."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hfshard.storage.format.integrity import sha256_of
from hfshard.storage.format.strict_json import dump_json
from tests.hub.lab import Lab, Outcome
from tests.hub.push.lab import contents, repo
from tests.hubserver.hub_server import Fault, RepoView

__all__ = ["repo"]

HUBS_OWN = ".gitattributes"
TITLES = ["initial commit", "Checkpoint at step 1", "Checkpoint at step 2", "Checkpoint at step 3"]


class RunLab(Lab):
    """A Hub, a client of it, and a run of three checkpoints."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "tests.training.pushing.client")
        self.run = root / "run"
        trained = self.done("train", self.run).result
        self.digests: dict[str, str] = trained["digests"]
        """Step -> of everything after it."""
        self.models: dict[str, str] = trained["models"]

    def push(self, repo_id: str, step: object = None, *, run: Path | None = None, **options: Any) -> Any:
        """Push; the server's log has only its requests."""
        self.hub.clear_log()
        return self.done("push", run or self.run, repo_id, step, **options).result

    def resume(self, place: object, home: Path, **options: Any) -> Any:
        """Resume in a new process with an empty cache and without a run directory."""
        self.hub.clear_log()
        settings = {"HF_HUB_CACHE": str(home)}
        return self.done("restore", home / "no run", place, settings=settings, **options).result

    def refused_resume(self, place: object, home: Path, **options: Any) -> Outcome:
        """Resume, and be refused."""
        self.hub.clear_log()
        settings = {"HF_HUB_CACHE": str(home), **options.pop("settings", {})}
        return self.refused("restore", home / "no run", place, settings=settings, **options)

    def checkpoint(self, step: int) -> dict[str, bytes]:
        """The files of a checkpoint."""
        return contents(self.run / f"checkpoint-{step:08d}")

    def view(self, repo_id: str) -> RepoView:
        """A repo from inside."""
        return self.hub.repo(repo_id)

    def held(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """What the Hub holds, without what it puts there itself."""
        view = self.view(repo_id)
        return {path: view.read(path, revision) for path in view.files(revision) if path != HUBS_OWN}

    def titles(self, repo_id: str, revision: str = "main") -> list[str]:
        """Of the commits, the oldest first."""
        return [commit.title for commit in reversed(self.view(repo_id).commits(revision))]


_LAB = pytest.StashKey[RunLab]()


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[RunLab]:
    """One for the whole run: starting it takes seconds; every test has repos of its own."""
    config = request.config
    if _LAB not in config.stash:
        root = tempfile.TemporaryDirectory(prefix="hfshard-runs-")
        config.add_cleanup(root.cleanup)
        config.stash[_LAB] = RunLab(Path(root.name))
        config.add_cleanup(config.stash[_LAB].stop)
    one = config.stash[_LAB]
    one.hub.clear_faults()
    one.hub.clear_log()
    yield one
    one.hub.clear_faults()


@pytest.mark.compat
def test_each_push_is_one_commit_that_leaves_nothing_of_the_checkpoint_before(
    lab: RunLab, repo: str, tmp_path: Path
) -> None:
    users = {"README.md": b"# Mine\n", "tokenizer.json": b"{}\n", "optimizer.bin": b"of another tool"}
    lab.push(repo, 1)
    first = lab.checkpoint(1)
    last = {
        "model-00011-of-00011.safetensors",
        "optimizer-00019-of-00019.safetensors",
        "state-00003-of-00003.safetensors",
    }
    assert last <= first.keys()
    assert lab.held(repo) == first
    lab.view(repo).commit(users, "Add files")

    lab.push(repo, 2)

    assert lab.held(repo) == {**lab.checkpoint(2), **users}
    assert {"model.safetensors", "optimizer.safetensors", "state.safetensors"} <= lab.checkpoint(2).keys()
    lab.push(repo, 3)
    assert lab.held(repo) == {**lab.checkpoint(3), **users}
    assert lab.titles(repo) == [*TITLES[:2], "Add files", *TITLES[2:]]
    loaded = lab.done("load_stock", repo, settings={"HF_HUB_CACHE": str(tmp_path)}).result
    assert loaded == lab.models["3"]


def test_unchanged_push_makes_no_commit_and_sends_nothing(lab: RunLab, repo: str) -> None:
    first = lab.push(repo)
    assert first["is_new"]
    assert first["sent_bytes"] == sum(map(len, lab.checkpoint(3).values()))
    again = lab.push(repo)
    assert (again["is_new"], again["commit"], again["sent_bytes"]) == (False, first["commit"], 0)
    kinds = lab.kinds()
    assert kinds["commit"] == kinds["lfs_put"] == kinds["preupload"] == kinds["lfs_batch"] == 0
    assert lab.titles(repo) == [TITLES[0], TITLES[3]]


def test_push_takes_the_latest_or_the_best_and_a_message(lab: RunLab, repo: str) -> None:
    lab.push(repo)
    lab.push(repo, "best")
    lab.push(repo, 1, commit_message="The first", revision="old", private=True)
    assert lab.titles(repo) == [TITLES[0], TITLES[3], TITLES[2]]  # the least loss is that of step 2
    assert lab.titles(repo, "old")[-1] == "The first"
    assert lab.held(repo, "old") == lab.checkpoint(1)


def test_push_to_a_pull_request_leaves_main(lab: RunLab, repo: str) -> None:
    lab.push(repo, 1)
    pushed = lab.push(repo, 2, create_pr=True)
    assert pushed["pr_url"].endswith("/discussions/1")
    assert lab.held(repo) == lab.checkpoint(1)
    assert lab.held(repo, "refs/pr/1") == lab.checkpoint(2)


@pytest.mark.compat
def test_all_are_pushed_in_order_and_none_twice(lab: RunLab, repo: str) -> None:
    assert len(lab.push(repo, "all")) == 3
    assert lab.titles(repo) == TITLES
    commits = lab.view(repo).commits()
    for step in (1, 2, 3):
        assert lab.held(repo, commits[3 - step].oid) == lab.checkpoint(step)
    assert lab.push(repo, "all") == []
    assert lab.kinds()["commit"] == 0
    assert len(lab.push(f"{repo}-b", 2)) > 0
    assert len(lab.push(f"{repo}-b", "all")) == 1
    assert lab.titles(f"{repo}-b") == [TITLES[0], TITLES[2], TITLES[3]]
    assert len(lab.push(repo, "all", revision="copy")) == 0  # a new branch begins at main


def test_all_goes_on_after_a_checkpoint_that_is_gone_here(lab: RunLab, repo: str, tmp_path: Path) -> None:
    lab.push(repo, 2)
    lab.done("train", tmp_path / "moved", first=3)  # what a new machine saves: its first checkpoint is of step 3
    assert len(lab.push(repo, "all", run=tmp_path / "moved")) == 1
    assert lab.titles(repo) == [TITLES[0], TITLES[2], TITLES[3]]


def test_all_of_an_older_copy_is_refused(lab: RunLab, repo: str, tmp_path: Path) -> None:
    lab.push(repo)
    lab.done("train", tmp_path / "copy", last=2)
    outcome = lab.refused("push", tmp_path / "copy", repo, "all")
    assert outcome.error == "HubError"
    assert outcome.message == (
        f"'{repo}' is at the checkpoint of step 3, which is none of these and newer than all of them. Push to another "
        "revision; or, to put one in its place, give its step."
    )
    assert lab.titles(repo) == [TITLES[0], TITLES[3]]


def test_damaged_checkpoint_is_not_pushed(lab: RunLab, repo: str, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        for name, raw in lab.checkpoint(step).items():
            path = tmp_path / f"checkpoint-{step:08d}" / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(raw)
    optimizer = tmp_path / "checkpoint-00000002" / "optimizer.safetensors"
    damaged = bytearray(optimizer.read_bytes())
    damaged[60_000] ^= 1
    optimizer.write_bytes(damaged)
    for wanted in (2, "all"):
        outcome = lab.refused("push", tmp_path, repo, wanted)
        assert outcome.error == "IntegrityError"
        assert str(optimizer) in outcome.message
    assert lab.hub.bytes_up("lfs_put") == 0
    (tmp_path / "checkpoint-00000003" / "checkpoint.json").unlink()
    assert lab.refused("push", tmp_path, repo).error == "MissingShardError"


@pytest.mark.compat
def test_killed_push_leaves_the_old_checkpoint_and_the_next_one_sends_the_rest(lab: RunLab, repo: str) -> None:
    lab.push(repo, 1)
    lab.hub.clear_log()
    before = lab.held(repo)
    gate = threading.Event()
    fault = lab.hub.fail(Fault(match="POST commit", kind="slow", after_bytes=1_000, gate=gate))
    task = lab.start("push", lab.run, repo, 2)
    assert fault.reached.wait(60)
    task.kill()
    sent = sum(len(raw) for name, raw in lab.checkpoint(2).items() if name.endswith(".safetensors"))
    assert lab.hub.bytes_up("lfs_put") == sent
    assert lab.held(repo) == before
    gate.set()
    lab.push(repo, 2)
    assert lab.held(repo) == lab.checkpoint(2)
    assert lab.hub.bytes_up("lfs_put") == 0
    assert lab.titles(repo) == TITLES[:3]


@pytest.mark.compat
def test_run_resumes_exactly_on_an_empty_machine(lab: RunLab, repo: str, tmp_path: Path) -> None:
    commits = [one["commit"] for one in lab.push(repo, "all")]
    resumed = lab.resume(repo, tmp_path / "a")
    assert resumed["step"] == 3
    assert resumed["metrics"] == {"loss": 0.75}
    assert resumed["restored"] == lab.digests["3"]
    assert resumed["end"] == lab.digests["4"]
    assert resumed["path"].endswith(f"/snapshots/{commits[2]}")
    kinds = lab.kinds()
    assert kinds["info"] == 1
    assert kinds["resolve_head"] == 0
    older = lab.resume(f"{repo}@{commits[0]}", tmp_path / "b")
    assert (older["step"], older["restored"], older["end"]) == (1, lab.digests["1"], lab.digests["4"])
    # What is in the cache is not fetched again; a commit is not even asked for.
    assert lab.resume(repo, tmp_path / "a")["step"] == 3
    assert lab.kinds() == {"info": 1}
    assert lab.resume(f"{repo}@{commits[2]}", tmp_path / "a")["step"] == 3
    assert lab.kinds() == {}


def test_offline_the_cache_serves(lab: RunLab, repo: str, tmp_path: Path) -> None:
    lab.push(repo, 2)
    offline = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": True}
    outcome = lab.refused_resume(repo, tmp_path, settings=offline)
    assert outcome.error == "CheckpointNotFoundError"
    assert "offline mode is on" in outcome.message
    lab.resume(repo, tmp_path)
    lab.hub.clear_log()
    resumed = lab.done("restore", tmp_path / "no run", repo, settings=offline).result
    assert resumed["restored"] == lab.digests["2"]
    assert lab.hub.log == []


def test_what_is_no_training_checkpoint_is_told(lab: RunLab, repo: str, tmp_path: Path) -> None:
    model = {name: raw for name, raw in lab.checkpoint(2).items() if name in ("model.safetensors", "config.json")}
    lab.hub.create_repo(repo).commit(model, "A model")
    outcome = lab.refused_resume(repo, tmp_path)
    assert outcome.error == "CheckpointNotFoundError"
    assert f"'{repo}' (commit " in outcome.message
    assert ") holds no training checkpoint: there is no checkpoint.json. It holds 'model.safetensors'." in (
        outcome.message
    )
    assert lab.hub.bytes_down("storage_get") == 0


def test_repos_that_nobody_may_read_or_that_lack_are_told(lab: RunLab, repo: str, tmp_path: Path) -> None:
    assert lab.refused_resume(repo, tmp_path).error == "HubNotFoundError"
    lab.push(repo, 1)
    assert lab.refused_resume(f"{repo}@nowhere", tmp_path).error == "HubNotFoundError"
    lab.view(repo).private = True
    assert lab.refused_resume(repo, tmp_path, token="hf_read").error == "HubNotFoundError"
    assert lab.resume(repo, tmp_path, token="hf_write")["step"] == 1
    assert lab.refused("push", lab.run, repo, 2, token="hf_member").error == "HubAccessError"


@pytest.mark.compat
@pytest.mark.parametrize("name", ["optimizer.safetensors", "training_state.json"])
def test_corrupt_byte_on_the_way_restores_nothing(lab: RunLab, repo: str, tmp_path: Path, name: str) -> None:
    lab.push(repo, 2)
    raw = lab.checkpoint(2)[name]
    lab.view(repo).corrupt(name, at=len(raw) // 2)
    outcome = lab.refused_resume(repo, tmp_path)  # the state is as it was: the task looks
    assert outcome.error == "IntegrityError"
    assert outcome.message.startswith(f"'{name}' of '{repo}' arrived damaged")
    lab.view(repo).mend(name, raw)
    assert lab.resume(repo, tmp_path)["restored"] == lab.digests["2"]


def test_what_rotted_in_the_cache_is_told_and_fetched_anew_when_asked_for(
    lab: RunLab, repo: str, tmp_path: Path
) -> None:
    lab.push(repo, 2)
    path = Path(lab.resume(f"{repo}@main", tmp_path)["path"]) / "optimizer.safetensors"
    blob = path.resolve()
    assert blob != path  # the cache's own, to which the snapshot has a link
    raw = bytearray(blob.read_bytes())
    raw[-1] ^= 1
    blob.write_bytes(raw)
    outcome = lab.refused_resume(f"{repo}@main", tmp_path)
    assert outcome.error == "IntegrityError"
    assert outcome.message.endswith(
        f"to fetch it anew, run: hfshard pull {repo} --revision main --include '*' --force-download"
    )
    cache = {"HF_HUB_CACHE": str(tmp_path)}
    lab.done("pull", repo, revision="main", allow_patterns="*", force_download=True, settings=cache)
    assert lab.resume(repo, tmp_path)["restored"] == lab.digests["2"]


def test_file_that_somebody_changed_on_the_hub_restores_nothing(lab: RunLab, repo: str, tmp_path: Path) -> None:
    lab.push(repo, 2)
    raw = bytearray(lab.checkpoint(2)["state.safetensors"])
    raw[-1] ^= 1
    lab.view(repo).commit({"state.safetensors": bytes(raw)}, "Mine")
    outcome = lab.refused_resume(repo, tmp_path)
    assert outcome.error == "IntegrityError"
    assert "state.safetensors' is not the file that was saved" in outcome.message
    lab.push(repo, 2)  # puts it right
    assert lab.held(repo) == lab.checkpoint(2)


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
    lab: RunLab, repo: str, tmp_path: Path, kind: str
) -> None:
    hostile = HOSTILE[kind]
    lab.hub.create_repo(repo).commit({"checkpoint.json": hostile.raw, "notes.txt": b"mine"}, "Attack")
    assert lab.refused_resume(repo, tmp_path).error == hostile.error
    lab.push(repo, 2)
    assert lab.held(repo) == {**lab.checkpoint(2), "notes.txt": b"mine"}


def test_what_the_manifest_before_names_goes_unless_it_was_changed_or_is_a_users(lab: RunLab, repo: str) -> None:
    named = {"trainer_state.json": b"{}", "vocab.txt": b"a\n", "README.md": b"# Run\n", "big.safetensors": b"x" * 9}
    files = {**named, "checkpoint.json": manifest(named), "vocab.txt": b"changed\n", "notes.txt": b"never named"}
    lab.hub.create_repo(repo).commit(files, "A run")
    lab.push(repo, 2)
    left = {name: files[name] for name in ("vocab.txt", "README.md", "notes.txt")}
    assert lab.held(repo) == {**lab.checkpoint(2), **left}


def test_pull_brings_the_model_alone_or_all_that_is_asked_for(lab: RunLab, repo: str, tmp_path: Path) -> None:
    lab.push(repo, 3)
    lab.view(repo).commit({"tokenizer.json": b"{}\n"}, "Add the tokenizer")
    assert lab.done("pull", repo, tmp_path / "model").result is True
    model = {name: raw for name, raw in lab.checkpoint(3).items() if name.startswith(("model", "config"))}
    assert contents(tmp_path / "model") == {**model, "tokenizer.json": b"{}\n"}
    assert lab.done("pull", repo, tmp_path / "all", allow_patterns="*").result is True
    assert contents(tmp_path / "all") == {**lab.checkpoint(3), "tokenizer.json": b"{}\n"}


def test_saves_are_pushed_as_they_are_made(lab: RunLab, repo: str, tmp_path: Path) -> None:
    outcome = lab.done("train", tmp_path / "run", push_to_hub=repo, max_to_keep=1)
    assert outcome.result["error"] == ""
    assert lab.titles(repo) == TITLES
    assert lab.held(repo) == contents(tmp_path / "run" / "checkpoint-00000003")
    assert outcome.log == []


def test_push_that_fails_stops_no_save_and_the_next_one_is_pushed(lab: RunLab, repo: str, tmp_path: Path) -> None:
    lab.hub.fail(Fault(match="POST create_repo", kind="status", status=403, times=2))
    outcome = lab.done("train", tmp_path / "run", push_to_hub=f"{repo}@runs")
    assert outcome.result["error"] == ""  # the last one went well
    assert len(outcome.log) == 2
    assert outcome.log[0].startswith(
        f"WARNING hfshard.training.pushing.pusher: The checkpoint of step 1 is saved, but was not pushed to '{repo}': "
    )
    assert len(list((tmp_path / "run").glob("checkpoint-*/checkpoint.json"))) == 3
    assert lab.titles(repo, "runs") == [TITLES[0], TITLES[3]]


def test_error_of_the_last_push_is_raised_by_waiting(lab: RunLab, repo: str, tmp_path: Path) -> None:
    outcome = lab.done("train", tmp_path / "run", push_to_hub=repo, environment={"HF_TOKEN": "hf_read"})
    assert outcome.result["error"] == "HubAccessError"
    assert outcome.result["digests"] == lab.digests  # training went on, and nothing of it changed
    assert len(outcome.log) == 3
