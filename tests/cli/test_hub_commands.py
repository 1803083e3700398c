"""`hfshard push`, `hfshard pull` and `hfshard revisions`, on a directory that serves as a hub and on a Hub server."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import hfshard
from hfshard.cli.main import make_parser
from hfshard.hub.directory.directory_hub import DirectoryHub
from tests.cli.conftest import Run, save_example
from tests.saving.helpers import flip
from tests.servers.hub.hub_server import HubServer

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
FILES = [*SHARDS, "model.safetensors.index.json"]


def test_push_and_pull_through_a_directory_give_the_same_bytes(example: Path, tmp_path: Path, run: Run) -> None:
    hub = (tmp_path / "hub" / "name").as_uri()
    pushed = run.ok("push", example, hub)
    head = DirectoryHub.open(hub).resolve()
    assert pushed.startswith(f"{tmp_path}/hub/name/snapshots/{head}: ")
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
    assert "already has everything; nothing was sent" in run("push", example, tmp_path / "hub").stdout


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


@pytest.fixture
def two_revisions(tmp_path: Path, run: Run) -> DirectoryHub:
    """A directory hub with a commit of main that has the tag v1, and another one of dev."""
    hub = tmp_path / "hub"
    run("push", save_example(tmp_path / "one"), hub)
    assert run("revisions", hub, "--tag", "v1", "main").returncode == 0
    run("push", save_example(tmp_path / "two", metadata={"note": "other"}), hub, "--revision", "dev")
    return DirectoryHub.open(hub)


def test_revisions_are_listed_with_their_tags(two_revisions: DirectoryHub, run: Run) -> None:
    hub, first, second = two_revisions.root, two_revisions.resolve(), two_revisions.resolve("dev")
    shown = json.loads(run("revisions", hub, "--format", "json").stdout)["revisions"]
    named = [(item["name"], item["kind"], item["commit"]) for item in shown[:3]]
    assert named == [("main", "branch", first), ("dev", "branch", second), ("v1", "tag", first)]
    text = run("revisions", hub).stdout
    assert text.startswith("name")
    assert first[:12] in text


def test_deleted_revision_is_gone_once_it_is_pruned(two_revisions: DirectoryHub, run: Run) -> None:
    hub, first, second = two_revisions.root, two_revisions.resolve(), two_revisions.resolve("dev")
    assert run("revisions", hub, "--delete", "dev").returncode == 0
    assert run("revisions", hub, "--prune").returncode == 0
    left = json.loads(run("revisions", hub, "--format", "json").stdout)["revisions"]
    assert {item["commit"] for item in left} == {first}
    assert second not in os.listdir(f"{hub}/snapshots")


def test_main_is_not_deleted(two_revisions: DirectoryHub, run: Run) -> None:
    refused = run.fails(1, "revisions", two_revisions.root, "--delete", "main")
    assert refused.startswith("hfshard: Cannot delete 'main': ")


def test_failures_are_one_and_say_what_to_do(example: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "empty").mkdir()
    assert "There is no checkpoint in" in run.fails(1, "push", tmp_path / "empty", tmp_path / "hub")
    assert "hub" in run.fails(1, "revisions", example)
    run.fails(1, "pull", tmp_path / "hub", "--revision", "v9")
    run.fails(2, "push", tmp_path / "nowhere", tmp_path / "hub")


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
    assert "the token '…' that was passed" in run.fails(1, "pull", "org/name", "--token", "hf_wrong", **environment)


def test_a_push_over_http_shows_no_bar_without_a_terminal(
    example: Path, hub_server: HubServer, tmp_path: Path, child_environment: dict[str, str]
) -> None:
    network = {**hub_server.environment(home=tmp_path / "home"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    del network["HF_HUB_DISABLE_PROGRESS_BARS"]

    done = Run({**child_environment, **network})("push", example, "org/name")

    assert done.returncode == 0, done.stderr
    assert "Upload" not in done.stderr


def test_help_of_pull_says_that_the_checkpoint_is_always_pulled(run: Run) -> None:
    assert "besides the checkpoint, pull only these files" in run.ok("pull", "--help", COLUMNS="200")


def test_damaged_cache_is_told_and_mended_by_the_command_that_the_error_names(
    example: Path, hub_server: HubServer, tmp_path: Path, run: Run
) -> None:
    network = {"HF_HUB_OFFLINE": "0", **hub_server.environment(home=tmp_path / "home")}
    assert run("push", example, "org/name", **network).returncode == 0
    where = Path(run("pull", "org/name", "--verify", "full", **network).stdout.strip())
    flip((where / SHARDS[0]).resolve(), -1)
    damaged = run.fails(1, "pull", "org/name", "--verify", "full", **network)
    assert SHARDS[0] in damaged
    command = damaged.strip().rpartition("run: hfshard ")[2].split()
    assert command == ["pull", "org/name", "--force-download"]
    assert run(*command, "--verify", "full", **network).returncode == 0
    assert (where / SHARDS[0]).read_bytes() == (example / SHARDS[0]).read_bytes()


def test_a_bar_and_private_are_left_open_unless_they_are_asked_for() -> None:
    parser = make_parser()

    plain = parser.parse_args(["push", "here", "org/name"])
    asked = parser.parse_args(["push", "here", "org/name", "--no-progress", "--private"])

    assert (plain.progress, plain.private) == (None, None)
    assert (asked.progress, asked.private) == (False, True)
