"""`hfshard push`, `hfshard pull` and `hfshard revisions`, on a directory that serves as a hub and on a Hub server."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

import hfshard
from hfshard.hub.directory.directory_hub import DirectoryHub
from tests.cli.conftest import Run, save_example
from tests.hubserver.hub_server import HubServer

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
FILES = [*SHARDS, "model.safetensors.index.json"]


def test_push_and_pull_through_a_directory_give_the_same_bytes(example: Path, tmp_path: Path, run: Run) -> None:
    hub = (tmp_path / "hub" / "name").as_uri()
    pushed = run("push", example, hub)
    assert (pushed.returncode, pushed.stderr) == (0, "")
    head = DirectoryHub.open(hub).resolve()
    assert pushed.stdout.startswith(f"{tmp_path}/hub/name/snapshots/{head}: ")
    pulled = run("pull", hub, tmp_path / "copy")
    assert (pulled.returncode, pulled.stdout, pulled.stderr) == (0, f"{tmp_path}/copy\n", "")
    assert sorted(os.listdir(tmp_path / "copy")) == FILES
    assert all((tmp_path / "copy" / name).read_bytes() == (example / name).read_bytes() for name in FILES)
    assert run("verify", tmp_path / "copy").returncode == 0


def test_pull_without_a_directory_prints_where_it_is(example: Path, tmp_path: Path, run: Run) -> None:
    hub = tmp_path / "hub"
    run("push", example, hub)
    where = run("pull", hub).stdout.strip()
    assert where == DirectoryHub.open(hub).snapshot()
    assert sorted(hfshard.load_state_dict(where)) == ["embed", "layer.bias", "layer.weight", "step", "unembed"]


def test_second_push_sends_nothing_and_says_so(example: Path, tmp_path: Path, run: Run) -> None:
    first = json.loads(run("push", example, tmp_path / "hub", "--format", "json").stdout)
    again = json.loads(run("push", example, tmp_path / "hub", "--format", "json").stdout)
    assert (first["is_new"], again["is_new"], again["sent_bytes"]) == (True, False, 0)
    assert first["commit"] == again["commit"]
    assert "already holds all of it; nothing was sent" in run("push", example, tmp_path / "hub").stdout


def test_options_of_push_reach_the_commit(example: Path, tmp_path: Path, run: Run) -> None:
    (example / "notes.txt").write_text("for me")
    hub = tmp_path / "hub"
    done = run("push", example, hub, "--revision", "dev", "--message", "Title", "--description", "More",
               "--path-in-repo", "sub", "--exclude", "*.txt")  # fmt: skip
    assert done.returncode == 0, done.stderr
    tree = DirectoryHub.open(hub).tree("dev")
    assert tree is not None
    assert sorted(tree.files) == [f"sub/{name}" for name in FILES]
    [commit] = [item for item in DirectoryHub.open(hub).revisions() if item.kind == "commit"]
    assert commit.message == "Title"


@dataclass(frozen=True, slots=True)
class TwoRevisions:
    """A directory hub with two commits."""

    hub: Path
    first: str
    """The commit of `main`, with the tag v1."""
    second: str
    """The commit of `dev`."""


@pytest.fixture
def two_revisions(tmp_path: Path, run: Run) -> TwoRevisions:
    """Push twice, and tag in between."""
    hub = tmp_path / "hub"
    run("push", save_example(tmp_path / "one"), hub)
    assert run("revisions", hub, "--tag", "v1", "main").returncode == 0
    run("push", save_example(tmp_path / "two", metadata={"note": "other"}), hub, "--revision", "dev")
    opened = DirectoryHub.open(hub)
    return TwoRevisions(hub, opened.resolve(), opened.resolve("dev"))


def test_revisions_are_listed_with_their_tags(two_revisions: TwoRevisions, run: Run) -> None:
    hub, first, second = two_revisions.hub, two_revisions.first, two_revisions.second
    shown = json.loads(run("revisions", hub, "--format", "json").stdout)["revisions"]
    named = [(item["name"], item["kind"], item["commit"]) for item in shown[:3]]
    assert named == [("main", "branch", first), ("dev", "branch", second), ("v1", "tag", first)]
    text = run("revisions", hub).stdout
    assert text.startswith("name")
    assert first[:12] in text


def test_deleted_revision_is_gone_once_it_is_pruned(two_revisions: TwoRevisions, run: Run) -> None:
    hub = two_revisions.hub
    assert run("revisions", hub, "--delete", "dev").returncode == 0
    assert run("revisions", hub, "--prune").returncode == 0
    left = json.loads(run("revisions", hub, "--format", "json").stdout)["revisions"]
    assert {item["commit"] for item in left} == {two_revisions.first}
    assert two_revisions.second not in os.listdir(hub / "snapshots")


def test_main_is_not_deleted(two_revisions: TwoRevisions, run: Run) -> None:
    refused = run("revisions", two_revisions.hub, "--delete", "main")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("hfshard: 'main' is what ")


def test_failures_are_one_and_say_what_to_do(example: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "empty").mkdir()
    nothing = run("push", tmp_path / "empty", tmp_path / "hub")
    assert (nothing.returncode, nothing.stdout) == (1, "")
    assert "There is no checkpoint in" in nothing.stderr
    no_hub = run("revisions", example)
    assert (no_hub.returncode, no_hub.stdout) == (1, "")
    assert "hub" in no_hub.stderr
    missing = run("pull", tmp_path / "hub", "--revision", "v9")
    assert (missing.returncode, missing.stdout) == (1, "")
    bad = run("push", tmp_path / "nowhere", tmp_path / "hub")
    assert (bad.returncode, bad.stdout) == (2, "")


def test_push_and_pull_over_http(example: Path, hub_server: HubServer, tmp_path: Path, run: Run) -> None:
    environment = {"HF_HUB_OFFLINE": "0", **hub_server.environment(home=tmp_path / "home")}
    pushed = run("push", example, "org/name", "--private", **environment)
    assert pushed.returncode == 0, pushed.stderr
    head = hub_server.repo("org/name").commits()[0].oid
    assert pushed.stdout.startswith(f"{hub_server.endpoint}/org/name/commit/{head}: ")
    assert hub_server.repo("org/name").private
    pulled = run("pull", "org/name", tmp_path / "copy", **environment)
    assert (pulled.returncode, pulled.stdout) == (0, f"{tmp_path}/copy\n"), pulled.stderr
    assert all((tmp_path / "copy" / name).read_bytes() == (example / name).read_bytes() for name in FILES)
    refused = run("pull", "org/name", "--token", "hf_wrong", **environment)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "the token '…' that was passed" in refused.stderr


def test_damaged_cache_is_told_and_mended_by_the_command_that_the_error_names(
    example: Path, hub_server: HubServer, tmp_path: Path, run: Run
) -> None:
    environment = {"HF_HUB_OFFLINE": "0", **hub_server.environment(home=tmp_path / "home")}
    assert run("push", example, "org/name", **environment).returncode == 0
    where = Path(run("pull", "org/name", "--verify", "full", **environment).stdout.strip())
    blob = (where / SHARDS[0]).resolve()
    raw = bytearray(blob.read_bytes())
    raw[-1] ^= 1
    blob.write_bytes(raw)
    damaged = run("pull", "org/name", "--verify", "full", **environment)
    assert (damaged.returncode, damaged.stdout) == (1, "")
    assert SHARDS[0] in damaged.stderr
    command = damaged.stderr.strip().rpartition("run: hfshard ")[2].split()
    assert command == ["pull", "org/name", "--force-download"]
    assert run(*command, "--verify", "full", **environment).returncode == 0
    assert (where / SHARDS[0]).read_bytes() == (example / SHARDS[0]).read_bytes()
