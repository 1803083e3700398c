"""Odd directories and odd repos: a push does what it says with them, or says why not before it sends anything."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.hub.models import contents, digest_of_seed, make_model, saved
from tests.hub.push.push_hub import PushHub, differences
from tests.hubserver.hub_server import Fault

SINGLE, FOUR = "10MB", "20KB"


def index_of(*files: str) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": {f"w{n}": file for n, file in enumerate(files)}}).encode()


@pytest.mark.compat
def test_names_of_any_kind_arrive_as_they_are(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1)
    names = ("ünï cödé.json", "100%25.txt", "a b/c+d?e#f.json", "語/模型.bin", "[x]{y}&z=1.txt", "'q\".txt", "-of-.txt")
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"%d" % number)
    hub.push(folder, repo)
    assert differences(hub, repo, contents(folder)) == {}
    hub.push(folder, repo)
    assert hub.kinds() == {"create_repo": 1, "info": 1}


def test_worktree_of_git_is_pushed_without_the_file_that_makes_it_one(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1)
    expected = contents(folder)
    (folder / ".git").write_text("gitdir: ../elsewhere\n")
    hub.push(folder, repo)
    assert differences(hub, repo, expected) == {}


@pytest.mark.parametrize("name", ["a\\b.txt", "a\nb.txt", "folder\\x/c.txt"])
def test_name_that_no_pull_takes_is_refused_before_anything_is_asked(
    hub: PushHub, repo: str, tmp_path: Path, name: str
) -> None:
    folder = saved(tmp_path / "save", 1)
    expected = contents(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("1")
    outcome = hub.refused("push", folder, repo)
    assert outcome.error == "InvalidArgumentError" and f"{name!r} in '{folder}' has a backslash" in outcome.message
    assert hub.server.count() == 0

    hub.push(folder, repo, ignore_patterns=["*.txt"])
    assert differences(hub, repo, expected) == {}


@pytest.mark.parametrize("path", ["../up", "a/../../b", ".git", "a/.GIT/b", "a\\b"])
def test_folder_that_no_repo_may_have_is_refused_before_anything_is_asked(
    hub: PushHub, repo: str, tmp_path: Path, path: str
) -> None:
    outcome = hub.refused("push", saved(tmp_path / "save", 1), repo, path_in_repo=path)
    assert outcome.error == "InvalidArgumentError" and repr(path) in outcome.message
    assert hub.server.count() == 0


@pytest.mark.parametrize(
    "index",
    [
        index_of("../../secret.safetensors", "model-00001-of-00001.safetensors"),
        index_of("/etc/passwd.safetensors"),
        b"\xff\xfe garbage",
        b"[]",
        b"",
        b"{" * 100_000,
    ],
    ids=["outside", "absolute", "garbage", "list", "empty", "deep"],
)
@pytest.mark.parametrize("path", ["model.safetensors.index.json", "ema.safetensors.index.json"])
def test_hostile_index_on_the_hub_deletes_nothing_and_stops_nothing(
    hub: PushHub, repo: str, tmp_path: Path, path: str, index: bytes
) -> None:
    own = {"secret.safetensors": b"secret", "README.md": b"# Mine"}
    view = hub.server.create_repo(repo)
    view.commit({**own, path: index, "model-00001-of-00001.safetensors": b"stale"}, "odd")
    folder = saved(tmp_path / "save", 1)
    outcome = hub.push(folder, repo)
    # Whose the old shard is, only the index could tell that belongs to somebody else.
    kept = own | ({path: index, "model-00001-of-00001.safetensors": b"stale"} if path.startswith("ema") else {})
    assert differences(hub, repo, contents(folder) | kept) == {}
    assert any("can't be read" in line for line in outcome.log)
    assert hub.loads(repo) == digest_of_seed(1)


@pytest.mark.compat
def test_files_that_change_their_kind_are_pushed_and_recognised(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1)
    for grow in (b"small", b"grown" * 4000, b"small again", b""):  # the Hub of the tests has LFS above 10,000 bytes
        (folder / "vocab.txt").write_bytes(grow)
        hub.push(folder, repo)
        assert differences(hub, repo, contents(folder)) == {}
        assert hub.view(repo).files()["vocab.txt"].is_lfs == (len(grow) > 10_000)
        assert hub.push(folder, repo).result["is_new"] is False
    # a file of the same bytes that somebody made LFS, and the reverse, is left as it is
    view = hub.view(repo)
    view.commit({"note.bin": b"same"}, "by LFS")
    (folder / "note.bin").write_bytes(b"same")
    assert hub.push(folder, repo).result["is_new"] is False


@pytest.mark.compat
def test_same_bytes_under_several_names_are_sent_once(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1)
    weights = (folder / "model.safetensors").read_bytes()
    for name in ("copy.safetensors", "sub/copy.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(weights)
    (folder / "copy.json").write_bytes((folder / "config.json").read_bytes())
    (folder / "empty.json").touch()
    (folder / "void.json").touch()
    hub.push(folder, repo)
    assert differences(hub, repo, contents(folder)) == {}
    assert hub.server.bytes_up("lfs_put") == len(weights)


@pytest.mark.compat
def test_snapshot_of_the_cache_is_pushed_as_the_files_it_links_to(hub: PushHub, repo: str, tmp_path: Path) -> None:
    hub.push(saved(tmp_path / "save", 1, FOUR), repo)
    cache = tmp_path / "cache"
    hub.call("load_stock", repo, cache)
    (snapshot,) = cache.glob("models--*/snapshots/*")
    assert (snapshot / "config.json").is_symlink()
    hub.push(snapshot, f"{repo}-copy")
    assert differences(hub, f"{repo}-copy", contents(tmp_path / "save")) == {}


def test_links_to_nowhere_and_to_folders_and_pipes_are_left_out_aloud(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1)
    expected = contents(folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/private.json").write_text("{}")
    (folder / "linked").symlink_to(tmp_path / "other")
    (folder / "dangling.json").symlink_to(tmp_path / "nothing")
    os.mkfifo(folder / "pipe")
    outcome = hub.push(folder, repo)
    assert differences(hub, repo, expected) == {}
    assert [name for name in ("dangling.json", "linked", "pipe") if not any(name in line for line in outcome.log)] == []


@pytest.mark.compat
def test_pickles_are_pushed_and_replace_safetensors(hub: PushHub, repo: str, tmp_path: Path) -> None:
    import torch

    folder = tmp_path / "bin"
    model = make_model(2, stock=True)
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    hub.push(saved(tmp_path / "save", 1, FOUR), repo)
    hub.push(folder, repo)
    assert differences(hub, repo, contents(folder)) == {}
    assert hub.loads(repo) == digest_of_seed(2)


def test_directory_without_checkpoint_is_refused_before_anything_is_asked(
    hub: PushHub, repo: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert hub.refused("push", tmp_path, repo).error == "CheckpointNotFoundError"
    assert hub.refused("push", tmp_path / "nothing", repo).error == "CheckpointNotFoundError"
    assert hub.server.count() == 0


def test_patterns_choose_files_and_never_break_a_checkpoint(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1, FOUR)
    whole = contents(folder)
    (folder / "notes").mkdir()
    (folder / "notes/a.txt").write_text("a")
    (folder / "log.txt").write_text("log")
    hub.push(folder, repo, ignore_patterns=["*.txt", "notes/*"])
    assert differences(hub, repo, whole) == {}
    hub.push(folder, repo, ignore_patterns="log.txt")
    assert differences(hub, repo, whole | {"notes/a.txt": b"a"}) == {}
    assert hub.refused("push", folder, repo, allow_patterns="*.txt").error == "InvalidArgumentError"


@pytest.mark.parametrize("pattern", ["*00002-of*", "*.index.json"])
def test_patterns_that_leave_out_a_part_of_the_checkpoint_are_refused(
    hub: PushHub, repo: str, tmp_path: Path, pattern: str
) -> None:
    folder = saved(tmp_path / "save", 1, FOUR)
    outcome = hub.refused("push", folder, repo, ignore_patterns=pattern)
    assert outcome.error == "InvalidArgumentError" and "model" in outcome.message
    assert hub.server.count() == 0


def test_variant_that_patterns_leave_out_stays_on_the_hub(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(saved(tmp_path / "save", 1, FOUR, variant="fp16"), 1, SINGLE)
    hub.push(folder, repo)
    first = contents(folder)
    folder = saved(saved(tmp_path / "next", 2, FOUR, variant="fp16"), 2, SINGLE)
    hub.push(folder, repo, ignore_patterns="*fp16*")
    fp16 = {name: raw for name, raw in first.items() if "fp16" in name}
    assert len(fp16) == 5
    assert differences(hub, repo, {n: raw for n, raw in contents(folder).items() if "fp16" not in n} | fp16) == {}


@pytest.mark.compat
def test_gitignore_in_the_directory_leaves_out_no_shard(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1, FOUR)
    (folder / ".gitignore").write_text("*.safetensors\n")
    assert "Remove the line from the .gitignore" in hub.refused("push", folder, repo).message
    assert (hub.kinds()["lfs_put"], hub.kinds()["commit"]) == (0, 0)


@pytest.mark.compat
def test_very_many_small_files_need_few_open_files(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1)
    (folder / "parts").mkdir()
    for number in range(600):
        (folder / f"parts/{number}.json").write_text(f"{{{number}}}")
    hub.push(folder, repo, open_files=128)
    assert differences(hub, repo, contents(folder)) == {}


def test_strays_of_a_killed_save_stay_at_home(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1, FOUR)
    whole = contents(folder)
    (folder / "model-00001-of-00009.safetensors").write_bytes(b"stray")
    (folder / "pytorch_model.bin").write_bytes(b"outranked")
    outcome = hub.push(folder, repo)
    assert differences(hub, repo, whole) == {}
    assert sorted(line.split("'")[1] for line in outcome.log if "belongs to no checkpoint" in line) == [
        "model-00001-of-00009.safetensors",
        "pytorch_model.bin",
    ]


@pytest.mark.compat
def test_file_that_can_not_be_read_is_an_error_before_the_commit(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1)
    (folder / "tokenizer.json").symlink_to("/proc/self/mem")  # opens, and can't be read, not even by root
    outcome = hub.start("push", folder, repo, follow_links=True).outcome()
    assert outcome.error is not None
    assert len(hub.view(repo).commits()) == 1


def test_damaged_checkpoints_are_refused_before_anything_is_asked(hub: PushHub, repo: str, tmp_path: Path) -> None:
    def truncate(folder: Path) -> None:
        path = folder / "model-00002-of-00004.safetensors"
        path.write_bytes(path.read_bytes()[:-1])

    def mix(folder: Path) -> None:
        shard = "model-00002-of-00004.safetensors"
        (folder / shard).write_bytes((saved(tmp_path / "other", 2, FOUR) / shard).read_bytes())

    def lose(folder: Path) -> None:
        (folder / "model-00003-of-00004.safetensors").unlink()

    for number, damage in enumerate((truncate, mix, lose)):
        folder = saved(tmp_path / f"save-{number}", 1, FOUR)
        damage(folder)
        outcome = hub.refused("push", folder, repo)
        assert outcome.error in ("DamagedCheckpointError", "TruncatedShardError", "IntegrityError", "MissingShardError")
        assert "0000" in outcome.message
    assert hub.server.count() == 0


def test_name_that_is_no_utf8_is_an_error_that_shows_it(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1)
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.json")).touch()
    outcome = hub.refused("push", folder, repo)
    assert outcome.error == "InvalidArgumentError" and "\\udcff.json" in outcome.message
    assert hub.server.count() == 0


@pytest.mark.compat
@pytest.mark.parametrize("card", [b"\xff\xfe no text", b"\0", b"---\n: : [\n---\ntext"], ids=["utf8", "zero", "yaml"])
def test_card_that_can_not_be_read_is_left_alone_or_an_error(hub: PushHub, repo: str, card: bytes) -> None:
    hub.server.create_repo(repo).commit({"README.md": card}, "card")
    outcome = hub.refused("push_model", 1, repo, tags=["a"])
    assert outcome.error == "InvalidArgumentError" and "push without tags" in outcome.message
    assert hub.files(repo) == {"README.md"}
    hub.call("push_model", 1, repo)
    assert hub.view(repo).read("README.md") == card


def test_save_that_pushes_is_not_stopped_by_another_variant(hub: PushHub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "save", 1, FOUR, variant="fp16")
    (folder / "model.fp16-00001-of-00004.safetensors").write_bytes(b"damaged")
    hub.call("save_and_push", 2, folder, repo_id=repo)
    assert hub.files(repo) == {"README.md", "config.json", "model.safetensors"}
    assert hub.loads(repo) == digest_of_seed(2)


@pytest.mark.compat
def test_repo_whose_file_is_a_folder_of_ours_is_an_error(hub: PushHub, repo: str, tmp_path: Path) -> None:
    hub.server.create_repo(repo).commit({"config.json/x": b"1"}, "odd")
    outcome = hub.refused("push", saved(tmp_path / "save", 1), repo)
    assert outcome.error == "HubError" and "can't be a file and a folder" in outcome.message
    assert hub.files(repo) == {"config.json/x"}


@pytest.mark.compat
def test_weights_that_config_names_are_pushed_and_nothing_outranks_them(
    hub: PushHub, repo: str, tmp_path: Path
) -> None:
    hub.push(saved(tmp_path / "old", 5, FOUR), repo)
    folder = saved(tmp_path / "save", 1)
    (folder / "model.safetensors").rename(folder / "custom.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "custom.safetensors"}))
    hub.push(folder, repo)
    assert hub.files(repo) == {"config.json", "custom.safetensors"}
    assert hub.loads(repo) == digest_of_seed(1)


@pytest.mark.compat
def test_repo_or_branch_that_is_deleted_meanwhile_is_an_error_that_says_so(
    hub: PushHub, repo: str, tmp_path: Path
) -> None:
    hub.push(saved(tmp_path / "old", 1), repo, revision="dev")
    view = hub.view(repo)
    hub.server.fail(Fault(match="POST commit", kind="race", action=lambda: view._repo.set_ref("branches", "dev", None)))
    outcome = hub.refused("push", saved(tmp_path / "new", 2), repo, revision="dev")
    assert outcome.error == "HubNotFoundError" and "no revision 'dev'" in outcome.message
    assert "dev" not in view.branches
